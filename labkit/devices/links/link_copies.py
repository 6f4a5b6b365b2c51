"""Copies between the devices of one process: directly, and through the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Copies(Protocol):
    """Copies between the devices of one process."""

    count: int

    def claimed(self, source: int, target: int) -> bool | None: ...

    def copy(self, on_host: Tensor, source: int, target: int) -> Tensor:
        """Host to ``source``, from there to ``target``, and back to the host."""
        ...


class DeviceCopies:
    """Direct copies between devices of this process, such as all its accelerators."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.count = len(self.devices)

    def claimed(self, source: int, target: int) -> bool | None:
        module = torch.get_device_module(self.devices[source].type)
        ask = getattr(module, "can_device_access_peer", None)
        return None if ask is None else bool(ask(self.devices[source], self.devices[target]))

    def copy(self, on_host: Tensor, source: int, target: int) -> Tensor:
        return self._cross(on_host.to(self.devices[source]), target).cpu()

    def _cross(self, sent: Tensor, target: int) -> Tensor:
        return sent.to(self.devices[target])


class StagedCopies(DeviceCopies):
    """The same through the host's memory, for devices whose direct copies arrive wrong."""

    def _cross(self, sent: Tensor, target: int) -> Tensor:
        return super()._cross(sent.cpu(), target)

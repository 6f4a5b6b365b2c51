"""Copies between the devices of one process: directly, and through the host."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from labkit.devices.backends import backend


class Copies(Protocol):
    """Copies between the devices of one process."""

    count: int

    def claimed(self, source: int, target: int) -> bool | None: ...

    def copy(self, on_host: Tensor, source: int, target: int) -> Tensor:
        """Host to ``source``, from there to ``target``, and back to the host."""
        ...


class DeviceCopies:
    """Direct copies between the accelerators that this process sees."""

    def __init__(self, kind: str) -> None:
        self.backend = backend(kind)
        self.count = self.backend.count()

    def claimed(self, source: int, target: int) -> bool | None:
        ask = getattr(torch.get_device_module(self.backend.kind), "can_device_access_peer", None)
        return None if ask is None else bool(ask(source, target))

    def copy(self, on_host: Tensor, source: int, target: int) -> Tensor:
        sent = on_host.to(self.backend.torch_device(source))
        return self._cross(sent, target).cpu()

    def _cross(self, sent: Tensor, target: int) -> Tensor:
        return sent.to(self.backend.torch_device(target))


class StagedCopies(DeviceCopies):
    """The same through the host's memory, for devices whose direct copies arrive wrong."""

    def _cross(self, sent: Tensor, target: int) -> Tensor:
        return super()._cross(sent.cpu(), target)

"""How tensors travel between ranks: the way that links are measured and checked on.

A transport is an object of your own where a test, or another library, moves the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.devices.backends import backend

COLLECTIVES: dict[str, Callable[[Tensor, Tensor, dist.ProcessGroup], object]] = {
    "all_reduce": lambda whole, part, group: dist.all_reduce(whole, group=group),
    "all_gather": lambda whole, part, group: dist.all_gather_single(whole, part, group=group),
    "reduce_scatter": lambda whole, part, group: dist.reduce_scatter_single(
        part, whole, group=group
    ),
    "broadcast": lambda whole, part, group: dist.broadcast(whole, group_src=0, group=group),
}


class Transport(Protocol):
    """What measuring and checking need; ``rank`` and peers count within the group."""

    rank: int
    size: int
    device: torch.device

    def send(self, tensor: Tensor, peer: int) -> None: ...

    def receive(self, tensor: Tensor, peer: int) -> None: ...

    def collective(self, kind: str, whole: Tensor, part: Tensor) -> None: ...

    def synchronize(self) -> None: ...


class GroupTransport:
    """The transport of a process group: NCCL, XCCL or gloo."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = group.rank(), group.size()

    def send(self, tensor: Tensor, peer: int) -> None:
        dist.send(tensor, group=self.group, group_dst=peer)

    def receive(self, tensor: Tensor, peer: int) -> None:
        dist.recv(tensor, group=self.group, group_src=peer)

    def collective(self, kind: str, whole: Tensor, part: Tensor) -> None:
        COLLECTIVES[kind](whole, part, self.group)

    def synchronize(self) -> None:
        backend(self.device.type).synchronize([self.device])


class HostStaged(GroupTransport):
    """Through the hosts' memory: for devices whose direct messages arrive wrong, or not at all.

    Args:
        group: a gloo group of the same ranks, such as ``dist.new_group(backend="gloo")``.
    """

    def send(self, tensor: Tensor, peer: int) -> None:
        super().send(tensor.cpu(), peer)

    def receive(self, tensor: Tensor, peer: int) -> None:
        arrived = torch.empty(tensor.shape, dtype=tensor.dtype)
        super().receive(arrived, peer)
        tensor.copy_(arrived)

    def collective(self, kind: str, whole: Tensor, part: Tensor) -> None:
        on_host = whole.cpu(), part.cpu()
        super().collective(kind, *on_host)
        whole.copy_(on_host[0])
        part.copy_(on_host[1])

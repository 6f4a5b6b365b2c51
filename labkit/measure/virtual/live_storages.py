"""Which storages are alive, by a number of their own, and how many bytes they hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch


class VirtualOutOfMemoryError(torch.OutOfMemoryError):
    """A virtual device's memory cannot hold what an operator allocated."""


class LiveStorages:
    """Gives every storage a number for its lifetime and counts the bytes alive.

    torch reuses the address of a freed storage for the next one; the number tells the two apart.
    Bytes are the storages' own: no allocator rounding, no temporaries inside a kernel.

    Args:
        device_name: stands in the out-of-memory message.
        capacity_bytes: None for no limit.
    """

    def __init__(self, device_name: str, capacity_bytes: int | None = None) -> None:
        self.device_name = device_name
        self.capacity_bytes = capacity_bytes
        self.bytes = 0
        self.peak_bytes = 0
        self._next_number = 0
        self._known: dict[int, tuple[int, int, weakref.ref]] = {}  # address -> number, bytes, ref

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage; one not seen before counts from now on."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        return known[0] if known is not None else self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> int:
        address, size = storage._cdata, storage.nbytes()
        number = self._next_number
        self._next_number += 1
        reference = weakref.ref(storage, lambda _, address=address: self._forget(address))
        self._known[address] = (number, size, reference)
        self._grow(size)
        return number

    def _forget(self, address: int) -> None:
        known = self._known.pop(address, None)
        if known is not None:
            self.bytes -= known[1]

    def _grow(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self.peak_bytes:
            self.peak_bytes = self.bytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew after ``resize_``, by which FSDP frees and refills its buffers."""
        known = self._known.get(storage._cdata)
        if known is not None:
            number, size, reference = known
            self._known[storage._cdata] = (number, storage.nbytes(), reference)
            self._grow(storage.nbytes() - size)

    def check_capacity(self, operator: str, bytes_before: int) -> None:
        """Fail if what is alive exceeds the capacity.

        Raises:
            VirtualOutOfMemoryError: says what ``operator`` asked, what was held and what was left.
        """
        if self.capacity_bytes is None or self.bytes <= self.capacity_bytes:
            return
        left = max(0, self.capacity_bytes - bytes_before)
        raise VirtualOutOfMemoryError(
            f"{self.device_name} is out of memory: {operator} asked for "
            f"{_mib(self.bytes - bytes_before)}, {_mib(bytes_before)} of "
            f"{_mib(self.capacity_bytes)} are held, {_mib(left)} are left"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def tensors_in(thing: object) -> Iterator[torch.Tensor]:
    """Every tensor in a module, optimizer, tensor or nesting of lists, tuples and dicts.

    Gradients of the tensors come along; of a DTensor the local shard counts.
    """
    if isinstance(thing, torch.nn.Module):
        yield from tensors_in([*thing.parameters(), *thing.buffers()])
    elif isinstance(thing, torch.optim.Optimizer):
        yield from tensors_in([group["params"] for group in thing.param_groups])
        yield from tensors_in(list(thing.state.values()))
    elif isinstance(thing, torch.Tensor):
        yield thing.to_local() if hasattr(thing, "to_local") else thing
        if thing.is_leaf and thing.grad is not None:
            yield from tensors_in(thing.grad)
    elif isinstance(thing, dict):
        yield from tensors_in(list(thing.values()))
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from tensors_in(part)

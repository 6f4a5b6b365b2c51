"""The simulated devices of this process: which there are, what they hold, what moves between them.

They are ``lazy:0``, ``lazy:1``, ...: torch knows the device type ``lazy`` everywhere and runs
nothing on it. No other type serves. The autograd engine asks every type but ``cpu``, ``meta`` and
``lazy`` for a device guard, which Python can supply for a single device only; ``meta`` has kernels
of its own; and ``privateuseone`` under a new name becomes ``torch.accelerator`` for the whole
process.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

SIMULATED = "lazy"

_ordinals: list[int] = []


def ensure_ordinals(count: int) -> None:
    """Let there be at least ``count`` simulated devices."""
    _ordinals.extend(range(len(_ordinals), count))


def simulated_index(device: torch.device) -> int | None:
    """Ordinal of a simulated device, None for any other device.

    Raises:
        RuntimeError: there is no such simulated device.
    """
    if device.type != SIMULATED:
        return None
    index = device.index or 0
    if index not in _ordinals:
        there = f"{SIMULATED}:0 to {SIMULATED}:{len(_ordinals) - 1}"
        raise RuntimeError(f"invalid device ordinal: {device}; the simulated devices are {there}")
    return index


@dataclass(frozen=True)
class Transfer:
    """One copy of ``num_bytes`` from ``source`` to ``target``, such as ``cpu`` and ``lazy:0``."""

    source: str
    target: str
    num_bytes: int


class Block:
    """One storage on a simulated device, counted as long as any tensor there uses it.

    Views share a storage and therefore a block. The block holds the storage, so no other storage
    can take its address while the ledger knows it.
    """

    def __init__(self, storage: torch.UntypedStorage, index: int, ledger: Ledger) -> None:
        self.storage, self.index, self.ledger = storage, index, ledger
        self.num_bytes = storage.nbytes()
        ledger._add(index, self.num_bytes)

    def __del__(self) -> None:
        self.ledger._add(self.index, -self.num_bytes)


class Ledger:
    """Bytes per simulated device now and at peak, and every transfer in order."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self._live_bytes: defaultdict[int, int] = defaultdict(int)
        self._peak_bytes: defaultdict[int, int] = defaultdict(int)
        self._blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()

    def bytes_on(self, index: int) -> int:
        return self._live_bytes[index]

    def peak_bytes_on(self, index: int) -> int:
        """Largest ``bytes_on`` since the last ``reset``."""
        return max(self._peak_bytes[index], self._live_bytes[index])

    def block(self, host: torch.Tensor, index: int) -> Block:
        """The block under ``host``, a new one where device ``index`` has not seen its storage."""
        storage = host.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            block = self._blocks[storage._cdata] = Block(storage, index, self)
        elif block.num_bytes != storage.nbytes():  # resize_ and out= change a storage in place
            self._add(index, storage.nbytes() - block.num_bytes)
            block.num_bytes = storage.nbytes()
        return block

    def record_transfer(self, source: torch.device, target: torch.device, num_bytes: int) -> None:
        """Note a copy; a copy within one device is none."""
        if source != target:
            self.transfers.append(Transfer(str(source), str(target), num_bytes))

    def reset(self) -> None:
        """Forget the transfers and let the peaks start from what is held now."""
        self.transfers.clear()
        self._peak_bytes = self._live_bytes.copy()

    def _add(self, index: int, num_bytes: int) -> None:
        self._live_bytes[index] += num_bytes
        self._peak_bytes[index] = max(self._peak_bytes[index], self._live_bytes[index])


LEDGER = Ledger()  # of all tensors on simulated devices, as torch.cuda keeps one

"""Bytes that training state holds on a device, counted by storage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of a model's training state; a storage shared by several tensors counts once."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def held_bytes(module: nn.Module, optimizer: Optimizer | None = None) -> HeldBytes:
    """Count what ``module`` and ``optimizer`` hold right now.

    Parameters and buffers count as parameters. Gradients count where they exist, optimizer state
    after its first step. AdamW's step counters are host numbers of 4 bytes each and count too.
    """
    weights = [*module.parameters(), *module.buffers()]
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    states = optimizer.state.values() if optimizer else ()
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return HeldBytes(storage_bytes(weights), storage_bytes(gradients), storage_bytes(kept))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors; of a DTensor its local part's."""
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())

"""Data parallelism: FSDP2, or whole copies whose gradients are summed after the backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from labkit.models.transformer import Transformer


def shard_data(
    model: Transformer, mesh: DeviceMesh, *, reshard_after_forward: bool = True
) -> Transformer:
    """FSDP2 over one mesh axis, in place: each block one unit, embedding and head the last.

    Args:
        model: whole, or already divided by torch's tensor-parallel plan; make the optimizer after.
        mesh: one-dimensional; a rank keeps 1 / n of every parameter, gradient and moment.
        reshard_after_forward: give a block's gathered weights up until its backward. False keeps
            them: one all-gather less for each block and step, n times the weights in memory. A
            pipeline needs False: its backwards follow forwards of other microbatches.

    Raises:
        ValueError: the mesh has more than one axis.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh has the axes {mesh.mesh_dim_names}; give one, as mesh['data']")
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def own_rows(batch: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's equal share of a batch's rows.

    Raises:
        ValueError: the rows do not divide; unequal shares would weigh tokens unequally.
    """
    rows, ranks = len(batch), group.size()
    if rows % ranks:
        raise ValueError(
            f"batch={rows} rows must be divisible by {ranks} data-parallel ranks; "
            f"try batch={rows - rows % ranks or ranks}"
        )
    return batch.chunk(ranks)[group.rank()]


@torch.no_grad()
def sum_gradients(model: nn.Module, group: dist.ProcessGroup, *, divide_by: float = 1.0) -> None:
    """Add up the ranks' gradients in one all-reduce, then divide; for whole copies of a model.

    DDP does the same in pieces while the backward runs; in a pipeline its reducer fails, for it
    expects one backward a step.
    """
    gradients = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat.div_(divide_by)
    for gradient, total in zip(gradients, _like(flat, gradients), strict=True):
        gradient.copy_(total)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _like(flat: Tensor, gradients: list[Tensor]) -> Iterable[Tensor]:
    pieces = flat.split([gradient.numel() for gradient in gradients])
    return (piece.view_as(g) for piece, g in zip(pieces, gradients, strict=True))

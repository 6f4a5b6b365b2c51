"""Which part of the whole model each of a rank's parameters is, however it was divided.

Parameters come in three kinds: DTensors (torch's plans, FSDP2), the plain parts of the layers by
hand, which state their placements, and whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from labkit.parallel.sharding.tensor_layers import ColumnLinear, RowLinear


class Part(NamedTuple):
    """A parameter, its full name, and where it lies; ``mesh`` is None for a whole one."""

    name: str
    parameter: nn.Parameter
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]

    @property
    def shards(self) -> int:
        """Number of distinct parts that the parameter is cut into."""
        if self.mesh is None:
            return 1
        cut = [i for i, placement in enumerate(self.placements) if not placement.is_replicate()]
        return int(torch.tensor([self.mesh.size(i) for i in cut]).prod()) if cut else 1


def parts(model: nn.Module) -> Iterator[Part]:
    """Every parameter of this rank's model with where it lies; a tied one comes once."""
    by_hand = {
        id(parameter): (layer.mesh, (layer.placements[name],))
        for layer in model.modules()
        if isinstance(layer, ColumnLinear | RowLinear)
        for name, parameter in layer.named_parameters()
    }
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            yield Part(name, parameter, parameter.device_mesh, parameter.placements)
        else:
            yield Part(name, parameter, *by_hand.get(id(parameter), (None, ())))


def as_dtensor(local: Tensor, part: Part) -> Tensor:
    """``local``, which lies as the parameter of ``part`` does, as a DTensor that shares its memory.

    A whole parameter's stays plain.
    """
    if isinstance(local, DTensor) or part.mesh is None:
        return local
    return DTensor.from_local(local, part.mesh, part.placements, run_check=False)


def full(local: Tensor, part: Part) -> Tensor:
    """The whole tensor on every rank of the part's mesh, detached; communicates."""
    tensor = as_dtensor(local.detach(), part)
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    # one axis after the other: FSDP2's, which was cut last, first; torch warns of both at once
    placements = list(tensor.placements)
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local().clone()


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter of this rank's model, whole, by full name; all ranks of a mesh together."""
    return {part.name: full(part.parameter, part) for part in parts(model)}


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient of this rank's model, whole, by full name; all ranks of a mesh together.

    Raises:
        ValueError: a parameter that needs a gradient has none.
    """
    check_gradients(model)
    return {
        part.name: full(part.parameter.grad, part)
        for part in parts(model)
        if part.parameter.requires_grad
    }


def check_gradients(model: nn.Module) -> None:
    """Refuse a step that left a parameter without its gradient, as torch does without a word.

    Raises:
        ValueError: names the first and counts all.
    """
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if without:
        raise ValueError(f"{len(without)} parameters have no gradient, the first is {without[0]}")


def gradient_norm(
    model: nn.Module, mesh: DeviceMesh, *, pipeline_axis: str | None = None
) -> Tensor:
    """The 2-norm of all gradients of the whole model, on every rank the same.

    Each rank adds up its squares, a replica's divided by the number of its copies, and one
    all-reduce over the mesh adds up the ranks. (A rank's own ``clip_grad_norm_`` sees its stage
    only, and adds up a plain replica once per rank.)

    Args:
        model: this rank's part.
        mesh: all axes over which the model is spread or copied.
        pipeline_axis: the axis whose ranks hold different layers.
    """
    stages = mesh[pipeline_axis].size() if pipeline_axis else 1
    holders = mesh.size() // stages  # ranks that share one stage
    total = torch.zeros((), dtype=torch.float64)
    for part in parts(model):
        gradient = part.parameter.grad
        if gradient is not None:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            square = local.double().square().sum().cpu()
            total += square * part.shards / holders
    return _sum_over(total, mesh).sqrt()


def settle_gradients(model: nn.Module) -> None:
    """Sum the gradients that DTensor left as partial sums, in one all-reduce for each mesh.

    Sequence parallelism leaves those of norms and row-parallel biases so: each rank has seen its
    own tokens only. An optimizer would sum them again in each of its operators.
    """
    partial: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            partial.setdefault(gradient.device_mesh, []).append(parameter)
    for mesh, parameters in partial.items():
        locals_ = [parameter.grad.to_local() for parameter in parameters]
        sums = torch.cat([local.flatten() for local in locals_])
        dist.all_reduce(sums, group=mesh.get_group())
        for parameter, local, total in zip(
            parameters, locals_, sums.split([local.numel() for local in locals_]), strict=True
        ):
            parameter.grad = DTensor.from_local(
                total.view_as(local), mesh, parameter.placements, run_check=False
            )


def _sum_over(total: Tensor, mesh: DeviceMesh) -> Tensor:
    value = total.to(mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(value, group=mesh.get_group(axis))
    return value


@torch.no_grad()
def clip_gradients(model: nn.Module, norm: Tensor, largest: float) -> None:
    """Scale every gradient so that the whole model's ``norm`` is at most ``largest``."""
    scale = torch.clamp(largest / (norm + 1e-6), max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))

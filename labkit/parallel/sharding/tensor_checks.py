"""What tensor parallelism over t ranks asks of a model, checked before anything is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from labkit.models.config import ModelConfig


def legal_tensor_sizes(sizes: Mapping[str, int]) -> list[int]:
    """Every t that divides all of the sizes, ascending.

    >>> legal_tensor_sizes({"heads": 9, "kv_heads": 3, "width": 576})
    [1, 3]
    """
    return [t for t in range(1, min(sizes.values()) + 1) if not any(n % t for n in sizes.values())]


def check_tensor_sizes(t: int, sizes: Mapping[str, int]) -> None:
    """Refuse a t that does not divide every size.

    Args:
        t: ranks that share each layer, >= 1.
        sizes: what is cut into t equal parts, by name: heads, kv_heads, width, hidden,
            vocabulary, tokens ... Three heads on two ranks would give a wrong length and no error.

    Raises:
        ValueError: a size is no multiple of t; the message has the sizes of t that are legal.
    """
    if t < 1:
        raise ValueError(f"t={t} tensor-parallel ranks must be at least 1")
    wrong = [f"{name}={size}" for name, size in sizes.items() if size % t]
    if wrong:
        legal = ", ".join(map(str, legal_tensor_sizes(sizes)))
        raise ValueError(
            f"{' and '.join(wrong)} must be divisible by t={t} tensor-parallel ranks; "
            f"legal sizes of t are {legal}"
        )


def sharded_sizes(
    config: ModelConfig, *, sequence: bool = False, split_vocabulary: bool = False
) -> dict[str, int]:
    """The sizes of the lab's transformer that its tensor-parallel plan cuts."""
    sizes = {
        "heads": config.heads,
        "width": config.width,
        "hidden": config.expansion * config.width,
    }
    if split_vocabulary:
        sizes["vocabulary"] = config.vocabulary
    if sequence:
        sizes["context"] = config.context
    return sizes


def check_same_on_every_rank(mesh: DeviceMesh, settings: object) -> None:
    """Refuse ranks of a one-dimensional mesh that were given different settings.

    Ranks that disagree would hang in a collective or mix shapes without an error.

    Raises:
        ValueError: on every rank; the message has each rank's settings.
    """
    everyone: list[object] = [None] * mesh.size()
    dist.all_gather_object(everyone, repr(settings), group=mesh.get_group())
    if len(set(everyone)) > 1:
        listed = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(everyone))
        raise ValueError(f"the ranks disagree: {listed}")


def check_plan(module: nn.Module, plan: Mapping[str, ParallelStyle], t: int) -> None:
    """Check a plan for ``parallelize_module`` that is your own.

    torch only warns of a name that matches nothing, shards unevenly without a word, and fails at
    the first operator that mixes a DTensor with a plain tensor.

    Raises:
        ValueError: a name matches no module, a sharded dim is no multiple of t, or a style keeps
            DTensors as output while parameters or buffers outside the plan stay plain tensors.
    """
    planned = {name: _matching(module, name) for name in plan}
    for name, matches in planned.items():
        if not matches:
            near = ", ".join(n for n, _ in module.named_modules() if n)
            raise ValueError(f"plan names {name!r}, which is no module; there are: {near}")
        for found in matches:
            _check_sharded_dim(found, module.get_submodule(found), plan[name], t)
    for name, style in plan.items():
        if not getattr(style, "use_local_output", True):
            _check_keeps_no_company(module, name, style, planned, plan)


def _check_keeps_no_company(
    module: nn.Module,
    name: str,
    style: ParallelStyle,
    planned: Mapping[str, list[str]],
    plan: Mapping[str, ParallelStyle],
) -> None:
    """A style that keeps DTensors must not let them meet plain tensors."""
    distributed = tuple(
        f"{found}."
        for pattern, matches in planned.items()
        if isinstance(plan[pattern], ColwiseParallel | RowwiseParallel | SequenceParallel)
        for found in matches
    )
    tensors = [n for n, _ in [*module.named_parameters(), *module.named_buffers()]]
    plain = [n for n in tensors if not n.startswith(distributed)]
    if isinstance(style, PrepareModuleInput):  # its DTensors go into that module only
        plain = [n for n in plain if n.startswith(tuple(f"{m}." for m in planned[name]))]
    if plain:
        raise ValueError(
            f"{', '.join(plain)} would stay plain tensors and meet the DTensors that {name!r} "
            "passes on; plan them too, or set use_local_output=True"
        )


def _matching(module: nn.Module, pattern: str) -> list[str]:
    return [name for name, _ in module.named_modules() if name and fnmatchcase(name, pattern)]


def _check_sharded_dim(name: str, layer: nn.Module, style: ParallelStyle, t: int) -> None:
    if not isinstance(layer, nn.Linear | nn.Embedding):
        return
    columns = isinstance(style, ColwiseParallel)
    if not columns and not isinstance(style, RowwiseParallel):
        return
    # a Linear's columns are the rows of its weight (out, in); an Embedding's are (rows, columns)
    dim = int(columns == isinstance(layer, nn.Embedding))
    size = layer.weight.shape[dim]
    check_tensor_sizes(t, {f"{name}.weight.shape[{dim}]": size})

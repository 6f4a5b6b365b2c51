"""Checks that torch leaves to the user of a pipeline, each of a fault that raises nothing there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer


def check_optimizer(optimizer: Optimizer, modules: Iterable[nn.Module]) -> None:
    """Check by identity that the optimizer holds exactly the trained parameters of the modules.

    An optimizer built before the modules were moved, sharded or built anew updates weights that
    nobody uses, without an error.

    Raises:
        ValueError: a parameter is missing or foreign; the message names the first.
    """
    trained = {id(p): name for m in modules for name, p in m.named_parameters() if p.requires_grad}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for key, name in trained.items() if key not in held]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(trained)} parameters are not in the optimizer, the first is "
            f"{missing[0]}; build the optimizer last, from the parameters of these modules"
        )
    if foreign := len(held - trained.keys()):
        raise ValueError(
            f"the optimizer holds {foreign} parameters that no module trains; build it from the "
            "parameters of these modules"
        )


def parameters_without_gradient(stages: Mapping[int, nn.Module]) -> str | None:
    """A fault that names the first trained parameter whose gradient is None; None without one."""
    without = [
        f"{name} (stage {stage})"
        for stage, module in stages.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
    if not without:
        return None
    return (
        f"{len(without)} parameters have no gradient after the step, the first is {without[0]}; "
        "freeze it (requires_grad_(False)) if that is meant, else something cut the graph"
    )


def batch_dependent_layers(stages: Mapping[int, nn.Module]) -> tuple[str, ...]:
    """Full names of the layers whose result depends on which rows share a batch."""
    return tuple(
        f"{name or 'the module'} ({type(layer).__name__}, stage {stage})"
        for stage, module in stages.items()
        for name, layer in module.named_modules()
        if _mixes_rows(layer)
    )


def _mixes_rows(layer: nn.Module) -> bool:
    if isinstance(layer, _BatchNorm):
        return layer.training or layer.running_mean is None
    return isinstance(layer, _InstanceNorm) and layer.training and layer.track_running_stats


def warn_of_batch_dependence(names: Iterable[str], num_microbatches: int) -> None:
    """Warn of each such layer; with one microbatch nothing differs and nothing is said."""
    for name in names if num_microbatches > 1 else ():
        warnings.warn(
            f"{name} takes its statistics from each microbatch, 1/{num_microbatches} of the batch: "
            "results differ from one device; use LayerNorm, GroupNorm, or a frozen layer",
            stacklevel=4,
        )


def scaler_fault(scaler: GradScaler | None, num_ranks: int) -> str | None:
    """Why `scaler` cannot serve several ranks; None when it can, or when there is none.

    A plain `GradScaler` looks for infinities on its own rank: one stage would skip an optimizer
    step that the others take.
    """
    if scaler is None or num_ranks == 1 or isinstance(scaler, ShardedGradScaler):
        return None
    return (
        f"scaler is a {type(scaler).__name__}, which decides for its own rank alone; use "
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(device, process_group=...)"
    )


def scale_with(scaler: GradScaler, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The scaler's factor as a function; also makes its state on ranks that compute no loss."""
    scaler.scale(torch.zeros(1, device=device))
    return scaler.scale

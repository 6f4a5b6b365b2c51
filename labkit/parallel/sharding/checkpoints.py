"""Checkpoints that any layout writes and any other reads, by full parameter name.

On ``torch.distributed.checkpoint``: every tensor is stored with its whole shape and the offsets of
its parts, so the ranks that read need not be cut as those that wrote. A checkpoint is written
beside and renamed when it is whole: a kill while saving leaves the one before as it was.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from labkit.parallel.sharding.shards import Part, as_dtensor, parts

# by parameter name, not by position: stages of a pipeline count their parameters from 0 each
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_checkpoint(folder: str | Path, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
    """Write model and optimizer of all ranks; call on every rank, with a folder that all see.

    Args:
        folder: of all checkpoints of one run; made if it is not there.
        step: number of finished training steps.
        model: this rank's part, under the names of the whole model.

    Returns:
        The checkpoint's own folder, ``step-00000012``.

    Raises:
        ValueError: there is a checkpoint of that step already.
    """
    home = Path(folder)
    whole, unfinished = home / f"step-{step:08d}", home / f".saving-{step:08d}"
    if whole.exists():
        raise ValueError(f"{whole} is there already; continue from it, or name another folder")
    if _rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
        unfinished.mkdir(parents=True)
    _barrier()
    state = _state(model, optimizer)
    state["about"] = json.dumps({"step": step, "config": _config(model)})
    _transfer(dcp.save, state, unfinished)
    if _rank() == 0:
        unfinished.rename(whole)
    _barrier()
    return whole


def load_checkpoint(folder: str | Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Read the latest whole checkpoint of a run into model and optimizer; call on every rank.

    Gradients are dropped. Every rank finds the same checkpoint as long as none is being saved.

    Returns:
        The number of training steps that it has behind it.

    Raises:
        ValueError: (on every rank) there is none, or it is of another model or another kind of
            optimizer; the message has the difference.
    """
    latest = latest_checkpoint(folder)
    if latest is None:
        raise ValueError(f"there is no whole checkpoint in {folder}")
    optimizer.zero_grad()
    state = _state(model, optimizer)
    about = {"about": ""}
    _transfer(dcp.load, about, latest)
    told = json.loads(about["about"])
    _check_same_model(latest, told["config"], state, model)
    _transfer(dcp.load, state, latest)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=_as_held(state["model"], model),
        optim_state_dict=_as_held(state["optimizer"], model),
        options=_OPTIONS,
    )
    return told["step"]


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The whole checkpoint with the most steps; None without any."""
    return max(Path(folder).glob("step-*"), default=None)


def _transfer(save_or_load: Callable, state: dict[str, Any], checkpoint: Path) -> None:
    alone = not dist.is_initialized()
    with warnings.catch_warnings():
        if alone:  # which torch warns of, though it is told
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save_or_load(state, checkpoint_id=checkpoint, no_dist=alone)


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Tensors under full names, parts as DTensors that share the parameters' memory."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    held = {part.name: part for part in parts(model)}
    return {
        "model": {
            name: as_dtensor(value, held[name]) if name in held else value
            for name, value in model_state.items()
        },
        "optimizer": {
            key: _optimizer_value(key, value, held) for key, value in optimizer_state.items()
        },
    }


def _optimizer_value(key: str, value: Any, held: Mapping[str, Part]) -> Any:
    """A moment lies as its parameter does; a step counter and a learning rate are whole."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    name = key.removeprefix("state.").rpartition(".")[0]
    return as_dtensor(value, held[name]) if name in held else value


def _as_held(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The state with parts of layers by hand as the plain tensors that they hold."""
    plain = {part.name for part in parts(model) if not isinstance(part.parameter, DTensor)}

    def held(key: str, value: Any) -> Any:
        own = key in plain or key.removeprefix("state.").rpartition(".")[0] in plain
        return value.to_local() if own and isinstance(value, DTensor) else value

    return {key: held(key, value) for key, value in state.items()}


def _check_same_model(
    checkpoint: Path, config: Mapping[str, int] | None, state: Mapping, model: nn.Module
) -> None:
    ours = _config(model)
    if config != ours:
        raise ValueError(f"{checkpoint} is of another model: {_difference(config, ours)}")
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    theirs = {name: tuple(m.size) for name, m in stored.items() if hasattr(m, "size")}
    whole = dict(_shapes(state))
    for others in _gather(whole):
        whole.update(others)
    if theirs != whole:
        raise ValueError(f"{checkpoint} does not fit: {_difference(theirs, whole)}")


def _shapes(state: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in ("model", "optimizer"):
        for name, value in state[part].items():
            if isinstance(value, Tensor):
                yield f"{part}.{name}", tuple(value.shape)


def _difference(stored: Mapping | None, ours: Mapping | None) -> str:
    """The first few entries that differ, as ``layers 8 in the checkpoint, 4 here``."""
    stored, ours = stored or {}, ours or {}
    names = [
        n for n in [*stored, *(n for n in ours if n not in stored)] if stored.get(n) != ours.get(n)
    ]
    listed = [
        f"{n} {stored.get(n, 'nothing')} in the checkpoint, {ours.get(n, 'nothing')} here"
        for n in names[:3]
    ]
    return "; ".join(listed) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


def _config(model: nn.Module) -> dict[str, int] | None:
    config = getattr(model, "config", None)
    return None if config is None else asdict(config)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _gather(thing: Any) -> list[Any]:
    if not dist.is_initialized():
        return [thing]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, thing)
    return everyone

"""Your own model on ranks held against one device: what both make of the same few steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from labkit.parallel.parity import compare, training_snapshot
from labkit.parallel.pipelining.stages import Chain
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.optimizer_rehearsal import adamw
from labkit.parallel.planning.own_chain import OwnChain
from labkit.parallel.planning.plan_training import train_choice

STEPS = 3


@dataclass(frozen=True)
class OwnRun:
    """What a rank's part of a model came to.

    Attributes:
        snapshot: loss, gradients, parameters and buffers of one step of SGD, as
            `training_snapshot` takes it, a tied weight under each of its names.
        losses: of the steps of AdamW that follow it.
    """

    snapshot: Mapping[str, Tensor]
    losses: tuple[float, ...]


def run_alone(chain: OwnChain) -> OwnRun:
    """The whole model in this process, by torch alone; the chain's blocks stay as they are."""
    whole = Chain(copy.deepcopy(chain.blocks))

    def backward() -> Tensor:
        loss = chain.loss_fn(whole(chain.inputs), chain.targets).mean()
        loss.backward()
        return loss

    optimizer = adamw(whole.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = backward()
        optimizer.step()
        return loss.item()

    return _run([whole], backward, step)


def run_choice(chain: OwnChain, choice: Choice, device: torch.device) -> OwnRun:
    """This rank's part under a choice; call it on every rank of the choice.

    The chain's blocks stay as they are.
    """
    blocks = copy.deepcopy(chain.blocks)
    training = train_choice(blocks, choice, device, loss_fn=chain.loss_fn)
    batch = chain.inputs, chain.targets

    def step() -> float:
        training.optimizer.zero_grad()
        return training.step(*batch)

    return _run(training.model.values(), partial(training.backward, *batch), step)


def _run(
    stages: Iterable[nn.Module],
    backward: Callable[[], Tensor | float],
    step: Callable[[], float],
) -> OwnRun:
    stages = list(stages)
    snapshot = training_snapshot(stages, backward)
    for stage in stages:
        for first, name in _second_names(stage):
            kinds = ("gradient of", "parameter", "buffer")
            both = [(f"{kind} {first}", f"{kind} {name}") for kind in kinds]
            snapshot |= {new: snapshot[old] for old, new in both if old in snapshot}
    snapshot = {name: tensor.cpu() for name, tensor in snapshot.items()}
    return OwnRun(snapshot, tuple(step() for _ in range(STEPS)))


def _second_names(stage: nn.Module) -> Iterator[tuple[str, str]]:
    """(first name, a further one) of each parameter and buffer that has several."""
    names: dict[int, str] = {}
    for named in (stage.named_parameters, stage.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            first = names.setdefault(id(tensor), name)
            if name != first:
                yield first, name


def differences(alone: OwnRun, by_rank: Mapping[int, OwnRun]) -> dict[str, float]:
    """The largest relative differences of all ranks from one device.

    Returns:
        For ``loss``, ``gradient``, ``parameter`` and, if there is one, ``buffer``: of any tensor,
        over the tensor's largest element; for ``later losses``: of the steps of AdamW.

    Raises:
        ValueError: a tensor of the one device's is on no rank; the message names it.
    """
    held = {name for run in by_rank.values() for name in run.snapshot}
    if missing := sorted(alone.snapshot.keys() - held):
        raise ValueError(f"{len(missing)} tensors are on no rank, the first is {missing[0]}")
    found = {
        kind: max(_difference(alone, run, kind) for run in by_rank.values())
        for kind in dict.fromkeys(name.split(" ")[0] for name in alone.snapshot)
    }
    later = (zip(alone.losses, run.losses, strict=True) for run in by_rank.values())
    found["later losses"] = max(abs(b / a - 1) for pairs in later for a, b in pairs)
    return found


def _difference(alone: OwnRun, run: OwnRun, kind: str) -> float:
    own = {name: t for name, t in run.snapshot.items() if name.split(" ")[0] == kind}
    if not own:  # a stage of activations alone has no weights
        return 0.0
    return compare({name: alone.snapshot[name] for name in own}, own).max_rel_error

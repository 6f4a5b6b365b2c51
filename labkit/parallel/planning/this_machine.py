"""The CPU at hand for the planner: learnt from what one rank does alone, held against two together.

A CPU shared with other programs is hard to time. So each timed step also notes how long its rank
was ready and had no core; the reading that counts is the fastest of many, and says how far it was
disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labkit.devices.profiles import Machine
from labkit.measure.core_waits import waited_s
from labkit.measure.step_trace import StepReading
from labkit.measure.timeline import Timeline
from labkit.measure.virtual.calibration import (
    LinkFit,
    calibrate,
    measure_link,
    with_measured_costs,
)
from labkit.measure.virtual.operator_rates import OperatorRates, learn_rates
from labkit.measure.virtual.virtual_step import record_step
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.plan_training import Model, train_choice
from labkit.parallel.sharding.layouts import AXES, Layout

CPU = torch.device("cpu")
LINK_TRIES = 4
QUIET = 0.01  # of a step


def learn_this_machine(
    model: Model, inputs: Tensor, targets: Tensor, microbatches: Sequence[int] = (1, 2, 8)
) -> tuple[Machine, OperatorRates]:
    """What operators and messages cost here; call it on all CPU ranks at once, of one thread each.

    Every rank trains the whole model alone, all at the same time, so that what they take from each
    other (caches, memory bandwidth) is in the costs. No layout over several ranks is run.

    Args:
        microbatches: into how many the batch is cut, one after the other.

    Returns:
        For `plan`: its devices, and ``rates.cost`` for its cost.
    """
    mesh = _alone()
    learnt = []
    for m in microbatches:
        training = train_choice(model, Choice(Layout(microbatches=m)), CPU, mesh=mesh)
        step = partial(training.step, inputs, targets)
        held = [training.model, training.optimizer]
        learnt.append(record_step(step, hold=held, warm_up=2, timed=8, group=dist.group.WORLD))
    here = calibrate(_least_disturbed_link(), dist.get_world_size())
    return here, learn_rates(map(with_measured_costs, learnt))


def _least_disturbed_link() -> LinkFit:
    """Whatever else runs can only slow a message."""
    tries = [measure_link(repeats=8) for _ in range(LINK_TRIES)]
    return LinkFit(
        min(fit.latency_s for fit in tries),
        median(fit.bandwidth_bytes_per_s for fit in tries),
        min(fit.host_s for fit in tries),
    )


def _alone() -> DeviceMesh:
    """A mesh of this rank only; each rank has its own."""
    sizes = (dist.get_world_size(), *[1] * len(AXES))
    return init_device_mesh("cpu", sizes, mesh_dim_names=("everyone", *AXES))[AXES]


@dataclass(frozen=True)
class CpuStep:
    """A step on one rank.

    Attributes:
        wall_s: from a common start.
        waited_s: its threads were ready and had no core, in all; None where the system does not
            tell.
    """

    wall_s: float
    waited_s: float | None


def time_in_turn(
    model: Model,
    choices: Sequence[Choice],
    inputs: Tensor,
    targets: Tensor,
    *,
    enough: int = 4,
    most_rounds: int = 24,
) -> dict[Choice, tuple[CpuStep, ...]]:
    """Time a step of each choice, then of each again, and so on; all CPU ranks call it together.

    A choice of one device is run by every rank for itself.

    Args:
        enough: undisturbed steps of a choice, after which it is not timed any more.
        most_rounds: of which it gives up hope.
    """
    alone = _alone()
    steps = {
        choice: partial(
            train_choice(model, choice, CPU, mesh=alone if choice.layout.ranks == 1 else None).step,
            inputs,
            targets,
        )
        for choice in choices
    }
    timed: dict[Choice, list[CpuStep]] = {choice: [] for choice in choices}
    quiet = dict.fromkeys(choices, 0)
    for _ in range(most_rounds):
        for choice in (c for c in choices if quiet[c] < enough):
            steps[choice]()  # what ran before has left other things in the caches
            timed[choice].append(_timed(steps[choice]))
            quiet[choice] += _is_quiet_everywhere(timed[choice][-1])
    return {choice: tuple(found) for choice, found in timed.items()}


def _timed(step: Callable[[], object]) -> CpuStep:
    dist.barrier()
    before_s, started_s = waited_s(), time.perf_counter()
    step()
    wall_s = time.perf_counter() - started_s
    # a thread that has ended takes its waiting with it
    return CpuStep(wall_s, None if before_s is None else max(0.0, waited_s() - before_s))


def _is_quiet_everywhere(step: CpuStep) -> bool:
    """Whether no rank was kept waiting; the ranks agree, so that all go on or none does."""
    share = torch.tensor(0.0 if step.waited_s is None else step.waited_s / step.wall_s)
    dist.all_reduce(share, dist.ReduceOp.MAX)
    return share.item() < QUIET


@dataclass(frozen=True)
class LeastDisturbed:
    """The fastest of the timed steps of each choice.

    Attributes:
        readings: for `back_test`.
        waited: the share of a step in which a rank had no core, median of all steps and ranks: on a
            busy machine even a step that had its core shared the caches. None where the system does
            not tell.
    """

    readings: Mapping[Choice, StepReading]
    waited: float | None


def least_disturbed(by_rank: Mapping[int, Mapping[Choice, Sequence[CpuStep]]]) -> LeastDisturbed:
    """Join what `time_in_turn` found on the ranks; of a step its slowest rank counts."""
    readings, shares = {}, []
    for choice in next(iter(by_rank.values())):
        together = list(zip(*(timed[choice] for timed in by_rank.values()), strict=True))
        step_s = min(max(step.wall_s for step in ranks) for ranks in together)
        nobody = Timeline((), choice.layout.ranks, "measured:cpu")
        readings[choice] = StepReading(nobody, step_s, (None,) * choice.layout.ranks)
        shares += [
            None if step.waited_s is None else step.waited_s / step.wall_s
            for ranks in together
            for step in ranks
        ]
    return LeastDisturbed(readings, None if None in shares else median(shares))

"""What no schedule can beat, and the laws that the known schedules obey.

Symbols as in the literature: p ranks, m microbatches, v stages per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.parallel.scheduling.replay import StepCosts, receiving_rank
from labkit.parallel.scheduling.schedules import Action, Schedule


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Idle share of a flushed pipeline step (GPipe and 1F1B alike).

    Every stage works m (F + B) and the step lasts (m + p - 1) (F + B): the first microbatch reaches
    the last stage after p - 1 forwards, and p - 1 backwards lead back.

    Args:
        num_stages: pipeline depth p, >= 1, one stage per rank.
        num_microbatches: m, >= 1; m < p is legal.

    Returns:
        (p - 1) / (m + p - 1): 0 without a pipeline, below 1 always.

    Raises:
        ValueError: a size is below 1.

    >>> bubble_fraction(num_stages=4, num_microbatches=8)
    0.2727272727272727
    """
    return interleaved_bubble_fraction(num_stages, num_microbatches, chunks=1)


def interleaved_bubble_fraction(num_ranks: int, num_microbatches: int, chunks: int) -> float:
    """Idle share of interleaved 1F1B with v stages per rank and m a multiple of p.

    Filling and draining take p - 1 chunks of a v-th of a rank's work. Source: Narayanan et al. 2021
    (Megatron-LM), section 2.2.2: bubble time over ideal time is (p - 1) / (v m).

    Raises:
        ValueError: a size is below 1.

    >>> interleaved_bubble_fraction(num_ranks=4, num_microbatches=8, chunks=2)
    0.15789473684210525
    """
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "chunks": chunks}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be >= 1")
    return (num_ranks - 1) / (chunks * num_microbatches + num_ranks - 1)


@dataclass(frozen=True)
class LowerBounds:
    """Seconds that one step needs at least, whatever the order of actions.

    Attributes:
        work_s: all work shared out evenly: the sum of all actions and optimizer steps over p.
        busiest_rank_s: for some rank, the way of the first microbatch to it, all its own work, and
            the way of the last input gradient from it to stage 0 and its optimizer.
        one_microbatch_s: forward and backward of a single microbatch, messages included, and the
            optimizer of stage 0.
    """

    work_s: float
    busiest_rank_s: float
    one_microbatch_s: float

    @property
    def step_time_s(self) -> float:
        """The strongest of the three."""
        return max(self.work_s, self.busiest_rank_s, self.one_microbatch_s)


def lower_bounds(schedule: Schedule, costs: StepCosts) -> LowerBounds:
    """Bounds for the actions and the placement of `schedule`; their order plays no part.

    Derivation of `busiest_rank_s`: rank r cannot start before some microbatch has passed the stages
    before its lowest stage s, and then has all its own work before it. Its last input gradient (B
    or I) has behind it the backwards of stages s - 1 ... 0; only its own W may come later still.
    Overheads are left out and messages counted once per hop, so the bounds hold with them too.
    """
    cheapest = _cheapest_actions(schedule, costs)
    own = [sum(map(costs.of_action, order)) for order in schedule.actions]
    optimizer = [costs.of_optimizer(rank) for rank in range(schedule.num_ranks)]
    through = _walk(schedule, cheapest, costs, range(schedule.num_stages))
    return LowerBounds(
        work_s=(sum(own) + sum(optimizer)) / schedule.num_ranks,
        busiest_rank_s=max(
            _rank_bound(schedule, costs, cheapest, rank) for rank in range(schedule.num_ranks)
        ),
        one_microbatch_s=sum(through) + optimizer[schedule.rank_of_stage[0]],
    )


def _rank_bound(
    schedule: Schedule, costs: StepCosts, cheapest: dict[tuple[int, str], Action], rank: int
) -> float:
    order = schedule.actions[rank]
    if not order:
        return 0.0
    lowest = min(schedule.stages_of_rank(rank))
    before, behind = _walk(schedule, cheapest, costs, range(lowest))
    urgent = sum(costs.of_action(a) for a in order if a.kind != "W")
    weights = sum(costs.of_action(a) for a in order if a.kind == "W")
    own_end = weights + costs.of_optimizer(rank)
    return before + urgent + max(behind + costs.of_optimizer(schedule.rank_of_stage[0]), own_end)


def _walk(
    schedule: Schedule,
    cheapest: dict[tuple[int, str], Action],
    costs: StepCosts,
    stages: Sequence[int],
) -> tuple[float, float]:
    """Seconds of one microbatch forward through `stages` and back, messages out included."""
    forward = backward = 0.0
    for stage in stages:
        F, B = cheapest[stage, "F"], cheapest[stage, "B"]
        forward += costs.of_action(F) + _message(schedule, costs, F)
        backward += costs.of_action(B)
        if stage + 1 < schedule.num_stages:  # the gradient that this stage waited for
            backward += _message(schedule, costs, cheapest[stage + 1, "B"])
    return forward, backward


def _message(schedule: Schedule, costs: StepCosts, action: Action) -> float:
    return 0.0 if receiving_rank(action, schedule) is None else costs.of_transfer(action)


def _cheapest_actions(schedule: Schedule, costs: StepCosts) -> dict[tuple[int, str], Action]:
    """Per stage its cheapest forward and its cheapest B or I: costs may differ by microbatch."""
    best: dict[tuple[int, str], Action] = {}
    for action in schedule:
        if action.kind != "W":
            key = (action.stage, "F" if action.kind == "F" else "B")
            if key not in best or costs.of_action(action) < costs.of_action(best[key]):
                best[key] = action
    return best

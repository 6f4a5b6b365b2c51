"""Run a schedule on a clock: what each action costs goes in, a timeline comes out.

Nothing is executed and nothing here imports torch, so a replay's provenance is `predicted`.

Rules of the clock: a rank runs its actions in the schedule's order, each when its inputs are
there; a message leaves when its data is ready and its directed link is free, and takes
`transfer_s`; messages on different links overlap, and overlap with computing unless
`sender_waits`; stages on the same rank exchange for free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from labkit.measure.timeline import Span, Timeline
from labkit.parallel.scheduling.schedule_checks import execution_order, inputs_of, peak_per_rank
from labkit.parallel.scheduling.schedules import Action, Kind, Schedule

SPAN_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
ActionCost = Mapping[Kind, float] | Mapping[tuple[int, Kind], float] | Callable[[Action], float]


@dataclass(frozen=True)
class StepCosts:
    """Seconds that the parts of one step take.

    Args:
        action_s: per kind `{"F": 1.0, "B": 2.0}`, per stage and kind `{(0, "F"): 1.0, ...}`, or a
            function of the `Action`.
        transfer_s: one message between ranks; a number, or a function of the `Action` whose result
            is sent (the activation of an F, the gradient of a B or I).
        sender_waits: whether the sending rank computes nothing while it sends.
        overhead_per_action_s: spent before each action without computing (launch, bookkeeping).
        overhead_per_step_s: spent on every rank before its first action.
        optimizer_s: the optimizer step behind a rank's last action; a number, or one per rank.
    """

    action_s: ActionCost
    transfer_s: float | Callable[[Action], float] = 0.0
    sender_waits: bool = False
    overhead_per_action_s: float = 0.0
    overhead_per_step_s: float = 0.0
    optimizer_s: float | tuple[float, ...] = 0.0

    def of_action(self, action: Action) -> float:
        """Seconds that `action` computes.

        Raises:
            ValueError: there is no cost for it, or it is negative.
        """
        if callable(self.action_s):
            return _not_negative(self.action_s(action), f"action {action}")
        for key in ((action.stage, action.kind), action.kind):
            if key in self.action_s:
                return _not_negative(self.action_s[key], f"action {action}")
        raise ValueError(
            f"no cost for action {action}: action_s has {sorted(map(str, self.action_s))}; add "
            f"{action.kind!r} or {(action.stage, action.kind)!r}"
        )

    def of_transfer(self, action: Action) -> float:
        """Seconds that the message with the result of `action` takes."""
        seconds = self.transfer_s(action) if callable(self.transfer_s) else self.transfer_s
        return _not_negative(seconds, f"the message behind {action}")

    def of_optimizer(self, rank: int) -> float:
        """Seconds of the optimizer step on `rank`."""
        per_rank = isinstance(self.optimizer_s, tuple)
        seconds = self.optimizer_s[rank] if per_rank else self.optimizer_s
        return _not_negative(seconds, f"the optimizer on rank {rank}")


def _not_negative(seconds: float, what: str) -> float:
    if seconds < 0:
        raise ValueError(f"{what} costs {seconds} s; a cost must be >= 0")
    return seconds


@dataclass(frozen=True)
class Replay:
    """A schedule on the clock.

    Attributes:
        schedule: what was replayed.
        timeline: spans of all ranks; the rest is derived from it.
    """

    schedule: Schedule
    timeline: Timeline

    @property
    def step_time_s(self) -> float:
        """From the start of the step to the last end on any rank, in seconds."""
        return self.timeline.step_time_s

    @property
    def bubble(self) -> float:
        """Idle share of all rank time: 0 is perfect, below 1 always."""
        return self.timeline.bubble

    @property
    def bubble_of_rank(self) -> tuple[float, ...]:
        """Idle share of each rank."""
        return tuple(1 - self.timeline.busy_share(r) for r in range(self.schedule.num_ranks))

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Most (stage, microbatch) pairs that each rank holds activations of at once."""
        return peak_per_rank(self.schedule)

    def __str__(self) -> str:
        lines = [
            f"{self.schedule.name}, m = {self.schedule.num_microbatches}: step "
            f"{self.step_time_s:.6g} s, bubble {self.bubble:.3f} ({self.timeline.provenance})"
        ]
        for rank, (bubble, peak) in enumerate(
            zip(self.bubble_of_rank, self.peak_in_flight, strict=True)
        ):
            lines.append(f"  rank {rank}: bubble {bubble:.3f}, at most {peak} in flight")
        return "\n".join(lines)


def replay(schedule: Schedule, costs: StepCosts, *, provenance: str = "predicted") -> Replay:
    """Place every action of `schedule` in time.

    Args:
        schedule: what runs where in which order.
        costs: seconds per action, message and overhead.
        provenance: where the costs come from, as shown beside every number of the timeline.

    Raises:
        ValueError: the schedule deadlocks, a cost is missing or negative, the number of optimizer
            costs is not the number of ranks, or the whole step costs nothing.

    >>> from labkit.parallel.scheduling.schedules import one_f_one_b
    >>> print(replay(one_f_one_b(2, 2), StepCosts({"F": 1.0, "B": 2.0})))
    1F1B, m = 2: step 9 s, bubble 0.333 (predicted)
      rank 0: bubble 0.333, at most 2 in flight
      rank 1: bubble 0.333, at most 1 in flight
    """
    _check_optimizer_costs(costs, schedule.num_ranks)
    clock = _Clock(schedule, costs)
    for action in execution_order(schedule):
        clock.run(action)
    clock.step_optimizers()
    if not max(clock.now):
        raise ValueError("every cost is 0, so the step takes no time; give action_s above 0")
    return Replay(schedule, Timeline(tuple(clock.spans), schedule.num_ranks, provenance))


def _check_optimizer_costs(costs: StepCosts, num_ranks: int) -> None:
    if isinstance(costs.optimizer_s, tuple) and len(costs.optimizer_s) != num_ranks:
        raise ValueError(
            f"optimizer_s has {len(costs.optimizer_s)} entries for {num_ranks} ranks; give one "
            "number, or one per rank"
        )


class _Clock:
    """The state of a replay: what time it is on each rank, and what has arrived where."""

    def __init__(self, schedule: Schedule, costs: StepCosts) -> None:
        self.schedule, self.costs = schedule, costs
        self.now = [0.0] * schedule.num_ranks
        self.link_free: dict[tuple[int, int], float] = {}
        self.done: dict[Action, float] = {}  # when its own rank has the result
        self.arrived: dict[Action, float] = {}  # when the neighbouring stage's rank has it
        self.spans: list[Span] = []
        for rank in range(schedule.num_ranks):
            self._spend(rank, costs.overhead_per_step_s, "step overhead", "wait")

    def run(self, action: Action) -> None:
        rank = self.schedule.rank_of_stage[action.stage]
        self.now[rank] = max(self.now[rank], self._inputs_there(action))
        self._spend(rank, self.costs.overhead_per_action_s, "overhead", "wait")
        label, kind = self.schedule.label(action), SPAN_KINDS[action.kind]
        self._spend(rank, self.costs.of_action(action), label, kind)
        self.done[action] = self.arrived[action] = self.now[rank]
        self._send(action, rank)

    def step_optimizers(self) -> None:
        for rank in range(self.schedule.num_ranks):
            self._spend(rank, self.costs.of_optimizer(rank), "opt", "optimizer")

    def _spend(self, rank: int, seconds: float, label: str, kind: str) -> None:
        if seconds:
            start = self.now[rank]
            self.now[rank] = start + seconds
            self.spans.append(Span(rank, start, self.now[rank], label, kind))

    def _inputs_there(self, action: Action) -> float:
        times = [0.0]
        for need in inputs_of(action, self.schedule.num_stages):
            when = self.done if need[0].stage == action.stage else self.arrived
            times.append(next(when[candidate] for candidate in need if candidate in when))
        return max(times)

    def _send(self, action: Action, source: int) -> None:
        target = receiving_rank(action, self.schedule)
        if target is None:
            return
        seconds, link = self.costs.of_transfer(action), (source, target)
        start = max(self.done[action], self.link_free.get(link, 0.0))
        self.link_free[link] = self.arrived[action] = start + seconds
        if self.costs.sender_waits:
            self.now[source] = start + seconds
        if seconds:
            label = f"send {self.schedule.label(action)}"
            stream = f"link {source} to {target}"
            self.spans.append(Span(source, start, start + seconds, label, "transfer", stream))


def receiving_rank(action: Action, schedule: Schedule) -> int | None:
    """The other rank that waits for the result of `action`; None when nobody or itself does."""
    step = {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
    stage = action.stage + step
    if not step or not 0 <= stage < schedule.num_stages:
        return None
    target = schedule.rank_of_stage[stage]
    return None if target == schedule.rank_of_stage[action.stage] else target

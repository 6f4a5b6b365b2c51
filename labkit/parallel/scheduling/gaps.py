"""Why a rank was idle: every gap of a timeline with its cause.

    rank 0  F0 F1 .  .  B0 B0 .  B1 B1     2-4 warm-up: for B0 of rank 1; 6-7 drain: for its B1
    rank 1  .  F0 B0 B0 F1 B1 B1 .  .      0-1 warm-up: for F0 of rank 0; 7-9 drain

A gap ends with an action. Until the last of its inputs has been computed elsewhere, the rank waits
for that: warm-up before its own first backward, drain behind its last forward, and imbalance in the
steady state between, where ranks of equal pace would not wait. From there until the message has
arrived it is transfer; whatever is left is overhead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from labkit.measure.timeline import COMPUTE_KINDS, Span, Timeline
from labkit.parallel.scheduling.fitted_costs import action_of, message_target
from labkit.parallel.scheduling.replay import receiving_rank
from labkit.parallel.scheduling.schedule_checks import inputs_of
from labkit.parallel.scheduling.schedules import Action, Schedule

CAUSES = ("warm-up", "drain", "imbalance", "transfer", "overhead")


@dataclass(frozen=True)
class Gap:
    """Seconds in which `rank` computed nothing, for one cause out of `CAUSES`."""

    rank: int
    start_s: float
    end_s: float
    cause: str

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def label_gaps(
    timeline: Timeline, schedule: Schedule, *, transfer_s: float = 0.0
) -> tuple[Gap, ...]:
    """Every gap of one step that ran as `schedule`, rank by rank in order of time.

    Busy time and gaps of a rank add up to the step time.

    Args:
        timeline: of one step.
        schedule: what ran.
        transfer_s: seconds per message, for pairs of ranks of which the timeline has no transfer
            spans (real devices do not show theirs).
    """
    step = _Step(timeline, schedule, transfer_s)
    return tuple(gap for rank in range(schedule.num_ranks) for gap in step.gaps_of(rank))


def seconds_by_cause(gaps: Iterable[Gap]) -> dict[str, float]:
    """Idle seconds per cause, over all given gaps.

    >>> seconds_by_cause([Gap(0, 0.0, 1.0, "drain"), Gap(1, 2.0, 2.5, "drain")])["drain"]
    1.5
    """
    totals = dict.fromkeys(CAUSES, 0.0)
    for gap in gaps:
        totals[gap.cause] += gap.duration_s
    return totals


class _Step:
    """One step's timeline, with what is needed to explain its gaps."""

    def __init__(self, timeline: Timeline, schedule: Schedule, transfer_s: float) -> None:
        self.timeline, self.schedule, self.transfer_s = timeline, schedule, transfer_s
        self.busy: dict[int, list[Span]] = defaultdict(list)
        self.done_s: dict[Action, float] = {}
        for span in sorted(timeline.spans, key=lambda span: (span.start_s, span.end_s)):
            if span.kind in COMPUTE_KINDS:
                self.busy[span.rank].append(span)
                if (action := action_of(span.label, span.rank, schedule)) is not None:
                    self.done_s[action] = span.end_s
        self.arrived_s = self._arrivals()

    def _arrivals(self) -> dict[Action, float]:
        """When each message was there: the k-th on a link is that of the k-th action that sends."""
        ends: dict[tuple[int, int], list[float]] = defaultdict(list)
        for span in sorted(self.timeline.spans, key=lambda span: span.start_s):
            if span.kind == "transfer" and (target := message_target(span)) is not None:
                ends[span.rank, target].append(span.end_s)
        arrivals = {}
        for rank, order in enumerate(self.schedule.actions):
            for action in order:
                target = receiving_rank(action, self.schedule)
                if target is not None and action in self.done_s:
                    seen = ends[rank, target]
                    guess = self.done_s[action] + self.transfer_s
                    arrivals[action] = seen.pop(0) if seen else guess
        return arrivals

    def gaps_of(self, rank: int) -> Iterator[Gap]:
        now, backward_began = self.timeline.start_s, False
        forwards_left = sum(action.kind == "F" for action in self.schedule.actions[rank])
        begun: set[Action] = set()
        for span in self.busy[rank]:
            action = action_of(span.label, rank, self.schedule)
            waiting = "imbalance" if forwards_left else "drain"
            waiting = waiting if backward_began else "warm-up"
            if span.start_s > now:
                yield from self._explain(rank, now, span.start_s, action, waiting)
            now = max(now, span.end_s)
            if action is not None:
                backward_began = backward_began or action.kind != "F"
                forwards_left -= action.kind == "F" and action not in begun
                begun.add(action)
        if self.timeline.end_s > now:
            yield Gap(rank, now, self.timeline.end_s, "drain")

    def _inputs(self, action: Action | None) -> Iterator[Action]:
        """What `action` needs; through an I that took no time, as the first stage's does, on."""
        if action is None:
            return
        for needed in chain(*inputs_of(action, self.schedule.num_stages)):
            yield needed
            if needed.kind == "I" and needed.stage == action.stage and needed not in self.done_s:
                yield from self._inputs(needed)

    def _explain(
        self, rank: int, start: float, end: float, action: Action | None, waiting: str
    ) -> Iterator[Gap]:
        """Cut the gap before `action` where its last foreign input was computed, and arrived."""
        foreign = [a for a in self._inputs(action) if a in self.arrived_s]
        foreign = [a for a in foreign if receiving_rank(a, self.schedule) == rank]
        computed = max((self.done_s[a] for a in foreign), default=start)
        arrived = max((self.arrived_s[a] for a in foreign), default=start)
        for until, cause in ((computed, waiting), (arrived, "transfer"), (end, "overhead")):
            until = min(until, end)
            if until > start:
                yield Gap(rank, start, until, cause)
                start = until

"""Read the costs of a schedule's actions off a timeline, so that its replay can be held against it.

The labels of a timeline name actions: F3, or 2F3 with the stage in front; messages are "send F3"
or "F3 to 1".
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from labkit.measure.timeline import COMPUTE_KINDS, Span, Timeline
from labkit.parallel.replay import StepCosts
from labkit.parallel.schedules import Action, Schedule

_ACTION = re.compile(r"(\d*)([FBIW])(\d+)$")
_MESSAGE = re.compile(r"(?:send (\w+)|(\w+) to \d+)$")


def action_of(label: str, rank: int, schedule: Schedule) -> Action | None:
    """The action that `label` names on `rank`; None when it names none.

    Raises:
        ValueError: it leaves the stage out on a rank that holds several, or is of another rank.

    >>> from labkit.parallel.schedules import gpipe
    >>> print(action_of("F3", rank=1, schedule=gpipe(2, 4)), action_of("opt", 1, gpipe(2, 4)))
    1F3 None
    """
    if (found := _ACTION.match(label)) is None:
        return None
    stages = schedule.stages_of_rank(rank)
    if not found[1] and len(stages) != 1:
        raise ValueError(
            f"label {label!r} names no stage and rank {rank} holds stages {stages}; "
            f"label it {stages[0]}{label}"
        )
    stage = int(found[1]) if found[1] else stages[0]
    if stage not in stages:
        raise ValueError(f"label {label!r} on rank {rank}, which holds stages {stages} only")
    return Action(stage, found[2], int(found[3]))


def costs_from_timeline(
    timeline: Timeline, schedule: Schedule, *, transfer_s: float | None = None
) -> StepCosts:
    """Mean costs of one step that ran as `schedule`, ready for `replay` and `waterfall`.

    An action that was interrupted by waiting has several spans; they count together. Work under
    other labels (optimizer, clearing gradients) becomes each rank's `optimizer_s`.

    Args:
        timeline: of one step.
        schedule: what ran.
        transfer_s: seconds per message; None takes the mean per kind and stage from the timeline's
            transfer spans, and 0 for what has none.

    Raises:
        ValueError: the timeline has another number of ranks, or lacks actions of the schedule.
    """
    if timeline.num_ranks != schedule.num_ranks:
        raise ValueError(
            f"the timeline has {timeline.num_ranks} ranks and the schedule {schedule.num_ranks}; "
            "give the schedule that ran"
        )
    busy = [span for span in timeline.spans if span.kind in COMPUTE_KINDS]
    seconds = _seconds_per_action(busy, schedule)
    if missing := [str(action) for action in schedule if action not in seconds]:
        raise ValueError(
            f"the timeline lacks {len(missing)} actions of {schedule.name!r}: "
            f"{', '.join(missing[:5])}; note a span for each"
        )
    others = [0.0] * schedule.num_ranks
    for span in busy:
        if action_of(span.label, span.rank, schedule) is None:
            others[span.rank] += span.duration_s
    if transfer_s is None:
        messages = _means(_seconds_per_message(timeline.spans, schedule))
        return StepCosts(
            _means(seconds),
            transfer_s=lambda action: messages.get((action.stage, action.kind), 0.0),
            optimizer_s=tuple(others),
        )
    return StepCosts(_means(seconds), transfer_s=transfer_s, optimizer_s=tuple(others))


def _seconds_per_action(spans: Iterable[Span], schedule: Schedule) -> dict[Action, float]:
    seconds: dict[Action, float] = defaultdict(float)
    for span in spans:
        if (action := action_of(span.label, span.rank, schedule)) is not None:
            seconds[action] += span.duration_s
    return seconds


def _seconds_per_message(spans: Iterable[Span], schedule: Schedule) -> dict[Action, float]:
    seconds: dict[Action, float] = defaultdict(float)
    for span in spans:
        found = _MESSAGE.match(span.label) if span.kind == "transfer" else None
        action = found and action_of(found[1] or found[2], span.rank, schedule)
        if action:
            seconds[action] += span.duration_s
    return seconds


def _means(seconds: dict[Action, float]) -> dict[tuple[int, str], float]:
    """Per (stage, kind), the mean over microbatches."""
    values: dict[tuple[int, str], list[float]] = defaultdict(list)
    for action, duration in seconds.items():
        values[action.stage, action.kind].append(duration)
    return {key: sum(found) / len(found) for key, found in values.items()}

"""Read the costs of a schedule's actions off a timeline, so that its replay can be held against it.

The labels of a timeline name actions: F3, or 2F3 with the stage in front. A message is a
transfer span of the sending rank whose label or stream ends in "to 1", the receiving rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from labkit.measure.timeline import COMPUTE_KINDS, Span, Timeline
from labkit.parallel.scheduling.replay import StepCosts, receiving_rank
from labkit.parallel.scheduling.schedules import Action, Schedule

_ACTION = re.compile(r"(\d*)([FBIW])(\d+)$")
_TARGET = re.compile(r"\bto (\d+)$")


def action_of(label: str, rank: int, schedule: Schedule) -> Action | None:
    """The action that `label` names on `rank`; None when it names none.

    Raises:
        ValueError: it leaves the stage out on a rank that holds several, or is of another rank.

    >>> from labkit.parallel.scheduling.schedules import gpipe
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


def message_target(span: Span) -> int | None:
    """The rank that a transfer span sends to; None when neither label nor stream says.

    >>> message_target(Span(0, 0.0, 1.0, "F0 to 1", "transfer"))
    1
    """
    found = _TARGET.search(span.label) or _TARGET.search(span.stream)
    return int(found[1]) if found else None


def costs_from_timeline(
    timeline: Timeline, schedule: Schedule, *, transfer_s: float | None = None
) -> StepCosts:
    """Mean costs of one step that ran as `schedule`, ready for `replay` and `waterfall`.

    An action that was interrupted by waiting has several spans; they count together. Work under
    other labels (optimizer, clearing gradients) becomes each rank's `optimizer_s`.

    Args:
        timeline: of one step.
        schedule: what ran.
        transfer_s: seconds per message; None takes the mean per pair of ranks from the timeline's
            transfer spans, and 0 for a pair without.

    Raises:
        ValueError: the timeline has another number of ranks, or lacks actions of the schedule.
    """
    if timeline.num_ranks != schedule.num_ranks:
        raise ValueError(
            f"the timeline has {timeline.num_ranks} ranks and the schedule {schedule.num_ranks}; "
            "give the schedule that ran"
        )
    busy = [span for span in timeline.spans if span.kind in COMPUTE_KINDS]
    seconds, others = _seconds_per_action(busy, schedule)
    if missing := [str(action) for action in schedule if action not in seconds]:
        raise ValueError(
            f"the timeline lacks {len(missing)} actions of {schedule.name!r}: "
            f"{', '.join(missing[:5])}; note a span for each"
        )
    transfer = transfer_s
    if transfer_s is None:
        mean_s = _mean_message_s(timeline)

        def transfer(action: Action) -> float:
            link = schedule.rank_of_stage[action.stage], receiving_rank(action, schedule)
            return mean_s.get(link, 0.0)

    return StepCosts(_means(seconds), transfer, optimizer_s=tuple(others))


def _seconds_per_action(
    spans: Iterable[Span], schedule: Schedule
) -> tuple[dict[Action, float], list[float]]:
    """Seconds of each action, and per rank those of all other work."""
    # the first stage has no input whose gradient it could compute: its I may be nothing at all
    seconds = {action: 0.0 for action in schedule if (action.stage, action.kind) == (0, "I")}
    others = [0.0] * schedule.num_ranks
    for span in spans:
        if (action := action_of(span.label, span.rank, schedule)) is None:
            others[span.rank] += span.duration_s
        else:
            seconds[action] = seconds.get(action, 0.0) + span.duration_s
    return seconds, others


def _mean_message_s(timeline: Timeline) -> dict[tuple[int, int], float]:
    durations: dict[tuple[int, int], list[float]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind == "transfer" and (target := message_target(span)) is not None:
            durations[span.rank, target].append(span.duration_s)
    return {link: sum(found) / len(found) for link, found in durations.items()}


def _means(seconds: dict[Action, float]) -> dict[tuple[int, str], float]:
    """Per (stage, kind), the mean over microbatches."""
    values: dict[tuple[int, str], list[float]] = defaultdict(list)
    for action, duration in seconds.items():
        values[action.stage, action.kind].append(duration)
    return {key: sum(found) / len(found) for key, found in values.items()}

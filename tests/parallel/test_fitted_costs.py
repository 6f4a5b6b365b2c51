"""Costs read off a timeline must give the timeline back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.measure.timeline import Span, Timeline
from labkit.parallel.scheduling.fitted_costs import action_of, costs_from_timeline
from labkit.parallel.scheduling.replay import StepCosts
from labkit.parallel.scheduling.replay import replay as run
from labkit.parallel.scheduling.schedules import (
    Action,
    gpipe,
    interleaved_one_f_one_b,
    naive,
    one_f_one_b,
)
from labkit.parallel.scheduling.zero_bubble import zero_bubble, zero_bubble_v

BUILDERS = [gpipe, one_f_one_b, interleaved_one_f_one_b, zero_bubble, zero_bubble_v]


def uneven(action):
    return 1.0 + action.stage / 4 + {"F": 0, "B": 1.5, "I": 0.5, "W": 0.25}[action.kind]


@pytest.mark.parametrize("build", BUILDERS)
def test_the_replay_of_costs_read_off_a_replay_is_the_same_replay(build):
    schedule = build(4, 8)
    costs = StepCosts(
        uneven,
        transfer_s=lambda action: (1 + schedule.rank_of_stage[action.stage]) / 8,
        optimizer_s=(1, 2, 3, 4),
    )
    first = run(schedule, costs)
    again = run(schedule, costs_from_timeline(first.timeline, schedule))
    assert len(again.timeline.spans) == len(first.timeline.spans)
    for old, new in zip(first.timeline.spans, again.timeline.spans, strict=True):
        assert (new.rank, new.label) == (old.rank, old.label)
        assert (new.start_s, new.end_s) == pytest.approx((old.start_s, old.end_s))


def test_an_action_in_several_pieces_counts_once_and_other_work_goes_to_the_optimizer():
    spans = (
        Span(0, 0.0, 1.0, "F0", "forward"),
        Span(0, 1.5, 2.0, "F0", "forward"),
        Span(0, 2.0, 4.0, "B0", "backward"),
        Span(0, 4.0, 4.5, "optimizer", "optimizer"),
        Span(0, 4.5, 4.75, "", "compute"),
        Span(0, 4.75, 9.0, "waiting", "wait"),
    )
    costs = costs_from_timeline(Timeline(spans, 1, "measured:cpu"), naive(1))
    assert costs.of_action(Action(0, "F", 0)) == 1.5
    assert costs.of_optimizer(0) == 0.75


def test_costs_are_means_over_microbatches():
    spans = tuple(
        Span(0, float(start), float(end), label, "compute")
        for label, start, end in [("F0", 0, 1), ("F1", 1, 4), ("B0", 4, 5), ("B1", 5, 6)]
    )
    costs = costs_from_timeline(Timeline(spans, 1, "measured:cpu"), gpipe(1, 2))
    assert costs.of_action(Action(0, "F", 0)) == costs.of_action(Action(0, "F", 1)) == 2


def test_messages_are_read_from_label_or_stream_and_can_be_given_instead():
    schedule = naive(2)
    first = run(schedule, StepCosts({"F": 1.0, "B": 2.0}, transfer_s=0.5)).timeline
    relabelled = [
        replace(s, label=f"to {1 - s.rank}", stream="network") if s.kind == "transfer" else s
        for s in first.spans
    ]
    for timeline in (first, replace(first, spans=tuple(relabelled))):
        assert costs_from_timeline(timeline, schedule).of_transfer(Action(0, "F", 0)) == 0.5
    given = costs_from_timeline(first, schedule, transfer_s=3.0)
    assert given.of_transfer(Action(0, "F", 0)) == 3.0


def test_the_first_stages_input_gradient_may_be_nothing_but_no_other_stages():
    schedule = zero_bubble(2, 2)
    whole = run(schedule, StepCosts({"F": 1.0, "I": 1.0, "W": 1.0})).timeline
    without = [s for s in whole.spans if s.rank == 1 or not s.label.startswith("I")]
    costs = costs_from_timeline(replace(whole, spans=tuple(without)), schedule)
    assert costs.of_action(Action(0, "I", 1)) == 0
    none = [s for s in whole.spans if not s.label.startswith("I")]
    with pytest.raises(ValueError, match="lacks 2 actions of 'zero bubble': 1I0, 1I1"):
        costs_from_timeline(replace(whole, spans=tuple(none)), schedule)


def test_a_label_with_its_stage_is_understood_where_a_rank_holds_one_stage_too():
    assert action_of("1F3", 1, gpipe(2, 4)) == action_of("F3", 1, gpipe(2, 4)) == Action(1, "F", 3)


def test_a_label_without_a_stage_is_refused_where_a_rank_holds_several():
    with pytest.raises(ValueError, match=r"'F3' names no stage and rank 0 .*\(0, 3\); .* 0F3"):
        action_of("F3", 0, zero_bubble_v(2, 4))


def test_a_label_of_another_ranks_stage_is_refused():
    with pytest.raises(ValueError, match=r"'0F3' on rank 1, which holds stages \(1,\) only"):
        action_of("0F3", 1, gpipe(2, 4))


def test_a_timeline_of_another_schedule_is_refused():
    timeline = run(gpipe(2, 2), StepCosts({"F": 1.0, "B": 2.0})).timeline
    with pytest.raises(ValueError, match="lacks 4 actions of 'GPipe': 0F2, 0B2, 1F2, 1B2"):
        costs_from_timeline(timeline, gpipe(2, 3))
    with pytest.raises(ValueError, match="timeline has 2 ranks and the schedule 3"):
        costs_from_timeline(timeline, gpipe(3, 2))

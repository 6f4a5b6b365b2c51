"""Idle time with its cause: by hand, and busy plus gaps equal to the step for every schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.measure.timeline import Span, Timeline
from labkit.parallel.scheduling.gaps import label_gaps, seconds_by_cause
from labkit.parallel.scheduling.replay import StepCosts, replay
from labkit.parallel.scheduling.schedules import gpipe, interleaved_one_f_one_b, naive, one_f_one_b
from labkit.parallel.scheduling.zero_bubble import zero_bubble, zero_bubble_v

BUILDERS = [gpipe, one_f_one_b, interleaved_one_f_one_b, zero_bubble, zero_bubble_v]
COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def written(gaps, rank):
    return [f"{g.start_s:g}-{g.end_s:g} {g.cause}" for g in gaps if g.rank == rank]


def test_the_gaps_of_one_f_one_b_with_two_ranks_are_those_drawn_by_hand():
    # rank 0 F0 F1 .  .  B0 B0 .  B1 B1     waits for B0 of rank 1, then for B1
    # rank 1 .  F0 B0 B0 F1 B1 B1 .  .
    gaps = label_gaps(replay(one_f_one_b(2, 2), StepCosts(COST)).timeline, one_f_one_b(2, 2))
    assert written(gaps, 0) == ["2-4 warm-up", "6-7 drain"]
    assert written(gaps, 1) == ["0-1 warm-up", "7-9 drain"]


def test_a_slow_second_stage_makes_the_first_wait_in_the_steady_state():
    costs = StepCosts({(0, "F"): 1, (0, "B"): 1, (1, "F"): 2, (1, "B"): 2})
    schedule = one_f_one_b(2, 4)
    gaps = label_gaps(replay(schedule, costs).timeline, schedule)
    # rank 0: F0 0-1 F1 1-2, B0 5-6, F2 6-7, B1 9-10, F3 10-11, B2 13-14, B3 17-18
    assert written(gaps, 0) == ["2-5 warm-up", "7-9 imbalance", "11-13 drain", "14-17 drain"]


def test_a_message_under_way_is_transfer_and_the_rest_is_overhead():
    costs = StepCosts({"F": 1.0, "B": 1.0}, transfer_s=0.5, overhead_per_action_s=0.25)
    gaps = label_gaps(replay(naive(2), costs).timeline, naive(2))
    assert written(gaps, 0) == [
        "0-0.25 overhead", "1.25-4.25 warm-up", "4.25-4.75 transfer", "4.75-5 overhead",
    ]  # fmt: skip
    assert written(gaps, 1) == [
        "0-1.25 warm-up", "1.25-1.75 transfer", "1.75-2 overhead", "3-3.25 overhead",
        "4.25-6 drain",
    ]  # fmt: skip


def test_each_message_of_a_link_is_matched_with_its_own_action():
    schedule = gpipe(2, 2)
    timeline = replay(schedule, StepCosts({"F": 1.0, "B": 1.0}, transfer_s=3.0)).timeline
    # the link carries F0 from 1 to 4 and F1 from 4 to 7
    assert written(label_gaps(timeline, schedule), 1)[:3] == [
        "0-1 warm-up", "1-4 transfer", "5-7 transfer",
    ]  # fmt: skip


def test_a_message_that_leaves_for_another_rank_explains_no_gap_here():
    schedule = zero_bubble(2, 1)
    costs = StepCosts(COST, transfer_s=8.0, overhead_per_action_s=0.25)
    gaps = label_gaps(replay(schedule, costs).timeline, schedule)
    # rank 1: F0 9.5-10.5, I0 10.75-11.75, and W0 at 12 while its I0 travels until 19.75
    assert "11.75-12 overhead" in written(gaps, 1)


def test_a_forward_in_two_pieces_is_one_forward():
    two = one_f_one_b(2, 4)
    costs = StepCosts({(0, "F"): 1, (0, "B"): 1, (1, "F"): 2, (1, "B"): 2})
    whole = replay(two, costs).timeline
    cut = [p for s in whole.spans for p in halves(s)]
    assert label_gaps(replace(whole, spans=tuple(cut)), two) == label_gaps(whole, two)


def halves(span):
    middle = (span.start_s + span.end_s) / 2
    return replace(span, end_s=middle), replace(span, start_s=middle)


def test_without_transfer_spans_the_given_time_of_a_message_counts():
    spans = (
        Span(0, 0.0, 1.0, "F0", "forward"),
        Span(1, 2.0, 3.0, "F0", "forward"),
        Span(1, 3.0, 4.0, "B0", "backward"),
        Span(0, 4.25, 5.0, "B0", "backward"),
    )
    gaps = label_gaps(Timeline(spans, 2, "measured:cpu"), naive(2), transfer_s=0.75)
    assert written(gaps, 0) == ["1-4 warm-up", "4-4.25 transfer"]
    assert written(gaps, 1) == ["0-1 warm-up", "1-1.75 transfer", "1.75-2 overhead", "4-5 drain"]


def test_a_pause_inside_an_action_or_before_the_optimizer_is_overhead():
    spans = (
        Span(0, 0.0, 1.0, "F0", "forward"),
        Span(0, 1.5, 2.0, "F0", "forward"),
        Span(0, 2.0, 3.0, "B0", "backward"),
        Span(0, 3.25, 4.0, "opt", "optimizer"),
    )
    gaps = label_gaps(Timeline(spans, 1, "measured:cpu"), naive(1))
    assert written(gaps, 0) == ["1-1.5 overhead", "3-3.25 overhead"]


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("p, m", [(1, 2), (2, 4), (4, 8)])
def test_busy_and_gaps_add_up_to_the_step_on_every_rank(build, p, m):
    schedule = build(p, m)
    costs = StepCosts(
        lambda a: COST[a.kind] + a.stage / 8, 0.25, overhead_per_action_s=0.125, optimizer_s=0.5
    )
    timeline = replay(schedule, costs).timeline
    gaps = label_gaps(timeline, schedule)
    for rank in range(p):
        idle = sum(gap.duration_s for gap in gaps if gap.rank == rank)
        assert timeline.busy_s(rank) + idle == pytest.approx(timeline.step_time_s)


@pytest.mark.parametrize("build", [gpipe, one_f_one_b, zero_bubble])
@pytest.mark.parametrize("p, m", [(2, 4), (4, 4), (4, 8), (8, 16)])
def test_equal_ranks_and_free_messages_wait_only_while_filling_and_draining(build, p, m):
    schedule = build(p, m)
    idle = seconds_by_cause(label_gaps(replay(schedule, StepCosts(COST)).timeline, schedule))
    assert idle["warm-up"] > 0
    assert idle["imbalance"] == idle["transfer"] == idle["overhead"] == 0


def test_a_first_stage_that_skips_its_i_waits_for_what_the_i_would_wait_for():
    costs = StepCosts(
        {(0, "F"): 1, (0, "I"): 0, (0, "W"): 2, (1, "F"): 1, (1, "I"): 1, (1, "W"): 1}
    )
    schedule = zero_bubble(2, 2)
    timeline = replay(schedule, costs).timeline
    spans = tuple(s for s in timeline.spans if (s.rank, s.label[0]) != (0, "I"))
    causes = seconds_by_cause(label_gaps(replace(timeline, spans=spans), schedule))
    assert causes["overhead"] == 0 and causes["warm-up"] > 0

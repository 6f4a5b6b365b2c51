"""Lower bounds that nothing beats and some schedules reach; a waterfall that always closes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.parallel.scheduling.bounds import bubble_fraction, lower_bounds
from labkit.parallel.scheduling.replay import StepCosts, replay
from labkit.parallel.scheduling.schedules import gpipe, interleaved_one_f_one_b, naive, one_f_one_b
from labkit.parallel.scheduling.waterfall import waterfall
from labkit.parallel.scheduling.zero_bubble import zero_bubble, zero_bubble_v

BUILDERS = [gpipe, one_f_one_b, zero_bubble, zero_bubble_v, interleaved_one_f_one_b]
SECONDS = st.integers(0, 9)


@st.composite
def schedules_with_costs(draw):
    build = draw(st.sampled_from(BUILDERS))
    p = draw(st.integers(1, 4))
    schedule = build(p, p * draw(st.integers(1, 3)))
    table = {
        (stage, kind): draw(st.integers(1, 9))
        for stage in range(schedule.num_stages)
        for kind in "FBIW"
    }
    back = {stage: draw(SECONDS) for stage in range(schedule.num_stages)}
    costs = StepCosts(
        table,
        transfer_s=lambda a: back[a.stage] / 2,
        sender_waits=draw(st.booleans()),
        overhead_per_action_s=draw(SECONDS) / 8,
        overhead_per_step_s=draw(SECONDS),
        optimizer_s=tuple(draw(SECONDS) for _ in range(p)),
    )
    return schedule, costs


@settings(max_examples=200, deadline=None)
@given(schedules_with_costs())
def test_no_replay_beats_any_lower_bound(case):
    schedule, costs = case
    bounds = lower_bounds(schedule, costs)
    assert replay(schedule, costs).step_time_s >= bounds.step_time_s - 1e-9


@settings(max_examples=200, deadline=None)
@given(schedules_with_costs())
def test_the_waterfall_closes(case):
    schedule, costs = case
    assert waterfall(schedule, costs).total_s == pytest.approx(
        replay(schedule, costs).step_time_s, rel=1e-12
    )


@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
@pytest.mark.parametrize("p, m", [(1, 1), (2, 1), (2, 4), (4, 8), (8, 3)])
def test_equal_stages_reach_the_bound_of_the_busiest_rank(build, p, m):
    costs = StepCosts({"F": 1.0, "B": 2.0})
    bounds = lower_bounds(build(p, m), costs)
    assert bounds.busiest_rank_s == replay(build(p, m), costs).step_time_s == 3 * (m + p - 1)
    assert bounds.work_s == 3 * m
    assert bounds.one_microbatch_s == 3 * p


def test_one_microbatch_through_uneven_stages_is_its_own_bound():
    costs = StepCosts({(0, "F"): 1, (0, "B"): 2, (1, "F"): 5, (1, "B"): 7}, transfer_s=0.5)
    assert lower_bounds(naive(2), costs).one_microbatch_s == replay(naive(2), costs).step_time_s
    assert lower_bounds(naive(2), costs).one_microbatch_s == 16


def test_the_way_of_one_microbatch_is_that_of_the_cheapest():
    costs = StepCosts(lambda action: 1.0 + action.microbatch)
    bounds = lower_bounds(gpipe(2, 3), costs)
    assert bounds.one_microbatch_s == 4
    # rank 1: 1 before, its own 2 (1 + 2 + 3), 1 behind; in truth the last one behind costs 3
    assert bounds.busiest_rank_s == 14 <= replay(gpipe(2, 3), costs).step_time_s


def test_the_optimizer_of_the_first_stage_comes_behind_the_last_gradient():
    costs = StepCosts({"F": 1.0, "B": 1.0}, optimizer_s=(4.0, 1.0))
    assert lower_bounds(naive(2), costs).busiest_rank_s == 8
    assert replay(naive(2), costs).step_time_s == 8


def test_zero_bubble_is_bounded_by_its_own_weights_not_by_the_way_back():
    costs = StepCosts({"F": 1.0, "I": 1.0, "W": 1.0})
    assert lower_bounds(zero_bubble(4, 8), costs).step_time_s == 3 + 24
    assert replay(zero_bubble(4, 8), costs).step_time_s == 27


def test_equal_stages_and_free_messages_have_only_a_bubble():
    parts = waterfall(one_f_one_b(4, 8), StepCosts({"F": 1.0, "B": 2.0}))
    assert (parts.imbalance_s, parts.transfer_s, parts.overhead_s) == (0, 0, 0)
    assert parts.bubble_s / parts.total_s == pytest.approx(bubble_fraction(4, 8))


def test_each_cause_lands_in_its_own_row():
    #  F = 1 and 3, B = 2 and 4 on two ranks, m = 2; balanced: F = 2, B = 3, step (2 + 1) * 5 = 15.
    table = {(0, "F"): 1, (0, "B"): 2, (1, "F"): 3, (1, "B"): 4}
    costs = StepCosts(table, 0.25, overhead_per_step_s=1.0)
    parts = waterfall(one_f_one_b(2, 2), costs)
    assert parts.ideal_s == 10
    assert parts.bubble_s == 5
    assert parts.imbalance_s == (1 + 7 + 7 + 2) - 15
    assert parts.transfer_s == 0.5
    assert parts.overhead_s == 1.0


def test_a_bubble_of_a_size_below_one_is_refused():
    with pytest.raises(ValueError, match="num_microbatches=0 must be >= 1"):
        bubble_fraction(2, 0)

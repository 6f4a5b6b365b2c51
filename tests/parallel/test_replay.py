"""Replays against timelines drawn by hand, and the laws of the bubble over many sizes."""

from __future__ import annotations

from itertools import product

import pytest

from labkit.parallel.scheduling.bounds import (
    bubble_fraction,
    interleaved_bubble_fraction,
    lower_bounds,
)
from labkit.parallel.scheduling.replay import StepCosts, replay
from labkit.parallel.scheduling.schedules import gpipe, interleaved_one_f_one_b, naive, one_f_one_b
from labkit.parallel.scheduling.zero_bubble import zero_bubble, zero_bubble_v

SIZES = list(product([1, 2, 3, 4, 8], [1, 2, 3, 4, 8, 16]))
COSTS = [{"F": 1.0, "B": 1.0}, {"F": 1.0, "B": 2.0}, {"F": 2.0, "B": 3.5}]
THIRDS = StepCosts({"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0})


def spans_of(run, rank, kinds=("forward", "backward", "weight", "optimizer", "wait", "transfer")):
    return [
        f"{s.label} {s.start_s:g}-{s.end_s:g}"
        for s in run.timeline.spans
        if s.rank == rank and s.kind in kinds
    ]


def test_one_f_one_b_with_two_ranks_is_the_timeline_drawn_by_hand():
    #        0  1  2  3  4  5  6  7  8  9
    # rank 0 F0 F1 .  B0 B0 .  B1 B1
    # rank 1 .  F0 B0 B0 F1 B1 B1
    run = replay(one_f_one_b(2, 2), StepCosts({"F": 1.0, "B": 2.0}))
    assert spans_of(run, 0) == ["F0 0-1", "F1 1-2", "B0 4-6", "B1 7-9"]
    assert spans_of(run, 1) == ["F0 1-2", "B0 2-4", "F1 4-5", "B1 5-7"]
    assert run.step_time_s == 9
    assert run.bubble_of_rank == pytest.approx((1 / 3, 1 / 3))


def test_zero_bubble_with_two_ranks_is_the_timeline_drawn_by_hand():
    run = replay(zero_bubble(2, 2), THIRDS)
    assert spans_of(run, 0) == ["F0 0-1", "F1 1-2", "I0 3-4", "W0 4-5", "I1 5-6", "W1 6-7"]
    assert spans_of(run, 1) == ["F0 1-2", "I0 2-3", "F1 3-4", "I1 4-5", "W0 5-6", "W1 6-7"]


def test_a_message_delays_the_next_stage_and_overlaps_with_computing():
    run = replay(gpipe(2, 2), StepCosts({"F": 1.0, "B": 1.0}, transfer_s=0.5))
    assert spans_of(run, 0) == [
        "F0 0-1", "send F0 1-1.5", "F1 1-2", "send F1 2-2.5", "B0 5-6", "B1 6-7",
    ]  # fmt: skip
    assert spans_of(run, 1, ("forward", "backward")) == [
        "F0 1.5-2.5", "F1 2.5-3.5", "B0 3.5-4.5", "B1 4.5-5.5",
    ]  # fmt: skip


def test_messages_on_one_link_queue_and_those_on_two_links_do_not():
    run = replay(gpipe(2, 2), StepCosts({"F": 1.0, "B": 1.0}, transfer_s=3.0))
    assert spans_of(run, 0, ("transfer",)) == ["send F0 1-4", "send F1 4-7"]
    assert spans_of(run, 1, ("transfer",)) == ["send B0 9-12", "send B1 12-15"]
    three = replay(gpipe(3, 2), StepCosts({"F": 1.0, "B": 1.0}, transfer_s=3.0))
    assert spans_of(three, 1, ("transfer",))[0] == "send F0 5-8"  # while F1 comes in, 4 to 7


def test_one_rank_sends_forwards_and_backwards_at_the_same_time():
    """Rank 1 of 3 under 1F1B: B0's gradient travels 9.5 to 11, F2's activation 10.5 to 12."""
    run = replay(one_f_one_b(3, 4), StepCosts({"F": 1.0, "B": 1.0}, transfer_s=1.5))
    streams = {s.label: (s.stream, s.start_s) for s in run.timeline.spans if s.rank == 1}
    assert streams["send B0"] == ("link 1 to 0", 9.5)
    assert streams["send F2"] == ("link 1 to 2", 10.5)  # not 11


def test_a_sender_that_waits_computes_nothing_meanwhile():
    run = replay(gpipe(2, 2), StepCosts({"F": 1.0, "B": 1.0}, transfer_s=0.5, sender_waits=True))
    assert spans_of(run, 0, ("forward",)) == ["F0 0-1", "F1 1.5-2.5"]


def test_transfer_times_can_depend_on_what_is_sent():
    only_back = StepCosts({"F": 1.0, "B": 1.0}, transfer_s=lambda a: 2.0 * (a.kind == "B"))
    assert replay(naive(2), only_back).step_time_s == 6


def test_stages_on_the_same_rank_exchange_for_free():
    run = replay(zero_bubble_v(1, 2), StepCosts({"F": 1, "I": 1, "W": 1}, transfer_s=100.0))
    assert run.step_time_s == 12
    assert run.bubble == 0


def test_costs_per_stage_and_as_a_function_agree():
    table = {(s, k): 1.0 + s + (k == "B") for s in range(3) for k in "FB"}
    by_table = replay(one_f_one_b(3, 5), StepCosts(table))
    by_function = replay(one_f_one_b(3, 5), StepCosts(lambda a: 1.0 + a.stage + (a.kind == "B")))
    assert by_table.timeline == by_function.timeline


def test_overhead_and_optimizer_are_in_the_step_but_only_the_optimizer_is_work():
    costs = StepCosts(
        {"F": 1.0, "B": 1.0},
        overhead_per_action_s=0.25,
        overhead_per_step_s=3.0,
        optimizer_s=(2.0, 1.0),
    )
    run = replay(naive(2), costs)
    assert spans_of(run, 0) == [
        "step overhead 0-3", "overhead 3-3.25", "F0 3.25-4.25", "overhead 6.75-7", "B0 7-8",
        "opt 8-10",
    ]  # fmt: skip
    assert run.step_time_s == 10
    assert run.timeline.busy_s(0) == 4
    assert run.timeline.busy_s(1) == 3


@pytest.mark.parametrize("p, m", SIZES)
@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
@pytest.mark.parametrize("cost", COSTS)
def test_the_bubble_of_gpipe_and_one_f_one_b_is_the_law(build, cost, p, m):
    run = replay(build(p, m), StepCosts(cost))
    assert run.bubble == pytest.approx(bubble_fraction(p, m))
    assert run.bubble_of_rank == pytest.approx((bubble_fraction(p, m),) * p)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("cost", COSTS)
def test_the_bubble_of_interleaving_is_the_law_for_whole_rounds(cost, p, rounds, v):
    run = replay(interleaved_one_f_one_b(p, rounds * p, chunks=v), StepCosts(cost))
    assert run.bubble == pytest.approx(interleaved_bubble_fraction(p, rounds * p, v))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_zero_bubble_leaves_a_third_of_the_waiting_when_f_i_and_w_cost_the_same(p, extra):
    m = p + extra
    run = replay(zero_bubble(p, m), THIRDS)
    assert run.step_time_s == 3 * m + p - 1
    assert replay(one_f_one_b(p, m), THIRDS).step_time_s == 3 * (m + p - 1)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("m", [2, 4, 8, 16])
@pytest.mark.parametrize("input_share", [0.3, 0.5, 0.7])
def test_zero_bubble_has_less_bubble_than_one_f_one_b(p, m, input_share):
    cost = {"F": 1.0, "B": 2.0, "I": 2 * input_share, "W": 2 - 2 * input_share}
    split = replay(zero_bubble(p, m), StepCosts(cost))
    full = replay(one_f_one_b(p, m), StepCosts(cost))
    assert split.bubble < full.bubble
    assert split.step_time_s < full.step_time_s


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_zero_bubble_v_waits_only_while_the_first_microbatch_walks_down_and_meets_its_bound(p):
    schedule = zero_bubble_v(p, 3 * p)
    assert replay(schedule, THIRDS).step_time_s == 6 * 3 * p + p - 1
    assert lower_bounds(schedule, THIRDS).step_time_s == 6 * 3 * p + p - 1


@pytest.mark.parametrize("build", [gpipe, one_f_one_b, zero_bubble, zero_bubble_v])
def test_busy_and_idle_make_up_the_step_on_every_rank(build):
    run = replay(build(4, 8), StepCosts({"F": 1.0, "B": 2.0, "I": 1.1, "W": 0.9}, 0.2))
    for rank in range(4):
        busy = run.timeline.busy_s(rank)
        assert busy + run.bubble_of_rank[rank] * run.step_time_s == pytest.approx(run.step_time_s)


def test_a_kind_without_a_cost_is_named_with_the_kinds_that_have_one():
    with pytest.raises(
        ValueError, match="no cost for action 1I0: action_s has .'B', 'F'.; add 'I'"
    ):
        replay(zero_bubble(2, 2), StepCosts({"F": 1.0, "B": 2.0}))


def test_a_negative_cost_is_refused():
    with pytest.raises(ValueError, match="action 0F0 costs -1.0 s; a cost must be >= 0"):
        replay(naive(1), StepCosts({"F": -1.0, "B": 2.0}))
    with pytest.raises(ValueError, match="the message behind 0F0 costs -2 s"):
        replay(naive(2), StepCosts({"F": 1.0, "B": 2.0}, transfer_s=-2))


def test_a_wrong_number_of_optimizer_costs_is_refused():
    with pytest.raises(ValueError, match="optimizer_s has 3 entries for 2 ranks"):
        replay(naive(2), StepCosts({"F": 1.0, "B": 1.0}, optimizer_s=(1.0, 1.0, 1.0)))


def test_a_step_that_costs_nothing_is_refused():
    with pytest.raises(ValueError, match="every cost is 0"):
        replay(naive(2), StepCosts({"F": 0.0, "B": 0.0}))

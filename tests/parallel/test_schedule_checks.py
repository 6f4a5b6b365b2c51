"""The checker must catch every way in which a schedule can be wrong, and name the place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.parallel.scheduling.schedule_checks import (
    check_schedule,
    execution_order,
    peak_held,
    peak_per_rank,
    peak_per_stage,
)
from labkit.parallel.scheduling.schedules import (
    Action,
    Schedule,
    interleaved_one_f_one_b,
    one_f_one_b,
)
from labkit.parallel.scheduling.zero_bubble import zero_bubble


def by_hand(*rows, num_microbatches=2):
    """A schedule of one stage per rank from rows such as "F0 F1 B0 B1"."""
    actions = tuple(
        tuple(Action(rank, word[0], int(word[1:])) for word in row.split())
        for rank, row in enumerate(rows)
    )
    return Schedule("hand", num_microbatches, tuple(range(len(rows))), actions)


def test_a_legal_schedule_written_by_hand_passes():
    check_schedule(by_hand("F0 F1 B0 B1", "F0 B0 F1 B1"))


def test_a_split_backward_beside_a_full_one_passes():
    check_schedule(by_hand("F0 F1 I0 B1 W0", "F0 I0 F1 W0 B1"))


def test_a_missing_backward_is_named():
    with pytest.raises(
        ValueError, match="rank 1: stage 1 runs F for microbatch 1; it must run F a"
    ):
        check_schedule(by_hand("F0 F1 B0 B1", "F0 B0 F1"))


def test_a_missing_microbatch_is_named():
    with pytest.raises(ValueError, match="rank 0: stage 0 runs nothing for microbatch 1"):
        check_schedule(by_hand("F0 B0", "F0 B0"))


def test_an_input_backward_without_its_weight_half_is_named():
    with pytest.raises(ValueError, match="stage 0 runs F I for microbatch 0"):
        check_schedule(by_hand("F0 I0", num_microbatches=1))


def test_a_full_backward_beside_its_halves_is_named():
    with pytest.raises(ValueError, match="stage 0 runs F B I W for microbatch 0"):
        check_schedule(by_hand("F0 B0 I0 W0", num_microbatches=1))


def test_an_action_that_runs_twice_is_named_with_both_positions():
    with pytest.raises(ValueError, match="rank 0, position 3: action 0F0 runs again.* position 0"):
        check_schedule(by_hand("F0 F1 B0 F0 B1", "F0 B0 F1 B1"))


def test_a_backward_before_its_forward_deadlocks():
    with pytest.raises(ValueError, match="rank 1, position 0: 1B0 waits for 1F0"):
        check_schedule(by_hand("F0 F1 B0 B1", "B0 F0 F1 B1"))


def test_a_weight_half_before_its_input_half_deadlocks():
    with pytest.raises(ValueError, match="rank 0, position 1: 0W0 waits for 0I0"):
        check_schedule(by_hand("F0 W0 I0", num_microbatches=1))


def test_two_ranks_that_wait_for_each_other_are_both_named():
    crossed = by_hand("F0 B0 F1 B1", "F0 F1 B0 B1")
    want = "rank 0, position 1: 0B0 waits for 1B0; rank 1, position 1: 1F1 waits for 0F1"
    with pytest.raises(ValueError, match=want):
        check_schedule(crossed)


def test_any_swap_of_unlike_neighbours_that_breaks_an_input_is_caught():
    """1F1B on the last stage runs F0 B0: swapping the two can never be legal."""
    good = one_f_one_b(3, 3)
    last = list(good.actions[2])
    last[0], last[1] = last[1], last[0]
    with pytest.raises(ValueError, match="deadlocks"):
        check_schedule(replace(good, actions=(*good.actions[:2], tuple(last))))


def test_the_execution_order_keeps_each_ranks_order_and_every_input_first():
    schedule = zero_bubble(3, 5)
    order = execution_order(schedule)
    for rank, actions in enumerate(schedule.actions):
        assert tuple(a for a in order if schedule.rank_of_stage[a.stage] == rank) == actions
    place = {action: i for i, action in enumerate(order)}
    assert all(place[Action(1, "I", i)] < place[Action(0, "I", i)] for i in range(5))


def test_the_peak_counts_a_microbatch_until_its_weight_half():
    assert peak_per_stage(by_hand("F0 I0 F1 I1 W0 W1")) == (2,)
    assert peak_per_stage(by_hand("F0 I0 W0 F1 I1 W1")) == (1,)


def test_the_peak_of_a_rank_adds_up_its_stages():
    schedule = interleaved_one_f_one_b(2, 2, chunks=2)
    assert str(schedule).splitlines()[1] == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert peak_per_stage(schedule) == (2, 2, 2, 1)
    assert peak_per_rank(schedule) == (4, 3)
    assert peak_held(schedule, [10, 10, 1, 1]) == (22, 21)


def test_a_wrong_number_of_sizes_is_refused():
    with pytest.raises(ValueError, match="size_of_stage has 3 entries for num_stages=2"):
        peak_held(one_f_one_b(2, 2), [1, 2, 3])

"""Who sends what to whom in which order, on tables written by hand."""

from __future__ import annotations

import pytest

from labkit.parallel.scheduling.messages import forwards_only, incoming, last_backward, outgoing
from labkit.parallel.scheduling.schedules import gpipe, interleaved_one_f_one_b, one_f_one_b
from labkit.parallel.scheduling.zero_bubble import zero_bubble, zero_bubble_v


def words(messages):
    return {peer: " ".join(map(str, sent)) for peer, sent in messages.items()}


def test_one_f_one_b_on_three_ranks_sends_activations_down_and_gradients_up():
    schedule = one_f_one_b(3, 2)
    assert words(outgoing(schedule, 0)) == {1: "0F0 0F1"}
    assert words(outgoing(schedule, 1)) == {2: "1F0 1F1", 0: "1B0 1B1 loss"}
    assert words(outgoing(schedule, 2)) == {1: "2B0 2B1 loss"}


def test_stages_of_one_rank_exchange_without_a_message():
    # rank 0 holds stages 0 and 3, rank 1 stages 1 and 2: the bottom of the V needs no link
    schedule = zero_bubble_v(2, 1)
    assert words(outgoing(schedule, 0)) == {1: "0F0 3B0 loss"}
    assert words(outgoing(schedule, 1)) == {0: "2F0 1B0 loss"}


def test_activations_and_gradients_share_a_link_when_a_rank_holds_several_stages():
    assert words(outgoing(interleaved_one_f_one_b(2, 2, chunks=2), 1)) == {
        0: "1F0 1F1 3B0 3B1 loss 1B0 1B1 loss"
    }


@pytest.mark.parametrize(
    "schedule", [gpipe(3, 4), zero_bubble(4, 5), interleaved_one_f_one_b(3, 6), zero_bubble_v(3, 4)]
)
def test_what_one_rank_sends_the_other_expects_in_the_same_order(schedule):
    for source in range(schedule.num_ranks):
        for to, sent in outgoing(schedule, source).items():
            assert incoming(schedule, to)[source] == sent


def test_every_rank_but_the_last_stages_gets_the_loss():
    for schedule in (gpipe(4, 3), zero_bubble_v(4, 3), interleaved_one_f_one_b(3, 3)):
        for rank in range(schedule.num_ranks):
            if rank != schedule.rank_of_stage[-1]:
                assert "loss" in " ".join(words(incoming(schedule, rank)).values())


def test_evaluation_runs_the_forwards_and_sends_no_loss():
    schedule = forwards_only(one_f_one_b(2, 2))
    assert str(schedule) == "F0 F1\nF0 F1"
    assert last_backward(schedule) is None
    assert words(outgoing(schedule, 0)) == {1: "0F0 0F1"}

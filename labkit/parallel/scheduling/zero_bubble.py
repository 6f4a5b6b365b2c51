"""Zero-bubble schedules: the backward is split, and its weight half fills the bubble.

B = I + W: only I (the gradient for the input) is awaited by the stage before, so W can run at any
later time. Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241. Plain data
as in `schedules`, without torch.
"""

from __future__ import annotations

from labkit.parallel.scheduling.schedules import (
    Action,
    Schedule,
    alternate,
    check_sizes,
    loop,
    looped_orders,
    microbatches_per_round,
)


def zero_bubble(num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """Split the backward: send the input gradient on at once (I), fill the bubble with W.

    With one stage per rank this is ZB-H1 of Qi et al. 2023, "Zero Bubble Pipeline Parallelism":
    rank r puts off W by r microbatches, so that the drain has work to do, and peak memory stays
    that of 1F1B's first stage. When F, I and W cost the same, the bubble is a third of 1F1B's. With
    `chunks` > 1 stages per rank this is PyTorch's `ScheduleInterleavedZeroBubble`, with its rule
    for m (see `interleaved_one_f_one_b`).

    Raises:
        ValueError: a size is below 1, or m does not divide into rounds (only when chunks > 1).

    >>> print(zero_bubble(num_ranks=3, num_microbatches=4))
    F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
    F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    check_sizes(num_ranks, num_microbatches, chunks)
    per_round = num_microbatches
    if chunks > 1:
        per_round = microbatches_per_round(num_ranks, num_microbatches)
    orders = []
    for rank in range(num_ranks):
        forwards, backwards = looped_orders(rank, num_ranks, num_microbatches, chunks, per_round)
        warmup = min((chunks - 1) * per_round + num_ranks - 1 - rank, len(forwards))
        inputs = [Action(b.stage, "I", b.microbatch) for b in backwards]
        orders.append(_put_off_weights(alternate(forwards, inputs, warmup), delay=rank))
    return Schedule("zero bubble", num_microbatches, loop(num_ranks, chunks), tuple(orders))


def zero_bubble_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: two stages per rank in a V (rank r holds r and 2p - 1 - r).

    If F, I and W cost the same, only the p - 1 forwards of half a rank are waited for, in which the
    first microbatch walks down the V. The loss is computed on rank 0, next to the input. Each rank
    holds at most 2p half stages in flight, as much as p whole ones: 1F1B's first stage, on every
    rank. Source: Qi et al. 2023, section 6; the order is that of PyTorch's
    `ScheduleZBVZeroBubble`.

    Args:
        num_ranks: pipeline depth p, >= 1.
        num_microbatches: m, >= 1; below 2p - 1 the steady state is not reached.

    Raises:
        ValueError: a size is below 1.

    >>> print(zero_bubble_v(num_ranks=2, num_microbatches=3))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    check_sizes(num_ranks, num_microbatches)
    last = 2 * num_ranks - 1
    orders = tuple(
        _v_order(rank, last - rank, num_ranks, num_microbatches) for rank in range(num_ranks)
    )
    rank_of_stage = tuple(min(stage, last - stage) for stage in range(last + 1))
    return Schedule("zero bubble V", num_microbatches, rank_of_stage, orders)


def _v_order(down: int, up: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """The order of the rank that holds stage `down` (= rank) and stage `up` = 2p - 1 - rank."""
    rank, left = down, num_ranks - down
    full = max(num_microbatches, 2 * num_ranks - 1)  # planned full, then cut down to m
    up_all = [(up, "F"), (up, "I"), (up, "W")]
    steps = [(down, "F")] * (2 * left - 1) + [(up, "F"), (down, "F")] * rank + up_all * left
    steps += [(down, "F"), (down, "I"), (down, "W"), *up_all] * (full - num_ranks - left + 1)
    steps += [(down, "I"), (down, "W"), *up_all] * (left - 1)
    steps += [(down, "I"), (up, "I")] * rank + [(down, "I"), (down, "W")] * left
    steps += [(up, "W")] * rank + [(down, "W")] * rank
    seen: dict[tuple[int, str], int] = {}
    order = []
    for stage, kind in steps:
        seen[stage, kind] = seen.get((stage, kind), -1) + 1
        order.append(Action(stage, kind, seen[stage, kind]))
    return tuple(action for action in order if action.microbatch < num_microbatches)


def _put_off_weights(order: tuple[Action, ...], delay: int) -> tuple[Action, ...]:
    """Put each W `delay` input gradients behind its own I; what is left goes to the end."""
    result: list[Action] = []
    waiting: list[Action] = []
    for action in order:
        result.append(action)
        if action.kind == "I":
            waiting.append(Action(action.stage, "W", action.microbatch))
            if len(waiting) > delay:
                result.append(waiting.pop(0))
    return tuple(result + waiting)

"""Checks of a schedule: every action once, inputs first, no deadlock; and what it holds at once.

The builders in `schedules` and `zero_bubble` are legal by construction; this checker proves it for
any schedule, also one that a learner wrote by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from labkit.parallel.scheduling.schedules import Action, Schedule

_CHANGE_IN_FLIGHT = {"F": 1, "B": -1, "I": 0, "W": -1}


def inputs_of(action: Action, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """What must have run before `action`: a tuple of needs, each met by any one of its actions.

    A forward needs the forward one stage before; B and I need their own forward and the input
    gradient (from B or I) of the stage behind; W needs its own I.

    >>> [[str(a) for a in need] for need in inputs_of(Action(0, "B", 5), num_stages=2)]
    [['0F5'], ['1B5', '1I5']]
    """
    s, i = action.stage, action.microbatch
    if action.kind == "F":
        return ((Action(s - 1, "F", i),),) if s > 0 else ()
    if action.kind == "W":
        return ((Action(s, "I", i),),)
    own = ((Action(s, "F", i),),)
    if s + 1 == num_stages:
        return own
    return (*own, (Action(s + 1, "B", i), Action(s + 1, "I", i)))


def check_schedule(schedule: Schedule) -> None:
    """Raise unless `schedule` runs every action once, in an order that never gets stuck.

    Raises:
        ValueError: naming rank, position and action of the first fault found.
    """
    _check_each_action_once(schedule)
    _check_each_stage_complete(schedule)
    execution_order(schedule)


def execution_order(schedule: Schedule) -> tuple[Action, ...]:
    """All actions of all ranks in one order in which each comes behind its inputs.

    Within a rank the order is the schedule's own; ranks are taken in turn, each as far as it gets.

    Raises:
        ValueError: every rank that has work left waits for an action that never comes.
    """
    done: dict[Action, None] = {}
    position = [0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(schedule.actions):
            while position[rank] < len(order):
                action = order[position[rank]]
                if missing_input(action, schedule.num_stages, done):
                    break
                done[action] = None
                position[rank] += 1
                progress = True
    if len(done) < sum(map(len, schedule.actions)):
        raise ValueError(_deadlock_message(schedule, position, done))
    return tuple(done)


def missing_input(action: Action, num_stages: int, done: dict[Action, None]) -> Action | None:
    """The first input of `action` that is not in `done`; None when it may run."""
    for need in inputs_of(action, num_stages):
        if not any(candidate in done for candidate in need):
            return need[0]
    return None


def peak_per_stage(schedule: Schedule) -> tuple[int, ...]:
    """Most microbatches in flight on each stage: begun by F, not yet ended by B or W.

    With a split backward the activations count until W, which is their last reader.

    >>> from labkit.parallel.scheduling.schedules import one_f_one_b
    >>> peak_per_stage(one_f_one_b(num_ranks=4, num_microbatches=8))
    (4, 3, 2, 1)
    """
    held, peak = [0] * schedule.num_stages, [0] * schedule.num_stages
    for action in schedule:
        held[action.stage] += _CHANGE_IN_FLIGHT[action.kind]
        peak[action.stage] = max(peak[action.stage], held[action.stage])
    return tuple(peak)


def peak_per_rank(schedule: Schedule) -> tuple[int, ...]:
    """Most (stage, microbatch) pairs in flight at once on each rank."""
    return tuple(int(peak) for peak in peak_held(schedule, [1] * schedule.num_stages))


def peak_held(schedule: Schedule, size_of_stage: Sequence[float]) -> tuple[float, ...]:
    """Most that each rank holds when one microbatch on stage s holds `size_of_stage[s]`.

    With activation bytes per stage this is the peak of activation memory per rank, in bytes.

    Raises:
        ValueError: the number of sizes is not the number of stages.
    """
    if len(size_of_stage) != schedule.num_stages:
        raise ValueError(
            f"size_of_stage has {len(size_of_stage)} entries for num_stages={schedule.num_stages}; "
            "give one per stage"
        )
    return tuple(_peak_of_rank(order, size_of_stage) for order in schedule.actions)


def _peak_of_rank(order: tuple[Action, ...], size_of_stage: Sequence[float]) -> float:
    held = peak = 0
    for action in order:
        held += _CHANGE_IN_FLIGHT[action.kind] * size_of_stage[action.stage]
        peak = max(peak, held)
    return peak


def _check_each_action_once(schedule: Schedule) -> None:
    first: dict[Action, tuple[int, int]] = {}
    for rank, order in enumerate(schedule.actions):
        for position, action in enumerate(order):
            if action in first:
                raise ValueError(
                    f"rank {rank}, position {position}: action {action} runs again; it already ran "
                    f"at position {first[action][1]}; drop one"
                )
            first[action] = (rank, position)


def _check_each_stage_complete(schedule: Schedule) -> None:
    """Each microbatch on each stage is F and B, or F, I and W."""
    have = Counter(chain(schedule))
    for stage, rank in enumerate(schedule.rank_of_stage):
        for i in range(schedule.num_microbatches):
            kinds = "".join(k for k in "FBIW" if Action(stage, k, i) in have)
            if kinds not in ("FB", "FIW"):
                raise ValueError(
                    f"rank {rank}: stage {stage} runs {' '.join(kinds) or 'nothing'} for "
                    f"microbatch {i}; it must run F and B, or F, I and W"
                )


def _deadlock_message(schedule: Schedule, position: list[int], done: dict[Action, None]) -> str:
    stuck = []
    for rank, order in enumerate(schedule.actions):
        if position[rank] < len(order):
            action = order[position[rank]]
            missing = missing_input(action, schedule.num_stages, done)
            stuck.append(f"rank {rank}, position {position[rank]}: {action} waits for {missing}")
    return f"schedule {schedule.name!r} deadlocks: {'; '.join(stuck)}"

"""One rank's part of a schedule, with the messages of each action worked out once."""

from __future__ import annotations

from typing import NamedTuple

from labkit.parallel.scheduling.messages import (
    Message,
    arrived_with,
    incoming,
    last_backward,
    made_by,
    needed_by,
    receiver_of,
)
from labkit.parallel.scheduling.replay import SPAN_KINDS
from labkit.parallel.scheduling.schedules import Action, Schedule


class Instruction(NamedTuple):
    """An action with what it waits for and what is sent after it, named as in a timeline."""

    action: Action
    label: str
    kind: str
    needs: Message | None
    needs_label: str
    makes: Message | None
    makes_label: str
    to: int | None
    brings_loss: bool  # the loss comes with what it needs
    passes_loss: bool  # the loss goes with what it makes


class RankProgram(NamedTuple):
    """What `rank` does in one step.

    Attributes:
        incoming: by sending rank, what it receives, in order.
        arrived_with: by received message, which sent ones have arrived by then.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    incoming: dict[int, tuple[Message, ...]]
    arrived_with: dict[Message, tuple[Message, ...]]
    source_of: dict[Message, int]
    last_stage: int
    num_microbatches: int


def rank_program(schedule: Schedule, rank: int) -> RankProgram:
    """The program of `rank`."""
    loss_with = last_backward(schedule)
    expected = incoming(schedule, rank)
    return RankProgram(
        rank,
        tuple(_instruction(schedule, action, loss_with) for action in schedule.actions[rank]),
        expected,
        arrived_with(schedule, rank),
        {message: source for source, messages in expected.items() for message in messages},
        schedule.num_stages - 1,
        schedule.num_microbatches,
    )


def _instruction(schedule: Schedule, action: Action, loss_with: int | None) -> Instruction:
    needs, makes = needed_by(action, schedule), made_by(action, schedule)
    return Instruction(
        action,
        schedule.label(action),
        SPAN_KINDS[action.kind],
        needs,
        f"wait for {_label(schedule, needs)}",
        makes,
        f"send {_label(schedule, makes)}",
        None if makes is None else receiver_of(makes, schedule),
        _travels_with_loss(needs, loss_with, schedule),
        _travels_with_loss(makes, loss_with, schedule),
    )


def _label(schedule: Schedule, message: Message | None) -> str:
    if message is None:
        return "nothing"
    return schedule.label(Action(message.stage, message.kind, message.microbatch))


def _travels_with_loss(message: Message | None, loss_with: int | None, schedule: Schedule) -> bool:
    if message is None or message.kind != "B" or message.microbatch != loss_with:
        return False
    return receiver_of(message, schedule) != schedule.rank_of_stage[message.stage]

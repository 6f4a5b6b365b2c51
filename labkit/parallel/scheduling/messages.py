"""What the ranks of a schedule send each other, and in which order; plain data, without torch.

A message is known by what made it: the activation that F on a stage yields, the gradient that B or
I yields for its stage's input, and the loss, which travels back beside the last gradient. A link
leads from one rank to another and keeps order, so a receiver has to expect its messages in the
order in which the sender's actions make them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from labkit.parallel.scheduling.schedules import Action, Schedule


class Message(NamedTuple):
    """The result of `kind` for `microbatch` on `stage`, on its way to the stage beside it.

    >>> str(Message("F", 2, 0)), str(Message("loss", 1, 3))
    ('2F0', 'loss')
    """

    kind: Literal["F", "B", "loss"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return "loss" if self.kind == "loss" else f"{self.stage}{self.kind}{self.microbatch}"


def needed_by(action: Action, schedule: Schedule) -> Message | None:
    """What must have come from the stage beside; None for W and at the model's two ends."""
    if action.kind == "F" and action.stage > 0:
        return Message("F", action.stage - 1, action.microbatch)
    if action.kind in "BI" and action.stage + 1 < schedule.num_stages:
        return Message("B", action.stage + 1, action.microbatch)
    return None


def made_by(action: Action, schedule: Schedule) -> Message | None:
    """What the stage beside waits for; None for W and at the model's two ends."""
    if action.kind == "F" and action.stage + 1 < schedule.num_stages:
        return Message("F", action.stage, action.microbatch)
    if action.kind in "BI" and action.stage > 0:
        return Message("B", action.stage, action.microbatch)
    return None


def receiver_of(message: Message, schedule: Schedule) -> int:
    """The rank of the stage that reads it."""
    step = 1 if message.kind == "F" else -1
    return schedule.rank_of_stage[message.stage + step]


def last_backward(schedule: Schedule) -> int | None:
    """The microbatch whose gradient leaves the last stage last: by then the loss is complete.

    None when the schedule holds no backward.
    """
    last = schedule.num_stages - 1
    order = schedule.actions[schedule.rank_of_stage[last]]
    backwards = [a.microbatch for a in order if a.stage == last and a.kind in "BI"]
    return backwards[-1] if backwards else None


def outgoing(schedule: Schedule, rank: int) -> dict[int, tuple[Message, ...]]:
    """By receiving rank, every message of `rank` to it, in sending order.

    >>> from labkit.parallel.scheduling.schedules import gpipe
    >>> {to: " ".join(map(str, sent)) for to, sent in outgoing(gpipe(2, 2), rank=1).items()}
    {0: '1B0 1B1 loss'}
    """
    sent: dict[int, list[Message]] = {}
    carries_loss = last_backward(schedule)
    for action in schedule.actions[rank]:
        message = made_by(action, schedule)
        if message is None or receiver_of(message, schedule) == rank:
            continue
        link = sent.setdefault(receiver_of(message, schedule), [])
        link.append(message)
        if message.kind == "B" and message.microbatch == carries_loss:
            link.append(Message("loss", message.stage, message.microbatch))
    return {to: tuple(messages) for to, messages in sent.items()}


def incoming(schedule: Schedule, rank: int) -> dict[int, tuple[Message, ...]]:
    """By sending rank, every message from it to `rank`, in the order in which they come."""
    by_sender = {source: outgoing(schedule, source) for source in range(schedule.num_ranks)}
    return {source: sent[rank] for source, sent in by_sender.items() if rank in sent}


def arrived_with(schedule: Schedule, rank: int) -> dict[Message, tuple[Message, ...]]:
    """By message to `rank`, what `rank` sent that must have arrived before it could be made.

    >>> from labkit.parallel.scheduling.schedules import one_f_one_b
    >>> for came, arrived in arrived_with(one_f_one_b(2, 3), rank=1).items():
    ...     print(came, "after", *arrived)
    0F2 after 1B0
    """
    arrived = {}
    for other in outgoing(schedule, rank):
        read: list[Message] = []
        for action in schedule.actions[other]:
            needed, made = needed_by(action, schedule), made_by(action, schedule)
            if needed is not None and schedule.rank_of_stage[needed.stage] == rank:
                read.append(needed)
            if read and made is not None and receiver_of(made, schedule) == rank:
                arrived[made], read = tuple(read), []
    return arrived


def forwards_only(schedule: Schedule) -> Schedule:
    """The same schedule without its backwards, for evaluation."""
    orders = tuple(tuple(a for a in order if a.kind == "F") for order in schedule.actions)
    return Schedule(schedule.name, schedule.num_microbatches, schedule.rank_of_stage, orders)

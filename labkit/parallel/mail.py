"""One rank's messages of one step: received one ahead, sent without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch.distributed as dist
from torch import Tensor

from labkit.parallel.links import Link
from labkit.parallel.messages import Message, incoming, receiver_of
from labkit.parallel.schedules import Schedule


class Mail:
    """All that a rank sends and receives while it runs `schedule` once.

    Args:
        links: by sender and receiver.
        buffer_of: makes the tensor that a message is received into.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        links: Mapping[tuple[int, int], Link],
        buffer_of: Callable[[Message], Tensor],
    ) -> None:
        self._schedule, self._rank, self._links = schedule, rank, links
        self._inboxes = {
            source: Inbox(links[source, rank], expected, buffer_of)
            for source, expected in incoming(schedule, rank).items()
        }
        self._kept: dict[Message, Tensor] = {}  # from one stage of this rank to another
        self._on_its_way: dict[Message, tuple[Tensor, dist.Work]] = {}

    def receive(self, message: Message) -> Tensor:
        """Wait for the message."""
        if message in self._kept:
            return self._kept.pop(message)
        return self._inboxes[self._schedule.rank_of_stage[message.stage]].take(message)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Begin to send, or keep for a stage of this rank; nobody may write to it afterwards."""
        to = receiver_of(message, self._schedule)
        if to == self._rank:
            self._kept[message] = tensor
            return
        tensor = tensor.contiguous()
        self._on_its_way[message] = (tensor, self._links[self._rank, to].send(tensor))

    def release(self, message: Message) -> None:
        """Let go of a message that has arrived; wait if it has not. Without one, do nothing."""
        if message in self._on_its_way:
            self._on_its_way.pop(message)[1].wait()

    def release_all(self) -> None:
        """Wait until everything has arrived."""
        for message in list(self._on_its_way):
            self.release(message)


class Inbox:
    """Receives the messages of one sender.

    One receive is posted ahead, so that a message is on its way while the one before it is worked
    on; one, because each posted receive holds a buffer.
    """

    def __init__(
        self, link: Link, expected: Iterable[Message], buffer_of: Callable[[Message], Tensor]
    ) -> None:
        self._link, self._buffer_of = link, buffer_of
        self._expected = deque(expected)
        self._posted: dict[Message, tuple[Tensor, dist.Work]] = {}
        self._post_next()

    def take(self, message: Message) -> Tensor:
        """Wait for the message, which is one of those expected."""
        while message not in self._posted:
            self._post_next()
        buffer, work = self._posted.pop(message)
        work.wait()
        if not self._posted:
            self._post_next()
        return buffer

    def _post_next(self) -> None:
        if self._expected:
            message = self._expected.popleft()
            buffer = self._buffer_of(message)
            self._posted[message] = (buffer, self._link.receive(buffer))

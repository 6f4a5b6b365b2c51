"""One rank's messages of one step: received one ahead, sent without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.pipelining.links import Link, Pair
from labkit.parallel.scheduling.messages import Message
from labkit.parallel.scheduling.rank_program import RankProgram


class Mail:
    """All that a rank sends and receives while it runs its program once.

    What is sent is held until it must have arrived, by what has come back; gloo has no way to ask.

    Args:
        links: by sender and receiver.
        buffer_of: makes the tensor that a message is received into.
    """

    def __init__(
        self,
        program: RankProgram,
        links: Mapping[Pair, Link],
        buffer_of: Callable[[Message], Tensor],
    ) -> None:
        self._program, self._links = program, links
        self._inboxes = {
            source: Inbox(links[source, program.rank], expected, buffer_of)
            for source, expected in program.incoming.items()
        }
        self._kept: dict[Message, Tensor] = {}  # from one stage of this rank to another
        self._on_its_way: dict[Message, tuple[Tensor, dist.Work]] = {}

    def receive(self, message: Message) -> Tensor:
        """Wait for the message."""
        if message in self._kept:
            return self._kept.pop(message)
        received = self._inboxes[self._program.source_of[message]].take(message)
        for sent in self._program.arrived_with.get(message, ()):
            self._on_its_way.pop(sent)[1].wait()
        return received

    def send(self, message: Message, to: int, tensor: Tensor) -> None:
        """Begin to send, or keep for a stage of this rank; nobody may write to it afterwards."""
        if to == self._program.rank:
            self._kept[message] = tensor
            return
        tensor = tensor.contiguous()
        self._on_its_way[message] = (tensor, self._links[self._program.rank, to].send(tensor))

    def wait_for_sends(self) -> None:
        """Wait until everything has arrived."""
        for _, work in self._on_its_way.values():
            work.wait()
        self._on_its_way.clear()


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
        # does nothing for a plain message; a recorder sees by it that the program has waited
        torch.ops._c10d_functional.wait_tensor(buffer)
        if not self._posted:
            self._post_next()
        return buffer

    def _post_next(self) -> None:
        if self._expected:
            message = self._expected.popleft()
            buffer = self._buffer_of(message)
            self._posted[message] = (buffer, self._link.receive(buffer))

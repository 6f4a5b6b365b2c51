"""One-way links between ranks, on which messages arrive in the order in which they were sent.

Each direction between two ranks is a process group of its own. On one shared NCCL communicator an
activation could queue behind a gradient that waits for it; and NCCL knows no tags, so the order of
the messages is the only thing that tells them apart.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from labkit.parallel.messages import incoming, outgoing
from labkit.parallel.peers import Peers
from labkit.parallel.schedules import Schedule

# opening a link takes about 10 ms and a socket: once per pair of ranks, for all pipelines
_open: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], dist.ProcessGroup]]
_open = WeakKeyDictionary()


class Link(NamedTuple):
    """From `source` to `destination` (numbers among all processes), alone in `group`."""

    group: dist.ProcessGroup
    source: int
    destination: int

    def send(self, tensor: Tensor) -> dist.Work:
        return dist.isend(tensor, self.destination, group=self.group)

    def receive(self, buffer: Tensor) -> dist.Work:
        return dist.irecv(buffer, self.source, group=self.group)


def open_links(peers: Peers, schedule: Schedule) -> dict[tuple[int, int], Link]:
    """The links (from, to) that `schedule` uses and that this rank is an end of.

    All processes must call, as `dist.new_group` asks, also those of other pipelines: each then
    opens the links of all, in one order.
    """
    receives = {(source, peers.rank) for source in incoming(schedule, peers.rank)}
    sends = {(peers.rank, to) for to in outgoing(schedule, peers.rank)}
    if peers.size == 1:
        return {}
    ends = {pair: tuple(map(peers.global_rank, pair)) for pair in receives | sends}
    told = Peers(None, peers.device).gather(tuple(ends.values()))
    known = _open.setdefault(dist.group.WORLD, {})
    for pair in sorted(set(chain(*told)) - known.keys()):
        known[pair] = dist.new_group(list(pair))
    return {pair: Link(known[ends[pair]], *ends[pair]) for pair in ends}

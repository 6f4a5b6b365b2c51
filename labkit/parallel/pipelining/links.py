"""One-way links between ranks, on which messages arrive in the order in which they were sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from labkit.parallel.peers import Peers
from labkit.parallel.scheduling.messages import outgoing
from labkit.parallel.scheduling.schedules import Schedule

Pair = tuple[int, int]  # from, to: ranks within a pipeline

# groups of their own, by the two processes, for all pipelines of this process
_opened: WeakKeyDictionary[dist.ProcessGroup, dict[Pair, dist.ProcessGroup]] = WeakKeyDictionary()


class Link(NamedTuple):
    """From process `source` to process `destination`."""

    group: dist.ProcessGroup
    source: int
    destination: int

    def send(self, tensor: Tensor) -> dist.Work:
        return dist.isend(tensor, self.destination, group=self.group)

    def receive(self, buffer: Tensor) -> dist.Work:
        return dist.irecv(buffer, self.source, group=self.group)


def pairs_of(schedule: Schedule) -> set[Pair]:
    """Who sends to whom."""
    return {(r, to) for r in range(schedule.num_ranks) for to in outgoing(schedule, r)}


def open_links(peers: Peers, pairs: Iterable[Pair]) -> dict[Pair, Link]:
    """The links of `pairs` that this rank is an end of; all ranks of the pipeline must call.

    gloo keeps the two directions between two ranks apart by itself. NCCL runs what one communicator
    is given in one queue, where an activation would wait behind a receive that was posted early,
    and it may wait for ever. So each link gets a group of its own there.
    """
    ends = {pair: tuple(map(peers.global_rank, pair)) for pair in sorted(pairs)}
    if not ends:
        return {}
    groups = dict.fromkeys(ends.values(), peers.group)
    if dist.get_backend(peers.group) != "gloo":
        groups = groups_of_their_own(ends.values())
    return {p: Link(groups[ends[p]], *ends[p]) for p in ends if peers.rank in p}


def groups_of_their_own(pairs: Iterable[Pair]) -> dict[Pair, dist.ProcessGroup]:
    """A process group for each pair of processes, opened once and kept for later pipelines.

    While a pair is new, all processes have to come here with the same pairs, as `dist.new_group`
    asks: build the pipeline over all ranks before those over some of them.
    """
    known = _opened.setdefault(dist.group.WORLD, {})
    for pair in pairs:
        if pair not in known:
            known[pair] = dist.new_group(list(pair))
    return known

"""Messages and collectives between recorded programs: who meets whom, and when it is over."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from labkit.devices.profiles import Machine
from labkit.measure.timeline import Span
from labkit.measure.virtual.collective_costs import collective_s, ring_pairs
from labkit.measure.virtual.recording import Event
from labkit.measure.virtual.virtual_program import Arrival, Program


class ProgramMismatchError(RuntimeError):
    """The ranks' programs do not fit together: a deadlock, or sizes or operations that differ."""


class _Half(NamedTuple):
    """One end of a message: what is known when it is sent, or when its receive is posted."""

    event: Event
    ready_s: float
    arrival: Arrival
    region: str


class _Joined(NamedTuple):
    program: Program
    event: Event
    arrival: Arrival
    ready_s: float
    region: str


class Network:
    """The links of a machine, what is under way on them, and who waits for whom.

    Messages meet by sender, receiver and tag, first in, first out; collectives meet by the order
    in which each member calls those of the same group.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._link_free_s: dict[tuple[int, int], float] = defaultdict(float)
        self._start_anew()

    def _start_anew(self) -> None:
        self.spans: list[Span] = []
        self._sent: dict[tuple, deque[_Half]] = defaultdict(deque)
        self._posted: dict[tuple, deque[_Half]] = defaultdict(deque)
        self._joined: dict[tuple[int, ...], list[dict[int, _Joined]]] = defaultdict(list)
        self._turns: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)

    def take_spans(self) -> list[Span]:
        """The transfers and collectives since the last call.

        Raises:
            ProgramMismatchError: a message was sent and never received.
        """
        for (source, target, tag), queue in self._sent.items():
            if queue:
                raise ProgramMismatchError(
                    f"rank {source} sent {len(queue)} message(s) with tag {tag} to rank {target} "
                    f"that rank {target} never receives"
                )
        spans = self.spans
        self._start_anew()
        return spans

    def communicate(self, program: Program, event: Event) -> None:
        """Send, receive or join, as the event says."""
        {"send": self._send, "recv": self._receive, "collective": self._join}[event.kind](
            program, event
        )

    def _send(self, program: Program, event: Event) -> None:
        key = (program.rank, event.ranks[0], event.tag)
        departure = Arrival(f"its message to rank {key[1]} with tag {event.tag} to leave")
        region = program.recording.region_of(event).label
        sent = _Half(event, program.data_ready_s(event), departure, region)
        program.leaving(event, departure)
        if not self.machine.link(*key[:2]).rendezvous:
            self._transfer(key, sent, sent.ready_s)
        if self._posted[key]:
            self._meet(key, sent, self._posted[key].popleft())
        else:
            self._sent[key].append(sent)

    def _receive(self, program: Program, event: Event) -> None:
        key = (event.ranks[0], program.rank, event.tag)
        arrival = Arrival(f"a message from rank {key[0]} with tag {event.tag}")
        posted = _Half(event, program.data_ready_s(event), arrival, "")
        program.expect(event, arrival)
        if self._sent[key]:
            self._meet(key, self._sent[key].popleft(), posted)
        else:
            self._posted[key].append(posted)

    def _transfer(self, key: tuple, sent: _Half, ready_s: float) -> None:
        source, target, _ = key
        start_s = max(ready_s, self._link_free_s[source, target])
        end_s = start_s + self.machine.link(source, target).transfer_s(sent.event.num_bytes)
        self._link_free_s[source, target] = sent.arrival.time_s = end_s
        label = f"{sent.region} to {target}" if sent.region else f"to {target}"
        stream = f"link {source}->{target}"
        self.spans.append(Span(source, start_s, end_s, label, "transfer", stream))

    def _meet(self, key: tuple, sent: _Half, posted: _Half) -> None:
        if sent.event.num_bytes != posted.event.num_bytes:
            raise ProgramMismatchError(
                f"rank {key[0]} sends {sent.event.num_bytes} bytes with tag {key[2]} to rank "
                f"{key[1]}, which receives {posted.event.num_bytes}; gloo would fill a part and "
                "say nothing"
            )
        if sent.arrival.time_s is None:
            self._transfer(key, sent, max(sent.ready_s, posted.ready_s))
        posted.arrival.time_s = max(sent.arrival.time_s, posted.ready_s)

    def _join(self, program: Program, event: Event) -> None:
        members, rank = event.ranks, program.rank
        turn = self._turns[rank, members]
        self._turns[rank, members] += 1
        meetings = self._joined[members]
        if turn == len(meetings):
            meetings.append({})
        arrival = Arrival(f"{event.name} number {turn} of ranks {list(members)}")
        ready_s = program.data_ready_s(event)
        region = program.recording.region_of(event).label
        meetings[turn][rank] = _Joined(program, event, arrival, ready_s, region)
        program.expect(event, arrival)
        if len(meetings[turn]) == len(members):
            self._hold(members, turn, meetings[turn])

    def _hold(self, members: tuple[int, ...], turn: int, joined: dict[int, _Joined]) -> None:
        """All members are there: the collective runs."""
        _check_same(turn, joined)
        kind = joined[members[0]].event.name
        num_bytes = max(member.event.num_bytes for member in joined.values())
        pairs = ring_pairs(members)
        arrived_s = max(member.ready_s for member in joined.values())
        start_s = max([arrived_s, *(self._link_free_s[pair] for pair in pairs)])
        end_s = start_s + collective_s(kind, num_bytes, members, self.machine)
        for pair in pairs:
            self._link_free_s[pair] = end_s
        stream = f"ring {','.join(map(str, members))}"
        for rank, member in joined.items():
            member.arrival.time_s = end_s
            member.program.leaving(member.event, member.arrival)
            if len(members) > 1:
                label = f"{member.region} {kind}".strip()
                self.spans.append(Span(rank, start_s, end_s, label, "collective", stream))


def _check_same(turn: int, joined: dict[int, _Joined]) -> None:
    kinds = {rank: member.event.name for rank, member in joined.items()}
    sizes = {rank: member.event.num_bytes for rank, member in joined.items()}
    if len(set(kinds.values())) > 1:
        raise ProgramMismatchError(
            f"collective number {turn} of ranks {sorted(kinds)} differs: "
            + ", ".join(f"rank {rank} calls {kinds[rank]}" for rank in sorted(kinds))
        )
    if len(set(sizes.values())) > 1 and "all_to_all" not in kinds.values():
        raise ProgramMismatchError(
            f"{kinds[min(kinds)]} number {turn} has different sizes: "
            + ", ".join(f"rank {rank} has {sizes[rank]} bytes" for rank in sorted(sizes))
        )

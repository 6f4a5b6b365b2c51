"""Where one rank's recorded program stands on its modelled device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from labkit.devices.profiles import Profile
from labkit.measure.timeline import Span
from labkit.measure.virtual.recording import Event, Recording

OperatorCost = Callable[[Event, Profile], float]


@dataclass(eq=False)
class Arrival:
    """When something will be there; None as long as that is not known."""

    what: str
    time_s: float | None = None


@dataclass
class Program:
    """A rank's recording, how far it got, and what its storages wait for.

    Args:
        recording: of the rank.
        profile: of its device.
        now_s: when the device's compute stream is free for the next operator.
    """

    recording: Recording
    profile: Profile
    now_s: float
    spans: list[Span] = field(default_factory=list)
    _next: int = 0
    _side_now_s: float = 0.0  # the communication stream's clock
    _written_s: dict[int, float] = field(default_factory=dict)  # by storage, compute stream only
    _arriving: dict[int, list[Arrival]] = field(default_factory=dict)  # by storage
    _leaving: dict[int, list[Arrival]] = field(default_factory=dict)  # by storage
    _posted: list[Arrival] = field(default_factory=list)
    _held_up_by: Arrival | None = None  # a collective that the program waits for
    _open: list | None = None  # start, end, label, kind of the span being merged

    def __post_init__(self) -> None:
        self._side_now_s = self.now_s

    @property
    def rank(self) -> int:
        return self.recording.rank

    @property
    def event(self) -> Event | None:
        """The next event; None at the end."""
        events = self.recording.events
        return events[self._next] if self._next < len(events) else None

    def blocker(self) -> Arrival | None:
        """An arrival of unknown time that the next event needs; None if it may start."""
        if self._held_up_by is not None and self._held_up_by.time_s is None:
            return self._held_up_by
        if self.event is not None:
            for arrival in self._awaited(self.event):
                if arrival.time_s is None:
                    return arrival
        return None

    def _awaited(self, event: Event) -> Iterator[Arrival]:
        """What must have arrived in, or left, the storages that the event touches."""
        if self._arriving:
            # a receive only posts: it reads nothing, and may follow another into one storage
            for storage in event.reads if event.kind == "recv" else event.reads + event.writes:
                yield from self._arriving.get(storage, ())
        if self._leaving:
            for storage in event.writes:
                yield from self._leaving.get(storage, ())

    def begin(self) -> Event:
        """Take the next event, which nothing blocks; operators wait here for what they touch."""
        event = self.event
        self._next += 1
        if self._held_up_by is not None:
            self.now_s = max(self.now_s, self._held_up_by.time_s)
            self._held_up_by = None
        if event.stream == "communication":
            self._side_now_s = self.data_ready_s(event)
        elif event.kind in ("compute", "wait"):
            self.now_s = self.data_ready_s(event)
            for storage in event.reads + event.writes:
                self._arriving.pop(storage, None)
        return event

    def data_ready_s(self, event: Event) -> float:
        """When its stream is free, all it reads is there and all it overwrites has left."""
        ready_s = self.now_s
        if event.stream == "communication":
            ready_s = max(self._side_now_s, *(self._written_s.get(s, 0.0) for s in event.reads), 0)
        return max([ready_s, *(arrival.time_s for arrival in self._awaited(event))])

    def occupy(self, event: Event, cost_s: float) -> None:
        """Keep the event's stream busy; work of one region without a gap becomes one span."""
        if event.stream == "communication":
            self._occupy_side(event, cost_s)
            return
        label, kind = self.recording.region_of(event)
        start_s, self.now_s = self.now_s, self.now_s + cost_s
        for storage in event.writes:
            self._written_s[storage] = self.now_s
        if cost_s <= 0:
            return
        if self._open and self._open[1:] == [start_s, label, kind]:
            self._open[1] = self.now_s
        else:
            self._close_span()
            self._open = [start_s, self.now_s, label, kind]

    def _occupy_side(self, event: Event, cost_s: float) -> None:
        start_s, self._side_now_s = self._side_now_s, self._side_now_s + cost_s
        if event.kind == "compute":
            self.expect(event, Arrival(event.name, self._side_now_s))
        if cost_s > 0:
            name = event.name.split("::")[-1]
            span = Span(self.rank, start_s, self._side_now_s, name, "transfer", "communication")
            self.spans.append(span)

    def _close_span(self) -> None:
        if self._open:
            self.spans.append(Span(self.rank, *self._open))
        self._open = None

    def expect(self, event: Event, arrival: Arrival) -> None:
        """The event's written storages are there when ``arrival`` is."""
        self._posted.append(arrival)
        for storage in event.writes:
            self._arriving.setdefault(storage, []).append(arrival)
        if event.blocking and event.stream == "compute":
            self._held_up_by = arrival

    def leaving(self, event: Event, departure: Arrival) -> None:
        """The event's read storages must not be overwritten before ``departure``."""
        self._posted.append(departure)
        for storage in event.reads:
            self._leaving.setdefault(storage, []).append(departure)

    def close(self) -> Arrival | None:
        """End the recording when all that it posted has ended; returns what never does."""
        self._close_span()
        self.now_s = max(self.now_s, self._side_now_s)
        for arrival in self._posted:
            if arrival.time_s is None:
                return arrival
            self.now_s = max(self.now_s, arrival.time_s)
        return None

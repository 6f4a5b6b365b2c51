"""What one rank executed, as plain data that pickles: the input of the virtual clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KINDS = frozenset({"compute", "send", "recv", "collective", "wait"})


class Event(NamedTuple):
    """One operator, message, collective or wait, in program order.

    A named tuple and not a dataclass because a step has thousands and recording must stay cheap.

    Attributes:
        kind: compute, send, recv, collective or wait.
        name: the operator's schema name, such as ``aten::mm``.
        flops: by torch's counter; 0 where it counts none.
        num_bytes: read and written by an operator; the payload of a message or collective.
        dtype: of the product, which decides the peak; "" without FLOPs.
        reads: storages read. A storage's number is never used again after it is freed.
        writes: storages written.
        region: index into ``Recording.regions``.
        ranks: the peer of a message; all members of a collective.
        tag: of a message.
        blocking: the program goes on only after the collective has ended.
        stream: ``compute``, or ``communication`` for what FSDP2 puts on streams of its own.
        own_s: this thread's CPU seconds inside the operator, by ``time.thread_time``.
    """

    kind: str
    name: str
    flops: int = 0
    num_bytes: int = 0
    dtype: str = ""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    region: int = 0
    ranks: tuple[int, ...] = ()
    tag: int = 0
    blocking: bool = False
    stream: str = "compute"
    own_s: float = 0.0


class Region(NamedTuple):
    """A named part of the program, such as F3 of kind forward; "" outside every region."""

    label: str
    kind: str


NO_REGION = Region("", "compute")


class Unrecorded(NamedTuple):
    """What the same step took on this rank without the recorder, over some calls.

    Attributes:
        main_s: CPU seconds of the thread that runs the program, of the fastest call: what else
            runs on the machine can only slow a call.
        others_s: CPU seconds of all other threads of the process in that call; they move gloo's
            messages.
        walls_s: wall-clock seconds of each call.
    """

    main_s: float
    others_s: float
    walls_s: tuple[float, ...]


@dataclass(frozen=True)
class Recording:
    """Everything one rank did between the start and the end of a recorder.

    Args:
        rank: also the device of the machine that times it.
        events: in program order.
        regions: what the events' ``region`` points into; entry 0 is ``NO_REGION``.
        peak_bytes: most bytes alive at once, by storage: whatever was held, plus what came alive.
        unknown_operators: name -> count of operators without a FLOP formula that are not known to
            be bound by memory either; they cost their bytes.
        unrecorded: what the same step took without the recorder, where that was measured.

    Raises:
        ValueError: an event has an unknown kind or region.
    """

    rank: int
    events: tuple[Event, ...]
    regions: tuple[Region, ...]
    peak_bytes: int
    unknown_operators: dict[str, int]
    unrecorded: Unrecorded | None = None

    def __post_init__(self) -> None:
        for event in self.events:
            if event.kind not in KINDS or not 0 <= event.region < len(self.regions):
                raise ValueError(f"rank {self.rank}: {event} has an unknown kind or region")

    @property
    def flops(self) -> int:
        return sum(event.flops for event in self.events)

    def sent_bytes(self, peer: int | None = None) -> int:
        """Bytes sent point to point, to ``peer`` or to everyone."""
        return sum(
            event.num_bytes
            for event in self.events
            if event.kind == "send" and peer in (None, event.ranks[0])
        )

    def region_of(self, event: Event) -> Region:
        return self.regions[event.region]

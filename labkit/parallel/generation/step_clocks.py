"""The clock that a server of requests decides by: real time, or a virtual machine's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch.distributed as dist

from labkit.devices.profiles import Machine
from labkit.measure.virtual.recorder import Recorder
from labkit.measure.virtual.recording import Recording
from labkit.measure.virtual.virtual_clock import VirtualClock
from labkit.parallel.generation.reading import widened
from labkit.parallel.peers import Peers

T = TypeVar("T")


class StepClock(Protocol):
    """Time passes while a step runs; on ranks every one sees the same moments.

    Attributes:
        provenance: of every duration that it yields.
    """

    provenance: str

    def now_s(self) -> float: ...

    def run(self, step: Callable[[], T]) -> T: ...

    def wait_until(self, moment_s: float) -> None: ...


class RealClock:
    """Seconds since it was made; on ranks the first one's.

    Args:
        kind: of the devices, for the provenance.
        group: the ranks that serve together; None for one process.
    """

    def __init__(self, kind: str = "cpu", group: dist.ProcessGroup | None = None) -> None:
        self.provenance = f"measured:{kind}"
        self._peers = Peers(group) if group is not None else None
        self._begun_s = time.perf_counter()

    def now_s(self) -> float:
        own_s = time.perf_counter() - self._begun_s
        return own_s if self._peers is None else self._peers.tell(own_s, source=0)

    def run(self, step: Callable[[], T]) -> T:
        return step()

    def wait_until(self, moment_s: float) -> None:
        time.sleep(max(0.0, moment_s - self.now_s()))


class VirtualStepClock:
    """Records each step and lets the machine's clock advance by what it takes there.

    Args:
        machine: its device i runs rank i.
        group: the ranks that serve together; None for one process. Each records its own part, the
            first times all of them and tells, so that every rank comes to the same moment.
        decode_width: how much wider than the model that runs the modelled one is (``widened``);
            ``LAB_WIDTH`` on the machine ``lab``.
    """

    def __init__(
        self,
        machine: Machine,
        group: dist.ProcessGroup | None = None,
        *,
        decode_width: float = 1.0,
    ) -> None:
        self.provenance = machine.provenance
        self._clock, self._width = VirtualClock(machine), decode_width
        self._peers = Peers(group) if group is not None else None
        self._recorder = Recorder(rank=0 if self._peers is None else self._peers.rank)

    def now_s(self) -> float:
        return max(self._clock.now_s)

    def run(self, step: Callable[[], T]) -> T:
        with self._recorder:
            result = step()
        own = widened(self._recorder.take(), self._width)
        self._advance(own)
        self.wait_until(self.now_s())  # the next step needs this one's tokens on every device
        return result

    def _advance(self, own: Recording) -> None:
        """The first rank times what all recorded and tells; each for itself would take as long."""
        if self._peers is None or self._peers.size == 1:
            self._clock.advance([own])
            return
        first = self._peers.rank == 0
        every: list[Recording] | None = [own] * self._peers.size if first else None
        dist.gather_object(own, every, group_dst=0, group=self._peers.group)
        if every is not None:
            self._clock.advance(every)
        self._clock.now_s[:] = self._peers.tell(self._clock.now_s, source=0)

    def wait_until(self, moment_s: float) -> None:
        self._clock.now_s[:] = [max(now_s, moment_s) for now_s in self._clock.now_s]

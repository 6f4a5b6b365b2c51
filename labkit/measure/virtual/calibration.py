"""Fits a profile to the machine at hand, where each "device" is one CPU process of one thread.

Two ways to time a recording on it:

- by the fitted roofline (``play(recordings, machine)``): matrix products at the rate measured,
  everything else by its bytes;
- by each operator's own CPU seconds, noted while it was recorded (``play_measured``): truer, but
  only for this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import psutil
import torch
import torch.distributed as dist

from labkit.devices.profiles import Link, Machine, Profile, uniform_machine
from labkit.measure.timeline import Timeline
from labkit.measure.virtual.recording import Event, Recording, Unrecorded
from labkit.measure.virtual.virtual_clock import play

_COMMUNICATES = ("send", "recv", "collective")


def recorded_cost(event: Event, profile: Profile) -> float:
    """The seconds that were measured, whatever the profile says; for ``play``'s ``cost``."""
    return event.own_s


def with_measured_costs(recording: Recording) -> Recording:
    """The recording with ``own_s`` made to add up to what the unrecorded step took.

    The recorder's own work sits between the operators and slows them a little; so their seconds
    are scaled to the sum measured without it. What gloo's threads used goes to the messages, in
    equal parts: they take a core from the rank, which has one.

    Raises:
        ValueError: the recording was made without ``timed``.
    """
    its = _unrecorded(recording)
    scale = its.main_s / sum(event.own_s for event in recording.events)
    messages = sum(event.kind in _COMMUNICATES for event in recording.events)
    each_s = its.others_s / messages if messages else 0.0
    events = tuple(
        e._replace(own_s=e.own_s * scale + (each_s if e.kind in _COMMUNICATES else 0.0))
        for e in recording.events
    )
    return replace(recording, events=events)


def play_measured(recordings: Sequence[Recording], machine: Machine) -> Timeline:
    """Time recordings by the seconds measured for each operator, and by the machine's links.

    Raises:
        ValueError: a recording was made without ``timed``.
    """
    return play([with_measured_costs(r) for r in recordings], machine, recorded_cost)


def measured_step_s(recordings: Sequence[Recording]) -> float:
    """The step time measured when the recordings were made: slowest rank of the fastest call.

    Raises:
        ValueError: a recording was made without ``timed``.
    """
    of_each_call = zip(*(_unrecorded(r).walls_s for r in recordings), strict=True)
    return min(max(walls_s) for walls_s in of_each_call)


def _unrecorded(recording: Recording) -> Unrecorded:
    if recording.unrecorded is None:
        raise ValueError(
            f"rank {recording.rank}: this recording has no measured seconds; use "
            "record_step(..., timed=5)"
        )
    return recording.unrecorded


@dataclass(frozen=True)
class LinkFit:
    """What ping-pong between two ranks showed.

    Args:
        latency_s: of an empty message, one way.
        bandwidth_bytes_per_s: of what a longer one takes more.
        host_s: CPU seconds that one message costs its sender or its receiver.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    host_s: float

    def link(self, name: str = "gloo over loopback") -> Link:
        source = f"measured by ping-pong on this machine, torch {torch.__version__}"
        return Link(name, self.bandwidth_bytes_per_s, self.latency_s, source, rendezvous=True)


def measure_link(
    num_bytes: Sequence[int] = (4, 1 << 15, 1 << 18), repeats: int = 15, busy_s: float = 0.01
) -> LinkFit:
    """Ping-pong between ranks 0 and 1 of the running process group; call it on both.

    Each rank is busy for a while before it sends, as in a pipeline: a thread that has waited
    wakes up later than one that has not. Nothing else should run meanwhile: on a busy machine the
    latency comes out ten times too long.

    Args:
        num_bytes: message sizes, smallest first, at least two.
        repeats: round trips per size, of which the median counts.
        busy_s: how long the other rank waits for each message.

    Raises:
        ValueError: fewer than two sizes, or no process group of at least two ranks.
    """
    if len(num_bytes) < 2 or not dist.is_initialized() or dist.get_world_size() < 2:
        raise ValueError(
            f"num_bytes={num_bytes} and the process group must be two sizes and two ranks or more"
        )
    one_way_s = [_round_trip_s(size, repeats, busy_s) / 2 for size in num_bytes]
    s_per_byte = max(
        _FASTEST_S_PER_BYTE, (one_way_s[-1] - one_way_s[0]) / (num_bytes[-1] - num_bytes[0])
    )
    latency_s = median(s - s_per_byte * b for s, b in zip(one_way_s, num_bytes, strict=True))
    started_s = time.process_time()
    _round_trip_s(num_bytes[1], repeats, 0.0)
    host_s = (time.process_time() - started_s) / (2 * repeats)
    return LinkFit(max(latency_s, 0.0), 1 / s_per_byte, host_s)


_FASTEST_S_PER_BYTE = 1 / 100e9  # no loopback copies faster than memory does


def _round_trip_s(num_bytes: int, repeats: int, busy_s: float) -> float:
    """Median of there and back, without the time in which a rank was busy before it sent."""
    message, rank, trips = torch.zeros(num_bytes, dtype=torch.uint8), dist.get_rank(), []
    for _ in range(repeats):
        started_s = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                _keep_busy(busy_s)
                dist.send(message, 1 - sender)
            elif rank == 1 - sender:
                dist.recv(message, sender)
        trips.append(time.perf_counter() - started_s - 2 * busy_s)
    return max(0.0, median(trips))


def _keep_busy(seconds: float) -> None:
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


def calibrate(
    link: LinkFit | None = None,
    count: int = 1,
    *,
    product: tuple[int, int, int] = (1024, 128, 512),
    copied_bytes: int = 1 << 20,
) -> Machine:
    """A machine of ``count`` CPU processes with the figures measured in this one.

    Run it in a rank, with the rank's number of threads and nothing else running.

    Args:
        link: from ``measure_link``; needed for ``count`` above 1.
        product: (M, K, N) of the matrix product that gives the peak; take the model's own.
        copied_bytes: size of the tensor whose copying gives the memory bandwidth.

    Raises:
        ValueError: ``count`` is above 1 without a link.
    """
    if count > 1 and link is None:
        raise ValueError(f"count={count} needs link=measure_link() from two ranks")
    launch_s = _seconds(lambda: _TINY.add_(1.0), 2000)
    rows, inner, columns = product
    a, b = torch.ones(rows, inner), torch.ones(inner, columns)
    product_s = _seconds(lambda: torch.mm(a, b), 50) - launch_s
    source, target = torch.ones(copied_bytes // 4), torch.empty(copied_bytes // 4)
    copy_s = _seconds(lambda: target.copy_(source), 50) - launch_s
    profile = Profile(
        "CPU process",
        {"float32": 2 * rows * inner * columns / product_s},
        2 * copied_bytes / copy_s,
        psutil.virtual_memory().total,
        launch_s,
        link.host_s if link else 0.0,
        f"measured on this machine, {torch.get_num_threads()} thread(s), torch {torch.__version__}",
    )
    wire = link.link() if link else Link("none", 1.0, 0.0, "one device has no link")
    return uniform_machine(f"calibrated-cpu-{count}x", profile, wire, count)


_TINY = torch.zeros(1)


def _seconds(call: Callable[[], object], repeats: int) -> float:
    """Median CPU seconds of a call, over batches so that the clock's own cost is hidden."""
    batch = max(1, repeats // 10)
    times = []
    for _ in range(11):
        started = time.thread_time()
        for _ in range(batch):
            call()
        times.append((time.thread_time() - started) / batch)
    return median(times[1:])

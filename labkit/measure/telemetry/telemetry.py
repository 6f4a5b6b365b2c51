"""Watch the devices while a block runs: ``with telemetry(lab.devices) as t:``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from labkit.devices.backends import accelerator_kind, backend
from labkit.devices.inventory import DeviceSet
from labkit.devices.nvml import visible_gpu_uuids
from labkit.measure.regions import listening
from labkit.measure.spans import SpanLog
from labkit.measure.step_trace import StepTrace, read_traces
from labkit.measure.telemetry.accelerator_source import AcceleratorSource
from labkit.measure.telemetry.cpu_source import ProcessSource, RaplSource
from labkit.measure.telemetry.metrics import METRICS, Metered, Source
from labkit.measure.telemetry.nvidia_source import NvidiaSource
from labkit.measure.telemetry.sampler import DEFAULT_HZ, Sample, Sampler
from labkit.measure.telemetry.timeline_readings import metered_ranks, timeline_samples
from labkit.measure.timeline import Span, Timeline
from labkit.measure.timers import synchronize

NOT_ITS_KIND = "a device of this kind has no such figure"


@dataclass
class Telemetry:
    """What was seen of each device, and what ran meanwhile, on one clock.

    Attributes:
        devices: by number; those of ranks come first, in the ranks' order.
        samples: in the order of time, for each device.
        spans: named pieces of the program, by rank; ``join`` adds those of other processes.
    """

    devices: tuple[Metered, ...]
    samples: list[Sample] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def start_s(self) -> float:
        return min((sample.time_s for sample in self.samples), default=0.0)

    @property
    def end_s(self) -> float:
        return max((sample.time_s for sample in self.samples), default=0.0)

    @property
    def seconds(self) -> float:
        """From the first sample to the last."""
        return self.end_s - self.start_s

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those that at least one device gave."""
        given = {name for sample in self.samples for name in sample.reading.values}
        return tuple(name for name in METRICS if name in given)

    def of(self, device: int) -> list[Sample]:
        return [sample for sample in self.samples if sample.device == device]

    def series(self, device: int, metric: str) -> list[tuple[float, float]]:
        """(seconds, value) of the samples that have one; an unknown metric raises ValueError."""
        _check(metric)
        return [
            (s.time_s, s.reading.values[metric])
            for s in self.of(device)
            if metric in s.reading.values
        ]

    def mean(self, device: int, metric: str) -> float | None:
        """Mean over the samples; of a counter what it grew by. None where nothing was read."""
        values = [value for _, value in self.series(device, metric)]
        if METRICS[metric].counter:
            return values[-1] - values[0] if len(values) > 1 else None
        return sum(values) / len(values) if values else None

    def peak(self, device: int, metric: str) -> float | None:
        """Largest value; None where nothing was read."""
        return max((value for _, value in self.series(device, metric)), default=None)

    def energy_j(self, device: int) -> float | None:
        """Joules that the device took, by its counter; None where it has none: see ``reason``."""
        return self.mean(device, "energy_j")

    @property
    def total_energy_j(self) -> float | None:
        """Joules of all that has a meter, GPUs or processor packages; None where one gave none."""
        metered = [number for number, d in enumerate(self.devices) if d.has_meter]
        energies = [self.energy_j(number) for number in metered]
        return None if None in energies or not energies else sum(energies)

    def reason(self, device: int, metric: str) -> str | None:
        """Why the last sample has no value of this metric; None where it has one."""
        _check(metric)
        samples = self.of(device)
        if not samples:
            return "no sample was taken: join(traces) reads virtual devices"
        last = samples[-1].reading
        return None if metric in last.values else last.reasons.get(metric, NOT_ITS_KIND)

    def lost(self, device: int) -> bool:
        """Whether the device was gone at the last look."""
        samples = self.of(device)
        return bool(samples) and samples[-1].reading.lost

    def join(self, traces: Mapping[int, StepTrace], devices: DeviceSet) -> None:
        """Add what the ranks traced; of virtual devices this is where all figures come from.

        Args:
            traces: by rank, as ``ranks.pull("trace")`` gives them.
            devices: as in ``telemetry``.
        """
        if devices.kind != "virtual":
            self.spans += [span for trace in traces.values() for span in trace.spans]
            return
        reading = read_traces(traces, devices)
        joined = timeline_telemetry(reading.timeline, reading.peak_bytes)
        self.devices = tuple(
            Metered(f"rank {rank}", devices.provenance, device.name)
            for rank, device in enumerate(devices.devices[: reading.timeline.num_ranks])
        )
        self.samples, self.spans = joined.samples, joined.spans


def _check(metric: str) -> None:
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} is unknown; one of {', '.join(METRICS)}")


def timeline_telemetry(timeline: Timeline, peak_bytes: Sequence[int | None] = ()) -> Telemetry:
    """Telemetry of a step on virtual devices, on the clock of its timeline."""
    samples = timeline_samples(timeline, peak_bytes)
    return Telemetry(metered_ranks(timeline), samples, list(timeline.spans))


def sources_for(
    devices: DeviceSet | None, pids: Sequence[int] = (), traffic: bool = False
) -> list[Source]:
    """Where the figures of these devices come from.

    Args:
        devices: None for the NVIDIA GPUs that this process may use, and for itself.
        pids: of the ranks that do the work; without any, this process does it.
        traffic: read PCIe and NVLink too: some 40 ms a GPU and look.
    """
    if devices is None:
        return [
            NvidiaSource(visible_gpu_uuids(), traffic),
            ProcessSource(pids or [os.getpid()]),
            RaplSource(),
        ]
    if devices.kind == "virtual":
        return []
    if devices.kind == "cpu":
        return [ProcessSource(pids or [os.getpid()]), RaplSource()]
    if devices.kind == "cuda" and torch.version.hip is None:
        return [NvidiaSource([str(device.uuid) for device in devices.devices], traffic)]
    return [AcceleratorSource(devices)]


@contextmanager
def telemetry(
    devices: DeviceSet | None = None,
    *,
    pids: Sequence[int] = (),
    hz: float = DEFAULT_HZ,
    traffic: bool = False,
) -> Iterator[Telemetry]:
    """Look at the devices ``hz`` times a second while the block runs.

    Energy is a counter's difference between two looks, each after a synchronise of the devices of
    this process. Regions of this process are noted as spans of rank 0; those of ranks are added by
    ``join``. Virtual devices show nothing until then.

    Args:
        devices, pids, traffic: see ``sources_for``.
        hz: looks per second.

    Yields:
        A ``Telemetry``, complete when the block has ended, also by an exception.
    """
    sampler = Sampler(sources_for(devices, pids, traffic), hz)
    seen = Telemetry(sampler.devices)
    on = _torch_devices(devices, pids)
    log = SpanLog(0, on[0])
    virtual = devices is not None and devices.kind == "virtual"
    with listening(log.span):
        synchronize(on)
        sampler.start()
        try:
            yield seen
        finally:
            synchronize(on)
            sampler.stop()
            seen.samples += sampler.samples
            if not virtual:  # whose spans lie on another clock
                seen.spans += log.spans()


class Watch:
    """``telemetry`` over several cells: made in one, ended in a later one.

    Args:
        devices, pids, hz, traffic: as of ``telemetry``.
    """

    def __init__(
        self,
        devices: DeviceSet | None = None,
        *,
        pids: Sequence[int] = (),
        hz: float = DEFAULT_HZ,
        traffic: bool = False,
    ) -> None:
        self._stack = ExitStack()
        block = telemetry(devices, pids=pids, hz=hz, traffic=traffic)
        self._seen = self._stack.enter_context(block)

    def end(self) -> Telemetry:
        """Stop watching; returns what was seen. Safe to call twice."""
        self._stack.close()
        return self._seen


def _torch_devices(devices: DeviceSet | None, pids: Sequence[int]) -> list[torch.device]:
    """What this process computes on; where ranks do, it must not open their GPUs itself."""
    if pids:
        return [torch.device("cpu")]
    kind = (accelerator_kind() or "cpu") if devices is None else devices.kind
    its = backend(kind)
    current = its.current_device()
    if devices is None or not its.is_accelerator:
        return [current]
    others = [its.torch_device(device.index) for device in devices.devices]
    return [current, *(device for device in others if device != current)]

"""One training or inference step on all devices, measured or virtual, read in the same way.

On each rank ``trace_step`` runs the step; on the notebook's side ``read_traces`` joins what the
ranks found. Real devices are timed, virtual ones recorded and then timed by their machine's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from labkit.devices.backends import backend
from labkit.devices.inventory import DeviceSet
from labkit.devices.machines import machine
from labkit.measure.memory import storage_bytes
from labkit.measure.regions import listening
from labkit.measure.spans import SpanLog, timeline_of
from labkit.measure.timeline import Span, Timeline
from labkit.measure.timers import StepTimes, time_steps
from labkit.measure.virtual.live_storages import tensors_in
from labkit.measure.virtual.recording import Recording
from labkit.measure.virtual.virtual_clock import play
from labkit.measure.virtual.virtual_step import record_step


@dataclass(frozen=True)
class StepTrace:
    """What one rank found; either ``times`` and ``spans``, or ``recording``.

    Attributes:
        peak_bytes: most bytes alive on the device during the step, counted by the accelerator's
            allocator, elsewhere by storage; None on an accelerator that does not count.
    """

    rank: int
    peak_bytes: int | None
    times: StepTimes | None = None
    spans: tuple[Span, ...] = ()
    recording: Recording | None = None


@dataclass(frozen=True)
class StepReading:
    """A step on all devices.

    Attributes:
        timeline: of one step, every rank on one clock.
        step_time_s: median on real devices; the modelled time on virtual ones.
        peak_bytes: by rank.
        times: what was measured; None on virtual devices.
    """

    timeline: Timeline
    step_time_s: float
    peak_bytes: tuple[int | None, ...]
    times: StepTimes | None = None

    def per_second(self, items: float) -> float:
        """Rate for ``items`` of work in one step, such as tokens/s."""
        return items / self.step_time_s


def trace_step(
    step: Callable[[], object],
    *,
    devices: DeviceSet,
    hold: Sequence[object] = (),
    steps: int = 5,
    group: dist.ProcessGroup | None = None,
) -> StepTrace:
    """Run ``step`` on this rank and note what it does; call it on every rank at once.

    Args:
        step: no arguments; the pieces to be seen in the timeline run inside ``regions.region``.
        devices: those of the notebook; the kind decides between measuring and recording.
        hold: modules, optimizers and tensors alive all the time, for the count of memory.
        steps: timed calls on real devices.
        group: the ranks that share the step; None for one process.

    Raises:
        VirtualOutOfMemoryError: a virtual device's memory is exceeded.
    """
    rank = dist.get_rank(group) if group is not None else 0
    if devices.kind == "virtual":
        recording = record_step(step, hold=hold, capacity_bytes=devices.devices[rank].memory_bytes)
        return StepTrace(rank, recording.peak_bytes, recording=recording)
    return _measured(step, rank, devices, hold, steps, group)


def _measured(step, rank: int, devices: DeviceSet, hold, steps: int, group) -> StepTrace:
    its = backend(devices.kind)
    device = its.current_device()
    times = time_steps(step, devices=[device], steps=steps, group=group)
    its.reset_peak_bytes(device)
    foreign_bytes = (its.allocated_bytes(device) or 0) - storage_bytes(tensors_in(hold))
    log = SpanLog(rank, device)
    if group is not None:
        dist.barrier(group)
    with listening(log.span):
        step()
    peak_bytes = its.peak_bytes(device)
    if peak_bytes is not None:  # what else lies on the device is not the step's
        peak_bytes -= foreign_bytes
    if not its.is_accelerator:  # nobody counts the CPU's: one more step, recorded
        peak_bytes = record_step(step, hold=hold, warm_up=0).peak_bytes
    return StepTrace(rank, peak_bytes, times, log.spans())


def read_traces(traces: Mapping[int, StepTrace], devices: DeviceSet) -> StepReading:
    """Join the traces of all ranks.

    Args:
        traces: by rank, as ``Ranks.pull`` gives them.
        devices: as in ``trace_step``.

    Raises:
        ValueError: there is no trace.
        ProgramMismatchError: recorded programs do not fit together.
    """
    if not traces:
        raise ValueError("no traces to read; pull them from the ranks first")
    ordered = [traces[rank] for rank in sorted(traces)]
    peaks = tuple(trace.peak_bytes for trace in ordered)
    if devices.kind == "virtual":
        modelled = machine(devices.machine, len(ordered))
        played = play([trace.recording for trace in ordered], modelled)
        timeline = replace(
            played, provenance=devices.provenance
        )  # as every number of these devices
        return StepReading(timeline, timeline.step_time_s, peaks)
    spans = {trace.rank: trace.spans for trace in ordered}
    times = ordered[0].times  # the same on every rank: the slowest counts
    return StepReading(timeline_of(spans, devices.provenance), times.median_s, peaks, times)

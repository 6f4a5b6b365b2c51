"""Read what the ranks found when they traced one ``generate``: tokens, timeline, waits, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from labkit.devices.inventory import DeviceSet
from labkit.devices.machines import LAB_WIDTH
from labkit.measure.step_trace import read_traces
from labkit.measure.timeline import Timeline
from labkit.measure.virtual.recording import Recording
from labkit.parallel.generation.generation_trace import GenerationTrace
from labkit.parallel.generation.times import GenerationTimes, timeline_times


@dataclass(frozen=True)
class GenerationReading:
    """One ``generate`` on all devices.

    Attributes:
        tokens: new ids of each prompt, the same on every rank.
        times: of the timeline.
        peak_bytes: by rank; None where nobody counts.
    """

    tokens: tuple[tuple[int, ...], ...]
    timeline: Timeline
    times: GenerationTimes
    peak_bytes: tuple[int | None, ...]


def read_generation(found: Mapping[int, GenerationTrace], devices: DeviceSet) -> GenerationReading:
    """Join what all ranks found in ``trace_generation``.

    Args:
        found: by rank.
        devices: as in ``trace_generation``. Recordings for the machine ``lab`` are widened.
    """
    steps = {rank: its.step for rank, its in found.items()}
    if devices.machine == "lab":
        steps = {rank: replace(t, recording=widened(t.recording)) for rank, t in steps.items()}
    reading = read_traces(steps, devices)
    made = next(iter(found.values())).made
    return GenerationReading(
        made.tokens, reading.timeline, timeline_times(reading.timeline, made), reading.peak_bytes
    )


def widened(recording: Recording, width: float = LAB_WIDTH) -> Recording:
    """Decode steps whose bytes are those of a model ``width`` times as wide, for ``lab``.

    That machine is scaled for activations, which grow with width. A decode step moves weights,
    which grow with width squared, and a KV cache, which grows with width times context: so its
    operators move ``width`` times the bytes here, as on contexts ``width`` times as long. Its few
    activations come out too slow by that factor. A prefill is left as it is: its many tokens share
    the weights.
    """
    decodes = {i for i, region in enumerate(recording.regions) if region.label.startswith("D")}
    events = tuple(
        event._replace(num_bytes=int(event.num_bytes * width))
        if event.kind == "compute" and event.region in decodes
        else event
        for event in recording.events
    )
    return replace(recording, events=events)

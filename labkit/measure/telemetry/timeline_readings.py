"""Telemetry of virtual devices: what meters would have shown, from the timeline, on its clock."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from labkit.measure.telemetry.metrics import METRICS, Metered, Reading
from labkit.measure.telemetry.sampler import Sample
from labkit.measure.timeline import COMPUTE_KINDS, Timeline, merged_intervals

Intervals = list[tuple[float, float]]
UNDER_WAY = ("transfer", "collective")
NO_METER = dict.fromkeys(METRICS, "a modelled device has no such meter")


def timeline_samples(
    timeline: Timeline, peak_bytes: Sequence[int | None] = (), windows: int = 500
) -> list[Sample]:
    """Cut the timeline in equal windows and read each rank over each, noted at its middle.

    - ``compute_percent``: the share of the window in which the rank computes;
    - ``kernel_active_percent``: what NVML would say. On a GPU the receive or collective that a
      rank waits in is itself a kernel, which spins until its data come: so a rank is active from
      the step's start to the end of its last work, whether it computes or waits;
    - ``link_percent``: the share in which a message from or to it, or its collective, is under way.

    Args:
        peak_bytes: by rank, the most bytes alive during the whole step; each window repeats it, as
            the timeline does not know how memory rose and fell.
        windows: >= 1.

    Raises:
        ValueError: ``windows`` is below 1.
    """
    if windows < 1:
        raise ValueError(f"windows={windows} must be at least 1")
    width_s = timeline.step_time_s / windows
    samples = []
    for rank in range(timeline.num_ranks):
        peak = peak_bytes[rank] if rank < len(peak_bytes) else None
        shown = _shown(timeline, rank)
        for window in range(windows if width_s else 0):
            start_s = timeline.start_s + window * width_s
            values = {name: _percent(i, start_s, width_s) for name, i in shown.items()}
            if peak is not None:
                values["memory_peak_bytes"] = peak
            samples.append(Sample(start_s + width_s / 2, rank, Reading(values, NO_METER)))
    return samples


def _shown(timeline: Timeline, rank: int) -> dict[str, Intervals]:
    own = [span for span in timeline.spans if span.rank == rank]
    busy = merged_intervals((s.start_s, s.end_s) for s in own if s.kind in COMPUTE_KINDS)
    arriving = [s for s in timeline.spans if s.stream.endswith(f"->{rank}")]
    under_way = [s for s in own if s.kind in UNDER_WAY]
    last_s = max((span.end_s for span in own), default=timeline.start_s)
    return {
        "compute_percent": busy,
        "kernel_active_percent": [(timeline.start_s, last_s)],
        "link_percent": merged_intervals((s.start_s, s.end_s) for s in under_way + arriving),
    }


def _percent(intervals: Intervals, start_s: float, width_s: float) -> float:
    """Share of the window that the ascending, disjoint intervals cover."""
    end_s, covered_s = start_s + width_s, 0.0
    first = bisect_right(intervals, start_s, key=lambda interval: interval[1])
    for start, end in intervals[first:]:
        if start >= end_s:
            break
        covered_s += min(end, end_s) - max(start, start_s)
    return 100 * min(1.0, covered_s / width_s)


def metered_ranks(timeline: Timeline) -> tuple[Metered, ...]:
    """The timeline's ranks as devices."""
    return tuple(Metered(f"rank {r}", timeline.provenance) for r in range(timeline.num_ranks))

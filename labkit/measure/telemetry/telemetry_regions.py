"""Telemetry by piece of the program: what the devices showed during forward, backward, waiting."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.measure.telemetry.metrics import ACTIVITY
from labkit.measure.telemetry.telemetry import Telemetry
from labkit.measure.timeline import COMPUTE_KINDS, Span, merged_intervals

Intervals = list[tuple[float, float]]
WAITING, OTHER = "waiting", "other work"
# labels of ``generate``: P0 prefills group 0, D0.1 gives its token 1
_GENERATION = ((re.compile(r"P\d+"), "prefill"), (re.compile(r"D\d+\.\d+"), "decode"))
WORTH_NAMING = 1e-3  # of the whole: between any two regions lie some microseconds


@dataclass(frozen=True)
class RegionReading:
    """What one device showed during one kind of region.

    Attributes:
        region: forward, backward ...; ``prefill`` and ``decode`` for the forwards of ``generate``;
            the label of a region of kind compute, and ``other work`` for what none was given;
            ``waiting`` for the rest between the first start and the last end of all ranks, which in
            a pipeline is its bubble. The last two only where they are worth naming.
        seconds: in all.
        samples: looks that fell into it; means of few samples say little.
        active_percent: mean, by metric of ``ACTIVITY``.
        power_w: mean; None without a sample that has it.
        energy_j: by the counter, straight between two looks; None without a counter.
    """

    device: int
    region: str
    seconds: float
    samples: int
    active_percent: dict[str, float]
    power_w: float | None
    energy_j: float | None


def by_region(telemetry: Telemetry) -> list[RegionReading]:
    """Join samples and spans on their common clock: device i with rank i."""
    ranks = sorted({span.rank for span in telemetry.spans})
    return [
        _reading(telemetry, rank, region, intervals)
        for rank in ranks
        if rank < len(telemetry.devices)
        for region, intervals in _regions(telemetry.spans, rank).items()
    ]


def _regions(spans: Sequence[Span], rank: int) -> dict[str, Intervals]:
    own = [s for s in spans if s.rank == rank and s.kind in COMPUTE_KINDS]
    names = dict.fromkeys(map(_name, own))
    regions = {
        name: merged_intervals((s.start_s, s.end_s) for s in own if _name(s) == name)
        for name in names
    }
    busy = merged_intervals((s.start_s, s.end_s) for s in own)
    edges = [min(s.start_s for s in spans), *(t for pair in busy for t in pair)]
    edges.append(max(s.end_s for s in spans))
    regions[WAITING] = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
    least_s = WORTH_NAMING * (edges[-1] - edges[0])
    return {
        name: intervals
        for name, intervals in regions.items()
        if name not in (WAITING, OTHER) or sum(b - a for a, b in intervals) > least_s
    }


def _name(span: Span) -> str:
    if span.kind == "compute":
        return span.label or OTHER
    for label, name in _GENERATION:
        if span.kind == "forward" and label.fullmatch(span.label):
            return name
    return span.kind


def _reading(t: Telemetry, rank: int, region: str, intervals: Intervals) -> RegionReading:
    inside = [s for s in t.of(rank) if any(a <= s.time_s <= b for a, b in intervals)]
    means = {name: _mean([s.reading.values.get(name) for s in inside]) for name in ACTIVITY}
    counter = t.series(rank, "energy_j")
    parts = [_grown(counter, *interval) for interval in intervals]
    return RegionReading(
        rank,
        region,
        sum(b - a for a, b in intervals),
        len(inside),
        {name: mean for name, mean in means.items() if mean is not None},
        _mean([s.reading.values.get("power_w") for s in inside]),
        None if None in parts else sum(parts),
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _grown(counter: list[tuple[float, float]], start_s: float, end_s: float) -> float | None:
    """Growth of a counter within the interval, linear between samples; None outside of them."""
    if not counter or start_s < counter[0][0] or end_s > counter[-1][0]:
        return None
    return _at(counter, end_s) - _at(counter, start_s)


def _at(counter: list[tuple[float, float]], time_s: float) -> float:
    after = bisect_left(counter, (time_s,))
    if after == 0:
        return counter[0][1]
    (t0, v0), (t1, v1) = counter[after - 1], counter[min(after, len(counter) - 1)]
    return v0 if t1 == t0 else v0 + (v1 - v0) * (time_s - t0) / (t1 - t0)

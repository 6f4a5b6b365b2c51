"""One timeline for measured, virtual and planned runs: who did what, from when to when."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

COMPUTE_KINDS = frozenset({"forward", "backward", "weight", "optimizer", "compute"})


@dataclass(frozen=True)
class Span:
    """One piece of work on one rank; ``start_s`` and ``end_s`` in seconds on a common clock.

    ``kind`` is forward, backward, weight, optimizer or compute for work that keeps the device
    busy, and transfer, collective or wait for what does not. ``stream`` tells work that overlaps
    apart.
    """

    rank: int
    start_s: float
    end_s: float
    label: str
    kind: str = "compute"
    stream: str = "compute"

    def __post_init__(self) -> None:
        if self.end_s < self.start_s:
            raise ValueError(
                f"span {self.label!r} of rank {self.rank} ends at {self.end_s} s, before its "
                f"start at {self.start_s} s; are all ranks on one clock?"
            )

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks on one clock, and where they come from.

    Args:
        spans: in any order.
        num_ranks: number of devices, also those without a span.
        provenance: ``measured:cpu``, ``virtual:<profile>``, ``predicted`` ...
    """

    spans: tuple[Span, ...]
    num_ranks: int
    provenance: str

    @property
    def start_s(self) -> float:
        return min((span.start_s for span in self.spans), default=0.0)

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def step_time_s(self) -> float:
        """From the first start to the last end over all ranks."""
        return self.end_s - self.start_s

    def busy_s(self, rank: int) -> float:
        """Seconds in which ``rank`` computes; overlapping spans count once."""
        return sum(end - start for start, end in self._busy_intervals(rank))

    def busy_share(self, rank: int) -> float:
        """Busy seconds of ``rank`` over the step time, 0 to 1."""
        return self.busy_s(rank) / self.step_time_s if self.spans else 0.0

    @property
    def bubble(self) -> float:
        """Idle share of all device time in the step: 0 is perfect, below 1 always."""
        return 1 - sum(self.busy_share(rank) for rank in range(self.num_ranks)) / self.num_ranks

    @property
    def overlap_s(self) -> float:
        """Seconds in which two or more ranks compute at once."""
        edges = sorted(
            edge
            for rank in range(self.num_ranks)
            for start, end in self._busy_intervals(rank)
            for edge in ((start, 1), (end, -1))
        )
        total, running, last_s = 0.0, 0, 0.0
        for time_s, change in edges:
            if running > 1:
                total += time_s - last_s
            running, last_s = running + change, time_s
        return total

    def _busy_intervals(self, rank: int) -> list[tuple[float, float]]:
        return merged_intervals(
            (s.start_s, s.end_s) for s in self.spans if s.rank == rank and s.kind in COMPUTE_KINDS
        )

    def starting_at_zero(self) -> Timeline:
        """The same spans with the first start at 0 s."""
        zero = self.start_s
        moved = (replace(s, start_s=s.start_s - zero, end_s=s.end_s - zero) for s in self.spans)
        return replace(self, spans=tuple(moved))

    def to_chrome_trace(self) -> dict:
        """JSON-able dict for chrome://tracing or Perfetto (Trace Event Format, complete events)."""
        events = [
            {
                "name": span.label,
                "cat": span.kind,
                "ph": "X",
                "ts": span.start_s * 1e6,
                "dur": span.duration_s * 1e6,
                "pid": span.rank,
                "tid": span.stream,
            }
            for span in self.spans
        ]
        return {"traceEvents": events, "otherData": {"provenance": self.provenance}}


def save_chrome_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace for chrome://tracing or Perfetto."""
    path.write_text(json.dumps(timeline.to_chrome_trace()), encoding="utf-8")


def merged_intervals(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Union of intervals, ascending and disjoint.

    >>> merged_intervals([(0, 2), (5, 6), (1, 3)])
    [(0, 3), (5, 6)]
    """
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged

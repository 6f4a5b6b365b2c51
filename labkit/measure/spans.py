"""Note on each rank what it did from when to when, on a clock that all ranks of a host share."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from labkit.measure.timeline import Span, Timeline
from labkit.measure.timers import synchronize


class SpanLog:
    """Spans of one rank.

    On the CPU a span's ends are readings of ``time.perf_counter``, which is one monotonic clock
    for all processes of a host. On an accelerator they are events in the device's queue, placed on
    that clock by a reference event, so that noting a span does not stop the queue.

    Args:
        rank: stands in each span.
        device: the rank's device.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self._noted: list[tuple[str, str, object, object]] = []
        synchronize([device])
        self._reference = self._mark()
        synchronize([device])
        self._reference_s = time.perf_counter()

    @contextmanager
    def span(self, label: str, kind: str = "compute") -> Iterator[None]:
        """Note the block as one span; also when it raises."""
        start = self._mark()
        try:
            yield
        finally:
            self._noted.append((label, kind, start, self._mark()))

    def spans(self) -> tuple[Span, ...]:
        """All spans so far, in seconds of the common clock."""
        synchronize([self.device])
        return tuple(
            Span(self.rank, self._seconds(start), self._seconds(end), label, kind)
            for label, kind, start, end in self._noted
        )

    def clear(self) -> None:
        """Forget the spans so far, such as those of the warm-up."""
        self._noted.clear()

    def _mark(self) -> object:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: object) -> float:
        if isinstance(mark, float):
            return mark
        return self._reference_s + self._reference.elapsed_time(mark) / 1e3


def timeline_of(spans_by_rank: dict[int, Iterable[Span]], provenance: str) -> Timeline:
    """Join what every rank noted into one timeline that starts at 0 s."""
    spans = tuple(span for spans in spans_by_rank.values() for span in spans)
    return Timeline(spans, len(spans_by_rank), provenance).starting_at_zero()

import time
from types import SimpleNamespace

import pytest
import torch

from labkit.measure import spans
from labkit.measure.spans import SpanLog, timeline_of

CPU = torch.device("cpu")


def test_spans_carry_rank_label_and_kind_in_the_order_of_the_work():
    log = SpanLog(1, CPU)
    with log.span("F0", "forward"):
        time.sleep(0.01)
    with log.span("B0", "backward"):
        time.sleep(0.02)
    first, second = log.spans()
    assert (first.rank, first.label, first.kind) == (1, "F0", "forward")
    assert first.duration_s >= 0.01 and second.duration_s >= 0.02
    assert first.end_s <= second.start_s


def test_a_block_that_raises_is_noted_and_raises_on():
    log = SpanLog(0, CPU)
    with pytest.raises(RuntimeError), log.span("F0"):
        raise RuntimeError
    assert [span.label for span in log.spans()] == ["F0"]


def test_clearing_forgets_the_warm_up():
    log = SpanLog(0, CPU)
    with log.span("warm-up"):
        pass
    log.clear()
    assert log.spans() == ()


def test_ranks_join_on_one_clock_that_starts_at_zero():
    logs = [SpanLog(rank, CPU) for rank in (0, 1)]
    for log in logs:
        with log.span("F0", "forward"):
            time.sleep(0.01)
    timeline = timeline_of({log.rank: log.spans() for log in logs}, "measured:cpu")
    assert timeline.num_ranks == 2 and timeline.start_s == 0
    assert timeline.overlap_s == 0 and timeline.step_time_s >= 0.02


class FakeEvent:
    """An accelerator's event: its queue runs on its own clock, in ms."""

    clock_ms = 5000.0

    def __init__(self, device, enable_timing):
        assert enable_timing

    def record(self):
        self.at_ms = FakeEvent.clock_ms

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms


def test_events_of_an_accelerator_are_placed_on_the_hosts_clock(monkeypatch):
    monkeypatch.setattr(spans, "synchronize", lambda devices: None)
    monkeypatch.setattr(spans.torch, "Event", FakeEvent)
    monkeypatch.setattr(spans.time, "perf_counter", lambda: 100.0)
    log = SpanLog(0, SimpleNamespace(type="cuda"))
    FakeEvent.clock_ms += 250
    with log.span("F0", "forward"):
        FakeEvent.clock_ms += 500
    [span] = log.spans()
    assert (span.start_s, span.end_s) == (100.25, 100.75)

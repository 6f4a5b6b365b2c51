"""Waiting times read off clocks and timelines that can be checked by hand."""

from __future__ import annotations

import pytest

from labkit.measure.timeline import Span, Timeline
from labkit.parallel.generation.generate import Generated
from labkit.parallel.generation.times import measured_times, timeline_times

MADE = Generated(
    tokens=((1, 2, 3), (4,)),
    stopped=(False, True),
    begun_s=10.0,
    ready_s=((10.5, 10.6, 10.8), (11.0,)),
    groups=(range(0, 1), range(1, 2)),
)


def test_the_clock_of_the_caller_gives_waits_and_rate():
    times = measured_times(MADE)
    assert times.first_token_s == (0.5, 1.0)
    assert times.per_token_s == (pytest.approx(0.15), None)
    assert times.tokens_per_s == 4.0
    assert str(times) == "first token after 1000.00 ms, 150.00 ms per token after it, 4 tokens/s"


def test_a_token_is_there_when_the_last_device_of_its_step_ends():
    ends = {"P0": 2, "D0.1": 3, "D0.2": 5, "P1": 4}
    spans = [Span(1, end - 1, end, label, "forward") for label, end in ends.items()]
    spans += [Span(0, end - 2, end - 1, label, "forward") for label, end in ends.items()]
    times = timeline_times(Timeline(tuple(spans), 2, "virtual:toy"), MADE)
    assert times.first_token_s == (2, 4)
    assert times.per_token_s == (1.5, None)
    assert times.tokens_per_s == 4 / 5


def test_a_timeline_of_something_else_is_refused():
    with pytest.raises(ValueError, match="no span P0"):
        timeline_times(Timeline((Span(0, 0, 1, "F0"),), 1, "virtual:toy"), MADE)

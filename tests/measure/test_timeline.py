import json

import pytest

from labkit.measure.timeline import Span, Timeline, save_chrome_trace

# rank 0: F 0-2, then idle; rank 1: a transfer 2-3, F 3-5; one unit is a second
TWO = Timeline(
    (
        Span(0, 10.0, 12.0, "F0", "forward"),
        Span(1, 12.0, 13.0, "F0 arrives", "transfer"),
        Span(1, 13.0, 15.0, "F0", "forward"),
    ),
    num_ranks=2,
    provenance="predicted",
)


def test_step_time_runs_from_the_first_start_to_the_last_end():
    assert TWO.step_time_s == 5.0


def test_only_computing_makes_a_device_busy():
    assert [TWO.busy_share(rank) for rank in (0, 1)] == [0.4, 0.4]
    assert TWO.bubble == pytest.approx(0.6)


def test_a_rank_without_spans_is_idle_all_the_time():
    assert Timeline(TWO.spans, 3, "predicted").busy_share(2) == 0.0


def test_spans_that_overlap_on_one_rank_count_once():
    spans = (Span(0, 0, 3, "a"), Span(0, 1, 2, "b"), Span(0, 2, 4, "c", stream="second"))
    assert Timeline(spans, 1, "predicted").busy_s(0) == 4


def test_overlap_is_the_time_in_which_two_ranks_compute_at_once():
    assert TWO.overlap_s == 0
    both = Timeline((Span(0, 0, 3, "a"), Span(1, 2, 5, "b"), Span(2, 2, 4, "c")), 3, "predicted")
    assert both.overlap_s == 2


def test_moving_to_zero_changes_nothing_else():
    moved = TWO.starting_at_zero()
    assert moved.start_s == 0 and moved.step_time_s == 5 and moved.bubble == TWO.bubble


def test_a_span_that_ends_before_it_starts_is_a_clock_mistake():
    with pytest.raises(ValueError, match="one clock"):
        Span(0, 2.0, 1.0, "F0")


def test_the_chrome_trace_is_in_microseconds_with_a_process_for_each_rank():
    trace = TWO.to_chrome_trace()
    assert trace["otherData"] == {"provenance": "predicted"}
    last = trace["traceEvents"][-1]
    assert (last["pid"], last["ts"], last["dur"], last["ph"]) == (1, 13e6, 2e6, "X")


def test_a_saved_trace_is_the_timeline_as_json(tmp_path):
    save_chrome_trace(TWO, tmp_path / "two.json")
    assert json.loads((tmp_path / "two.json").read_text()) == TWO.to_chrome_trace()

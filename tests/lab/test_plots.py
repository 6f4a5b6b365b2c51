import pytest

from labkit.lab.plots import (
    Picture,
    draw_lines,
    draw_matrix,
    draw_plan_and_run,
    draw_slots,
    draw_stacks,
    draw_timeline,
)
from labkit.measure.timeline import Span, Timeline
from labkit.parallel.scheduling.gaps import Gap


def is_png_with_title(picture: Picture, provenance: str) -> bool:
    title = picture.figure.axes[0].get_title()
    return picture._repr_png_().startswith(b"\x89PNG") and f"[{provenance}]" in title


def test_a_timeline_has_a_row_for_each_rank_and_a_bar_for_each_span():
    spans = (Span(0, 0, 1, "F0", "forward"), Span(1, 1, 3, "B0", "backward"))
    picture = draw_timeline(Timeline(spans, 2, "predicted"), "two ranks", unit_s=1.0)
    axes = picture.figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    bars = [(b.get_x(), b.get_width()) for b in axes.patches if b.get_width() > 0]
    assert bars == [(0, 1), (1, 2)]
    assert is_png_with_title(picture, "predicted")


def test_slots_are_called_slots():
    spans = (Span(0, 0, 1, "7"), Span(1, 1, 3, "8"))
    picture = draw_slots(Timeline(spans, 2, "virtual:lab"), "requests")
    labels = [label.get_text() for label in picture.figure.axes[0].get_yticklabels()]
    assert labels == ["slot 0", "slot 1"]
    assert is_png_with_title(picture, "virtual:lab")


@pytest.mark.parametrize("log", [False, True])
def test_lines_say_what_is_on_their_axes(log):
    picture = draw_lines(
        {"loss": [3.0, 2.0], "law": [3.0, 1.9]},
        [1, 2],
        title="loss",
        xlabel="step",
        ylabel="nats",
        provenance="measured:cpu",
        log=log,
    )
    axes = picture.figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "nats")
    assert axes.get_xscale() == ("log" if log else "linear")
    assert is_png_with_title(picture, "measured:cpu")


def test_a_stack_is_as_high_as_the_sum_of_its_parts():
    picture = draw_stacks(
        {"one": {"parameters": 2.0, "gradients": 1.0}, "two": {"parameters": 1.0}},
        title="memory",
        ylabel="MiB",
        provenance="measured:cpu",
    )
    bars = picture.figure.axes[0].patches
    assert max(bar.get_y() + bar.get_height() for bar in bars) == 3.0
    assert is_png_with_title(picture, "measured:cpu")


def test_a_plan_lies_above_its_run_on_the_same_rank():
    plan = Timeline((Span(0, 0, 1, "F0", "forward"),), 1, "predicted")
    run = Timeline((Span(0, 5, 7, "F0", "forward"),), 1, "measured:cpu")
    picture = draw_plan_and_run(plan, run, "one rank", unit_s=1.0)
    above, below = (b for b in picture.figure.axes[0].patches if b.get_width() > 0)
    assert above.get_y() < below.get_y()  # the axis is inverted: rank 0 on top
    assert (above.get_x(), below.get_x()) == (0, 0)
    assert (above.get_width(), below.get_width()) == (1, 2)
    labelled = draw_plan_and_run(plan, run, "t", gaps=[Gap(0, 7.0, 8.0, "drain")], unit_s=1.0)
    names = [text.get_text() for text in labelled.figure.axes[0].get_legend().get_texts()]
    assert names == ["forward", "gap: drain"]
    assert is_png_with_title(picture, "measured:cpu")


def test_a_matrix_writes_every_value_and_leaves_the_diagonal_empty():
    nan = float("nan")
    picture = draw_matrix([[nan, 5.0], [5.0, nan]], title="t", unit="GB/s", provenance="published")
    assert [text.get_text() for text in picture.figure.axes[0].texts] == ["5", "5"]
    assert is_png_with_title(picture, "published")


@pytest.mark.parametrize(
    "x, y, at_x, at_y",
    [
        ([1, 2, 16], [4000, 5000, 6700], ["1", "2", "16"], "5,000"),
        ([1, 1 << 26], [1, 1e6], None, None),
    ],
)
def test_logarithmic_axes_of_few_values_have_plain_numbers(x, y, at_x, at_y):
    axes = draw_lines(
        {"a": y}, x, title="t", xlabel="x", ylabel="y", provenance="p", log=True
    ).figure.axes[0]
    axes.figure.canvas.draw()
    labels = [
        [t.get_text() for which in ("major", "minor") for t in axis.get_ticklabels(which=which)]
        for axis in (axes.xaxis, axes.yaxis)
    ]
    if at_x:
        assert labels[0] == at_x and at_y in labels[1]
    else:
        assert any("10^" in text for text in labels[0]) and any("10^" in t for t in labels[1])

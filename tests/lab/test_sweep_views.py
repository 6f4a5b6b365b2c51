"""A sweep as a table and a picture."""

from __future__ import annotations

from labkit.lab.sweep_views import draw_sweep, sweep_table
from labkit.measure.telemetry.power_sweep import SweepPoint
from labkit.measure.telemetry.published_power import published_sweep

BAND = (0.75, 0.85)


def test_the_table_says_single_run_and_null_for_what_was_not_measured():
    first = sweep_table(published_sweep("BERT")).rows[1]
    assert first[:5] == ["250 W", "1.070", "single run", "0.950", "single run"]
    assert first[5:] == ["null"] * 4
    uncounted = SweepPoint("200 W", 1.2, (1.1, 1.3), None, "measured:cuda", 1234.5)
    assert sweep_table([uncounted]).rows[0][2:5] == ["1.100 to 1.300", "null", "null"]


def test_the_table_has_measured_figures_in_their_units():
    point = SweepPoint("200 W", 1.2, (1.1, 1.3), 0.8, "measured:cuda", 1234.5, 0.02, 71.0, (), BAND)
    assert sweep_table([point]).rows[0][3:5] == ["0.800", "0.750 to 0.850"]
    assert sweep_table([point]).rows[0][5:] == ["1,234", "0.02", "71 °C", "nothing"]


def test_the_picture_names_its_source():
    figure = draw_sweep(published_sweep(), "BERT under power caps").figure
    assert "published: one A40" in figure.axes[0].get_title()
    assert len(figure.axes[0].patches) == 8


def test_the_picture_has_a_whisker_for_each_interval():
    point = SweepPoint("200 W", 1.2, (1.1, 1.3), 0.8, "measured:cuda", energy_interval=BAND)
    (axes,) = draw_sweep([point], "caps").figure.axes
    assert [tuple(line.get_ydata()) for line in axes.lines[:2]] == [(1.1, 1.3), BAND]

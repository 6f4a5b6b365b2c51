"""A sweep as a table and a picture."""

from __future__ import annotations

from labkit.lab.sweep_views import draw_sweep, sweep_table
from labkit.measure.telemetry.power_sweep import SweepPoint
from labkit.measure.telemetry.published_power import published_sweep


def test_the_table_says_single_run_and_null_for_what_was_not_measured():
    first = sweep_table(published_sweep("BERT")).rows[1]
    assert first == ["250 W", "1.070", "single run", "0.950", "null", "null", "null", "null"]


def test_the_table_has_measured_figures_in_their_units():
    point = SweepPoint("200 W", 1.2, (1.1, 1.3), 0.8, "measured:cuda", 1234.5, 0.02, 71.0)
    assert sweep_table([point]).rows[0][4:] == ["1,234", "0.02", "71 °C", "nothing"]


def test_the_picture_names_its_source():
    figure = draw_sweep(published_sweep(), "BERT under power caps").figure
    assert "published: one A40" in figure.axes[0].get_title()
    assert len(figure.axes[0].patches) == 8

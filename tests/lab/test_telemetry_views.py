"""Tables and pictures of telemetry: every reason is shown, nothing is invented."""

from __future__ import annotations

import time

import pytest
from fake_nvml import FakeGPU

from labkit.lab.telemetry_views import (
    draw_telemetry,
    draw_watched_waterfall,
    metrics_table,
    region_table,
    telemetry_table,
)
from labkit.measure.regions import region
from labkit.measure.telemetry.nvidia_source import NvidiaSource
from labkit.measure.telemetry.sampler import Sampler
from labkit.measure.telemetry.telemetry import Telemetry, telemetry, timeline_telemetry
from labkit.measure.timeline import Span, Timeline


def seen_gpus(gpus):
    cards = (
        FakeGPU(busy=80, throttle=0x44, temperature=88, power_w=250.0),
        FakeGPU(lost_from_s=0.05, unsupported=("nvmlDeviceGetTotalEnergyConsumption",)),
    )
    with gpus(*cards), telemetry(hz=40) as t:
        with region("F0", "forward"):
            time.sleep(0.1)
    return t


def test_the_table_has_figures_units_throttling_and_reasons(gpus):
    table = telemetry_table(seen_gpus(gpus))
    first, second = (dict(zip(table.headers, row, strict=True)) for row in table.rows[:2])
    assert first["a kernel is active"] == "80 %" and first["hottest"] == "88 °C"
    assert first["clocks held back by"] == "power cap 100%, hardware thermal 100%"
    assert "(lost)" in second["device"] and second["energy"] == "null"
    assert second["null because"].startswith("the GPU is lost") and "kind" in first["null because"]


def test_traffic_has_columns_where_it_was_asked_for(gpus):
    with gpus(FakeGPU()), telemetry(traffic=True) as t:
        pass
    row = dict(zip(telemetry_table(t).headers, telemetry_table(t).rows[0], strict=True))
    assert row["PCIe sent"] == row["PCIe received"] == "1.20 GB/s"


def test_the_region_table_has_power_and_energy(gpus):
    table = region_table(seen_gpus(gpus))
    assert table.rows[0][:2] == ["GPU 0", "forward"] and table.rows[0][-2] == "250 W"


def test_the_picture_has_a_row_a_device_and_names_its_provenance(gpus):
    figure = draw_telemetry(seen_gpus(gpus), "watched").figure
    assert "measured:cuda" in figure.axes[0].get_title()
    labels = [axis.get_ylabel() for axis in figure.axes]
    assert labels[0].startswith("GPU 0") and "(lost)" in labels[1] and "power" in labels[-1]


def test_a_virtual_waiting_gpu_shows_both_activities():
    spans = (Span(0, 0, 1, "F", "forward"), Span(1, 1, 2, "F", "forward"))
    t = timeline_telemetry(Timeline(spans, 2, "virtual:pair"), [1 << 10, 2 << 10])
    row = dict(zip(telemetry_table(t).headers, telemetry_table(t).rows[1], strict=True))
    assert row["computes"] == "50 %" and row["a kernel is active"] == "100 %"
    assert row["most memory"] == "2.00 KiB" and row["power"] == "null"
    assert row["null because"] == "a modelled device has no such meter"
    assert draw_telemetry(t, "split")._repr_png_().startswith(b"\x89PNG")


def test_a_waterfall_ends_with_the_step_and_stands_over_the_devices_on_one_axis():
    spans = (
        Span(0, 0.0, 0.1, "F", "forward"),
        Span(0, 0.1, 0.15, "F to 1", "transfer", "link 0->1"),
        Span(1, 0.15, 0.25, "F", "forward"),
    )
    t = timeline_telemetry(Timeline(spans, 2, "virtual:pair"), [1 << 20, None])
    figure = draw_watched_waterfall(
        {"ideal": 0.1, "bubble": 0.1, "transfer": 0.05}, t, "split"
    ).figure
    top, *rows = figure.axes
    ideal, bubble, transfer = (patch.get_bbox() for patch in top.patches)
    assert ideal.x0 == 0 and ideal.x1 == bubble.x0 == 100 and bubble.x1 == transfer.x0 == 200
    assert transfer.x1 == pytest.approx(250)
    assert [text.get_text() for text in top.texts] == [" 100 ms", " 100 ms", " 50 ms"]
    assert len(rows) == 2 and all(row.get_xlim() == top.get_xlim() for row in rows)
    forward = rows[1].patches[0].get_bbox()
    assert forward.x0 == pytest.approx(150) and forward.x1 == pytest.approx(250)
    assert "most 1.00 MiB" in rows[0].get_ylabel() and "most" not in rows[1].get_ylabel()
    link = next(line for line in rows[0].lines if line.get_label() == "link in use")
    assert sum(link.get_ydata()) / len(link.get_ydata()) == pytest.approx(20)


def test_work_outside_of_regions_is_named_where_it_is_worth_it():
    spans = [Span(0, 0.0, 1.0, "F", "forward"), Span(0, 1.0, 1.0001, "", "compute")]
    t = timeline_telemetry(Timeline(tuple(spans), 1, "virtual:one"))
    assert [row[1:3] for row in region_table(t).rows] == [["forward", "1 s"]]
    spans[1] = Span(0, 1.0, 1.5, "", "compute")
    t = timeline_telemetry(Timeline(tuple(spans), 1, "virtual:one"))
    assert [row[1:3] for row in region_table(t).rows][1] == ["other work", "500 ms"]


def test_memory_has_the_unit_that_suits_its_size(gpus):
    for used, unit in ((3 << 20, "MiB"), (3 << 30, "GiB"), (0, "B")):
        with gpus(FakeGPU(memory_used=used)):
            sampler = Sampler([NvidiaSource()])
            sampler.look()
        t = Telemetry(sampler.devices, list(sampler.samples))
        axis = draw_telemetry(t, "memory").figure.axes[1]
        assert axis.get_ylabel() == f"memory\n{unit}"
        shown = telemetry_table(t).rows[0][telemetry_table(t).headers.index("most memory")]
        assert shown == (f"3.00 {unit}" if used else "0 B")


def test_telemetry_without_a_sample_is_drawn_with_its_reason():
    from labkit.measure.telemetry.metrics import Metered

    t = Telemetry((Metered("rank 0", "virtual:lab"),))
    figure = draw_telemetry(t, "nothing yet").figure
    assert "join(traces)" in figure.axes[0].texts[0].get_text()


def test_every_figure_that_was_given_is_explained(gpus):
    t = seen_gpus(gpus)
    names = [row[0] for row in metrics_table(t).rows]
    assert names == list(t.metrics) and "power_w" in names and "compute_percent" not in names

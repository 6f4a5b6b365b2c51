"""Tables and pictures of telemetry: every reason is shown, nothing is invented."""

from __future__ import annotations

import time

from fake_nvml import FakeGPU

from labkit.lab.telemetry_views import (
    draw_telemetry,
    metrics_table,
    region_table,
    telemetry_table,
)
from labkit.measure.regions import region
from labkit.measure.telemetry.metrics import METRICS
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
    t = timeline_telemetry(Timeline(spans, 2, "virtual:pair"), [1 << 30, 2 << 30])
    row = dict(zip(telemetry_table(t).headers, telemetry_table(t).rows[1], strict=True))
    assert row["computes"] == "50 %" and row["a kernel is active"] == "100 %"
    assert row["most memory"] == "2.00 GiB" and row["power"] == "null"
    assert row["null because"] == "a modelled device has no such meter"
    assert draw_telemetry(t, "split")._repr_png_().startswith(b"\x89PNG")


def test_telemetry_without_a_sample_is_drawn_with_its_reason():
    from labkit.measure.telemetry.metrics import Metered

    t = Telemetry((Metered("rank 0", "virtual:lab"),))
    figure = draw_telemetry(t, "nothing yet").figure
    assert "join(traces)" in figure.axes[0].texts[0].get_text()


def test_every_figure_is_explained():
    assert len(metrics_table().rows) == len(METRICS)

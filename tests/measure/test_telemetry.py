"""Watching a block: what is seen, of which device, and what is said where nothing is."""

from __future__ import annotations

import csv
import json
import time

import pytest
from fake_nvml import FakeGPU

from labkit.devices.inventory import choose_devices
from labkit.measure.regions import region
from labkit.measure.telemetry.telemetry import Watch, telemetry, timeline_telemetry
from labkit.measure.telemetry.telemetry_export import write_csv, write_json
from labkit.measure.telemetry.telemetry_regions import WAITING, by_region
from labkit.measure.timeline import Span, Timeline

# two ranks, one after the other, and a message between them
SPLIT = Timeline(
    (
        Span(0, 0.0, 1.0, "F", "forward"),
        Span(0, 1.0, 1.5, "F to 1", "transfer", "link 0->1"),
        Span(1, 1.5, 4.0, "F", "forward"),
    ),
    2,
    "virtual:pair",
)


def busy(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_a_block_on_the_cpu_gives_this_process_and_its_regions():
    with telemetry(choose_devices("cpu"), hz=20) as t:
        with region("F0", "forward"):
            busy(0.15)
        with region("prefill"):
            busy(0.1)
    assert t.devices[0].name == "rank 0" and t.devices[0].provenance == "measured:cpu"
    assert t.peak(0, "cpu_percent") > 0 and t.seconds >= 0.25
    assert t.mean(0, "power_w") is None and "no such figure" in t.reason(0, "power_w")
    assert t.energy_j(0) is None and "RAPL" in t.reason(0, "energy_j")
    readings = {r.region: r for r in by_region(t)}
    assert list(readings) == ["forward", "prefill"]
    assert readings["forward"].samples > 1 and readings["forward"].energy_j is None
    assert readings["prefill"].seconds == pytest.approx(0.1, abs=0.05)


def test_gpus_are_seen_with_energy_by_region(gpus):
    with gpus(FakeGPU(power_w=100.0, busy=100), FakeGPU(power_w=50.0)):
        with telemetry(hz=50) as t:
            time.sleep(0.05)
            with region("B0", "backward"):
                time.sleep(0.2)
            time.sleep(0.05)
    assert [d.name for d in t.devices[:2]] == ["GPU 0", "GPU 1"]
    assert t.energy_j(0) == pytest.approx(100 * t.seconds, rel=0.1)
    assert t.energy_j(1) == pytest.approx(50 * t.seconds, rel=0.1)
    backward = by_region(t)[0]
    assert backward.region == "backward" and backward.power_w == 100
    assert backward.energy_j == pytest.approx(100 * backward.seconds, rel=0.1)
    assert backward.active_percent == {"kernel_active_percent": 100}


def test_the_total_energy_is_that_of_all_meters_or_of_none(gpus):
    with gpus(FakeGPU(power_w=100.0), FakeGPU(power_w=50.0)):
        with telemetry(hz=50) as t:
            time.sleep(0.1)
    assert t.total_energy_j == pytest.approx(150 * t.seconds, rel=0.1)
    with gpus(FakeGPU(), FakeGPU(unsupported=("nvmlDeviceGetTotalEnergyConsumption",))):
        with telemetry(hz=50) as t:
            pass
    assert t.total_energy_j is None
    assert timeline_telemetry(SPLIT).total_energy_j is None


def test_without_devices_the_gpus_are_those_that_the_environment_shows(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    with gpus(*(FakeGPU(busy=10 * i) for i in range(3))):
        with telemetry() as t:
            pass
    assert [d.name for d in t.devices[:3]] == ["GPU 0", "GPU 1", "rank 0"]
    assert [t.mean(i, "kernel_active_percent") for i in range(2)] == [20, 0]


def test_what_was_seen_before_an_exception_is_kept():
    with pytest.raises(ZeroDivisionError):
        with telemetry(choose_devices("cpu")) as t:
            1 / 0  # noqa: B018
    assert len(t.samples) == 2


def test_a_virtual_device_shows_nothing_until_it_is_joined():
    with telemetry(choose_devices("virtual", 2)) as t:
        pass
    assert t.samples == [] and "join(traces)" in t.reason(0, "power_w")


def test_a_waiting_virtual_gpu_is_active_as_nvml_would_say_and_does_not_compute():
    t = timeline_telemetry(SPLIT, [100, None])
    assert t.mean(0, "compute_percent") == pytest.approx(25)
    assert t.mean(1, "compute_percent") == pytest.approx(62.5)
    assert t.mean(1, "kernel_active_percent") == pytest.approx(100)
    assert t.mean(0, "kernel_active_percent") == pytest.approx(37.5)  # sent its last: idle
    assert t.mean(0, "link_percent") == t.mean(1, "link_percent") == pytest.approx(12.5)
    assert t.peak(0, "memory_peak_bytes") == 100 and t.peak(1, "memory_peak_bytes") is None
    assert "modelled" in t.reason(0, "power_w")


def test_waiting_is_what_is_left_between_the_first_start_and_the_last_end():
    waiting = {r.device: r for r in by_region(timeline_telemetry(SPLIT)) if r.region == WAITING}
    assert waiting[0].seconds == pytest.approx(3.0) and waiting[1].seconds == pytest.approx(1.5)
    assert waiting[1].active_percent["kernel_active_percent"] == pytest.approx(100)
    assert waiting[1].active_percent["compute_percent"] < 1


def test_csv_and_json_hold_every_figure_and_every_reason(tmp_path, gpus):
    with gpus(FakeGPU(busy=40, unsupported=("nvmlDeviceGetFanSpeed",)), FakeGPU(fan=33)):
        with telemetry(hz=50) as t:
            time.sleep(0.05)
    rows = list(csv.DictReader(write_csv(t, tmp_path / "t.csv").open()))
    fans = {row["device"]: row for row in rows if row["metric"] == "fan_percent"}
    assert fans["GPU 0"]["value"] == "" and "not supported" in fans["GPU 0"]["reason"]
    assert fans["GPU 1"]["value"] == "33" and fans["GPU 1"]["unit"] == "%"
    data = json.loads(write_json(t, tmp_path / "t.json").read_text())
    assert data["samples"][0]["kernel_active_percent"] == 40 and data["samples"][0]["time_s"] == 0
    assert "not supported" in data["missing"][0]["fan_percent"]
    assert data["devices"][0]["model"] == "NVIDIA RTX A6000"


def test_a_watch_spans_several_cells_and_can_be_ended_twice():
    watch = Watch(choose_devices("cpu"), hz=50)
    with region("F0", "forward"):
        busy(0.05)
    t = watch.end()
    seen = len(t.samples)
    assert watch.end() is t and len(t.samples) == seen >= 2 and len(t.spans) == 1
    with region("F1", "forward"):
        pass
    assert len(t.spans) == 1, "nobody listens any more"


def test_an_unknown_metric_is_refused():
    with pytest.raises(ValueError, match="metric='watts' is unknown"):
        timeline_telemetry(SPLIT).mean(0, "watts")

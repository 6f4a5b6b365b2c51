import pytest
import torch
from torch import nn

from labkit.devices.inventory import choose_devices
from labkit.measure.regions import region
from labkit.measure.step_trace import read_traces, trace_step
from labkit.measure.virtual.live_storages import VirtualOutOfMemoryError

model = nn.Linear(64, 64)


def step():
    with region("F0", "forward"):
        loss = model(torch.ones(32, 64)).sum()
    with region("B0", "backward"):
        loss.backward()


@pytest.mark.parametrize("kind", ["cpu", "virtual:a6000-pcie"])
def test_a_step_is_read_in_the_same_way_whether_measured_or_virtual(kind):
    devices = choose_devices(kind, 1)
    reading = read_traces({0: trace_step(step, devices=devices, hold=[model])}, devices)
    assert {s.label for s in reading.timeline.spans} >= {"F0", "B0"}
    assert {s.kind for s in reading.timeline.spans} >= {"forward", "backward"}
    assert reading.step_time_s > 0
    assert reading.per_second(32) == pytest.approx(32 / reading.step_time_s)
    assert reading.timeline.provenance.startswith("measured:cpu" if kind == "cpu" else "virtual:")


def test_memory_is_counted_alike_and_only_measured_steps_have_times():
    cpu, virtual = choose_devices("cpu"), choose_devices("virtual:a6000-pcie")
    measured = read_traces({0: trace_step(step, devices=cpu, steps=3, hold=[model])}, cpu)
    modelled = read_traces({0: trace_step(step, devices=virtual, hold=[model])}, virtual)
    assert measured.times.n == 3 and modelled.times is None
    assert measured.peak_bytes[0] >= 2 * 4 * (64 * 64 + 64)  # weights and gradients
    assert modelled.peak_bytes == measured.peak_bytes


def test_the_virtual_time_is_the_same_on_every_run():
    devices = choose_devices("virtual:a6000-pcie")
    times = {
        read_traces({0: trace_step(step, devices=devices)}, devices).step_time_s for _ in range(2)
    }
    assert len(times) == 1


def test_a_step_that_does_not_fit_a_virtual_device_is_a_real_event():
    devices = choose_devices("virtual:lab")  # 1.5 GiB
    with pytest.raises(VirtualOutOfMemoryError, match="MiB"):
        trace_step(lambda: torch.empty(512 << 20), devices=devices)


def test_there_must_be_something_to_read():
    with pytest.raises(ValueError, match="no traces"):
        read_traces({}, choose_devices("cpu"))

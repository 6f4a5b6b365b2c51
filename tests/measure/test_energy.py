"""Energy of a step on one, two and four devices: whose counters, over which steps, and when not."""

from __future__ import annotations

import pytest
import torch
from fake_nvml import FakeGPU

from labkit.devices.inventory import Device, DeviceSet, choose_devices
from labkit.devices.needs import EnergyCounters, need_from_json, need_to_json
from labkit.measure.telemetry import energy
from labkit.measure.telemetry.cpu_source import RaplSource
from labkit.measure.telemetry.energy import RankEnergy, count_energy, read_energy
from labkit.measure.telemetry.nvidia_source import NvidiaSource

STEPS, STEP_S = 10, 0.5


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """One clock for the program and for the counters; a step moves it on."""
    seconds = [100.0]
    monkeypatch.setattr(energy.time, "perf_counter", lambda: seconds[0])
    return seconds


def step_of(clock):
    def step():
        clock[0] += STEP_S

    return step


def cuda(library, *places):
    listed = enumerate(library.scenario.gpus[place].uuid for place in places)
    return DeviceSet(tuple(Device("cuda", i, "A6000", uuid) for i, uuid in listed), 4)


def counted(library, clock, devices, step=None):
    """What each rank would count, one rank after the other."""
    library.clock, library.began_s = (lambda: clock[0]), 0.0
    step, found = step or step_of(clock), {}
    for rank, device in enumerate(devices.devices):
        meters = [NvidiaSource([device.uuid])]
        one = count_energy(step, devices=devices, steps=STEPS, meters=meters)
        found[rank] = RankEnergy(rank, *list(vars(one).values())[1:])
    return found


@pytest.mark.parametrize("places", [(0,), (0, 1), (0, 1, 2, 3), (3, 2)])
def test_energy_a_token_is_that_of_all_devices_used_and_of_no_other(gpus, clock, places):
    watts = (100.0, 50.0, 200.0, 10.0)
    with gpus(*(FakeGPU(power_w=w) for w in watts)) as library:
        devices = cuda(library, *places)
        reading = read_energy(counted(library, clock, devices), devices)
    power_w = sum(watts[place] for place in places)
    assert reading.power_w == pytest.approx(power_w)
    assert reading.per_token(64) == pytest.approx(power_w * STEP_S / 64)
    assert reading.reason is None and reading.num_devices == len(places)
    assert EnergyCounters(len(places), reading.reason).refusal(devices) is None


def test_the_first_step_is_not_counted(gpus, clock):
    calls = []

    def step():
        clock[0] += 100 if not calls else STEP_S
        calls.append(1)

    with gpus(FakeGPU(power_w=100.0)) as library:
        devices = cuda(library, 0)
        reading = read_energy(counted(library, clock, devices, step), devices)
    assert reading.energy_j == pytest.approx(100 * STEP_S) and len(calls) == STEPS + 1


def test_one_counter_that_is_missing_or_lost_leaves_no_number_and_says_whose(gpus, clock):
    for broken, word in (
        (FakeGPU(unsupported=("nvmlDeviceGetTotalEnergyConsumption",)), "not supported"),
        (FakeGPU(lost_from_s=109.0), "lost"),  # between its two looks: 105.5 and 110.5
    ):
        clock[0] = 100.0
        with gpus(FakeGPU(power_w=100.0), broken) as library:
            devices = cuda(library, 0, 1)
            reading = read_energy(counted(library, clock, devices), devices)
        assert reading.energy_j is None and reading.per_token(64) is None
        assert reading.reason.startswith("rank 1: ") and word in reading.reason
        need = EnergyCounters(2, reading.reason)
        assert need.refusal(devices) == reading.reason
        assert need_from_json(need_to_json(need)) == need


def test_a_counter_that_began_anew_is_no_energy(gpus, clock):
    # power falls to almost nothing, and the scripted counter is power times time
    with gpus(FakeGPU(power_w=[[0, 300.0], [103, 300.0], [103.1, 1.0]])) as library:
        devices = cuda(library, 0)
        reading = read_energy(counted(library, clock, devices), devices)
    assert reading.energy_j is None and "began anew" in reading.reason


def test_too_short_a_run_is_not_believed(gpus, clock):
    with gpus(FakeGPU(power_w=100.0)) as library:
        devices = cuda(library, 0)
        found = counted(library, clock, devices, lambda: None)
    assert "too short" in read_energy(found, devices).reason


def test_another_device_set_than_the_ranks_used_is_seen(gpus, clock):
    with gpus(*(FakeGPU(power_w=100.0) for _ in range(4))) as library:
        found = counted(library, clock, cuda(library, 0, 1))
        with pytest.raises(ValueError, match=r"ranks \[0, 1\] for 4 devices"):
            read_energy(found, cuda(library, 0, 1, 2, 3))
        with pytest.raises(ValueError, match=r"ranks \[0, 1\] for 1 devices"):
            read_energy(found, cuda(library, 0))
        with pytest.raises(
            ValueError,
            match="counted GPU-a6000000.*GPU-a6000001.*, but the devices are .*GPU-a6000002",
        ):
            read_energy(found, cuda(library, 0, 2))
        twice = {0: found[0], 1: RankEnergy(1, STEPS, 1.0, found[0].meters, 1.0)}
        with pytest.raises(ValueError, match="give the device set that the ranks used"):
            read_energy(twice, cuda(library, 0, 1))
        with pytest.raises(ValueError, match=r"\[10, 9\] steps"):
            read_energy({0: found[0], 1: RankEnergy(1, 9, 1.0, found[1].meters, 1.0)},
                        cuda(library, 0, 1))  # fmt: skip


def test_a_rank_counts_what_it_is_bound_to_and_not_what_the_set_says(gpus, monkeypatch):
    class Bound:
        def uuid(self, index):
            return "GPU-a6000001-0000-4000-8000-000000000001"

    monkeypatch.setattr(energy, "backend", lambda kind: Bound())
    with gpus(FakeGPU(), FakeGPU()) as library:
        (source,) = energy._own_meters(cuda(library, 0), 0, torch.device("cuda", 0))
    assert [metered.uuid for metered in source.devices] == [Bound().uuid(0)]


def test_virtual_devices_run_nothing_and_refuse():
    devices = choose_devices("virtual", 2)
    one = count_energy(lambda: pytest.fail("it ran"), devices=devices, steps=3)
    reading = read_energy({0: one, 1: RankEnergy(1, *list(vars(one).values())[1:])}, devices)
    assert reading.energy_j is None and reading.power_w is None
    assert EnergyCounters(2, reading.reason).refusal(devices) == reading.reason
    assert "not modelled" in reading.reason


def test_the_packages_of_the_cpu_count_once_for_all_ranks(tmp_path, clock):
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, text in (("name", "package-0"), ("max_energy_range_uj", "9" * 12)):
        (zone / name).write_text(text)
    counter = zone / "energy_uj"
    counter.write_text("0")

    def step():
        clock[0] += STEP_S
        counter.write_text(str(int(counter.read_text()) + 20_000_000))

    devices = choose_devices("cpu", 2)
    first = count_energy(step, devices=devices, steps=STEPS, meters=[RaplSource(tmp_path)])
    other = RankEnergy(1, STEPS, 5.0, (), 0.0)  # as _own_meters gives rank 1 nothing to read
    assert energy._own_meters(devices, 1, None) == []
    reading = read_energy({0: first, 1: other}, devices)
    assert reading.energy_j == pytest.approx(20) and reading.power_w == pytest.approx(40)


def test_a_cpu_without_counters_has_no_energy_and_says_so(clock):
    devices = choose_devices("cpu")
    found = count_energy(step_of(clock), devices=devices, steps=STEPS, meters=[])
    reading = read_energy({0: found}, devices)
    assert reading.energy_j is None and "RAPL" in reading.reason


def test_no_steps_are_refused():
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        count_energy(lambda: None, devices=choose_devices("cpu"), steps=0)

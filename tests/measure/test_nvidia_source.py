"""Figures of NVIDIA GPUs: the real nvitop on a scripted library."""

from __future__ import annotations

import statistics
import time

import nvitop
import pynvml
import pytest
from fake_nvml import FakeGPU

from labkit.devices.nvml import gpu_of_uuid, physical_gpus, visible_uuids
from labkit.measure.telemetry.nvidia_source import NvidiaSource
from labkit.measure.telemetry.sampler import Sampler


def test_every_figure_comes_in_its_unit(gpus):
    gpu = FakeGPU(busy=80, power_w=250.0, temperature=64, fan=55, memory_used=3 << 30, throttle=4)
    with gpus(gpu):
        values = NvidiaSource().read(0).values
    assert values["kernel_active_percent"] == 80 and values["memory_used_bytes"] == 3 << 30
    assert values["power_w"] == 250 and values["temperature_c"] == 64
    assert values["fan_percent"] == 55 and values["throttle_bits"] == 4
    assert values["sm_clock_mhz"] == 1410 and values["memory_clock_mhz"] == 8001


def test_four_gpus_follow_their_key_frames(gpus):
    frames = [FakeGPU(busy=[[0, 0], [start, 0], [start + 0.01, 90]]) for start in (0, 0.05, 9, 9)]
    with gpus(*frames):
        source = NvidiaSource()
        time.sleep(0.1)
        busy = [source.read(i).values["kernel_active_percent"] for i in range(4)]
    assert busy == [90, 90, 0, 0]


def test_a_look_at_four_gpus_takes_less_than_2_ms_of_cpu(gpus):
    # benchmarks/telemetry.py measures it with care; this only notices when it becomes expensive
    taken_s = []
    with gpus(*(FakeGPU(busy=50) for _ in range(4))):
        sampler = Sampler([NvidiaSource()])
        for _ in range(100):
            began_s = time.thread_time()
            sampler.look()
            taken_s.append(time.thread_time() - began_s)
    assert statistics.median(taken_s) < 2e-3


def test_energy_grows_by_power_times_time(gpus):
    with gpus(FakeGPU(power_w=200.0)):
        source = NvidiaSource()
        before, began = source.read(0).values["energy_j"], time.monotonic()
        time.sleep(0.1)
        grown, seconds = source.read(0).values["energy_j"] - before, time.monotonic() - began
    assert grown == pytest.approx(200 * seconds, rel=0.1)


def test_an_unsupported_query_is_null_with_its_reason_and_the_others_go_on(gpus):
    gpu = FakeGPU(busy=50, unsupported=("nvmlDeviceGetFanSpeed", "nvmlDeviceGetMemoryInfo"))
    with gpus(gpu) as library:
        source = NvidiaSource()
        reading = source.read(0)
        asked = library.asked["nvmlDeviceGetFanSpeed"]
        again = source.read(0)
        assert library.asked["nvmlDeviceGetFanSpeed"] == asked, "asked again in vain"
    for each in (reading, again):
        assert "fan_percent" not in each.values and each.values["kernel_active_percent"] == 50
        assert each.reasons["fan_percent"] == "not supported by this device"
        assert each.reasons["memory_used_bytes"] == "not supported by this device"


def test_power_falls_back_to_the_drivers_average(gpus):
    with gpus(FakeGPU(power_w=90.0, unsupported=("nvmlDeviceGetFieldValues",))):
        assert NvidiaSource().read(0).values["power_w"] == 90


def test_traffic_is_read_only_when_asked_for(gpus):
    with gpus(FakeGPU()) as library:
        assert "traffic=True" in NvidiaSource().read(0).reasons["pcie_sent_bytes_per_s"]
        assert "nvmlDeviceGetPcieThroughput" not in library.asked
        asked = NvidiaSource(traffic=True).read(0)
    assert asked.values["pcie_sent_bytes_per_s"] == 1.2e9
    assert asked.reasons["nvlink_sent_bytes"] == "not supported by this device"


def test_a_lost_gpu_shows_as_lost_and_keeps_no_old_value(gpus):
    with gpus(FakeGPU(busy=70, lost_from_s=0.05), FakeGPU(busy=30)):
        source = NvidiaSource()
        assert source.read(0).values["kernel_active_percent"] == 70
        time.sleep(0.06)
        lost, other = source.read(0), source.read(1)
    assert lost.lost and lost.values == {} and "fallen off" in lost.reasons["power_w"]
    assert not other.lost and other.values["kernel_active_percent"] == 30


def test_a_gpu_lost_before_the_start_is_lost_too(gpus):
    with gpus(FakeGPU(lost_from_s=0), FakeGPU()):
        source = NvidiaSource()
        assert source.read(0).lost and not source.read(1).lost


def test_gpus_are_found_by_uuid_in_the_order_of_the_ranks(gpus):
    cards = [FakeGPU(busy=10 * i) for i in range(4)]
    with gpus(*cards):
        uuids = [cards[i].uuid for i in (3, 1)]
        source = NvidiaSource(uuids)
        busy = [source.read(i).values["kernel_active_percent"] for i in range(2)]
        unknown = NvidiaSource(["GPU-ffffffff-0000-4000-8000-000000000000"]).read(0)
    assert busy == [30, 10] and [d.uuid for d in source.devices] == uuids
    assert "no GPU of this UUID" in unknown.reasons["power_w"]


@pytest.mark.parametrize(
    "variable, expected",
    [
        (None, [0, 1, 2, 3]),
        ("2,3", [2, 3]),
        ("1,0", [1, 0]),
        ("", []),
        ("GPU-a6000002-0000-4000-8000-000000000002", [2]),
        ("GPU-a6000003,GPU-a6000000", [3, 0]),  # beginnings of UUIDs
        ("GPU-a600000", []),  # fits all four
        ("1,9,0", [1]),
        ("1,1", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(gpus, variable, expected):
    with gpus(*(FakeGPU() for _ in range(4))):
        uuids = [gpu.uuid() for gpu in physical_gpus().devices]
        seen = visible_uuids(variable, uuids)
        assert [gpu_of_uuid(uuid).index for uuid in seen] == expected
    assert seen == [uuids[i] for i in expected]


def test_a_mig_instance_is_named_by_its_whole_uuid():
    assert visible_uuids("MIG-c7", ["GPU-aa"]) == ["MIG-c7"]


@pytest.mark.parametrize("variable", ["2,3", "1,0", ""])
def test_nvitop_reads_indices_alike(gpus, variable):
    with gpus(*(FakeGPU() for _ in range(4))):
        uuids = [gpu.uuid() for gpu in physical_gpus().devices]
        nvitops = nvitop.Device.parse_cuda_visible_devices(variable)
        assert [uuids[i] for i in nvitops] == visible_uuids(variable, uuids)


@pytest.mark.parametrize(
    "code, reason",
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver is installed"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot"),
    ],
)
def test_without_a_working_driver_there_are_no_gpus_and_no_banner(gpus, caplog, code, reason):
    with gpus(init_error=code):
        found = physical_gpus()
        assert NvidiaSource().devices == ()
    assert found.devices == () and reason in found.reason
    assert caplog.text == ""


def test_a_mig_instance_is_found_though_torch_writes_its_uuid_as_a_gpus(gpus):
    name = "a6000009-0000-4000-8000-000000000009"
    unsupported = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage")
    instance = FakeGPU(
        uuid=f"MIG-{name}", instance_of=1, memory_used=5 << 30, unsupported=unsupported
    )
    with gpus(FakeGPU(), FakeGPU(mig=1), instance):
        assert len(physical_gpus().devices) == 2
        source = NvidiaSource([f"GPU-{name}"])
        reading = source.read(0)
    assert source.devices[0].uuid == f"MIG-{name}"
    assert reading.values["memory_used_bytes"] == 5 << 30
    assert reading.reasons["kernel_active_percent"] == "not supported by this device"


def test_a_mig_gpu_and_wsl_answer_what_they_can(gpus):
    no_rates = ("nvmlDeviceGetUtilizationRates",)
    wsl = ("nvmlDeviceGetFanSpeed", "nvmlDeviceGetTotalEnergyConsumption")
    with gpus(FakeGPU(mig=1, unsupported=no_rates), FakeGPU(unsupported=wsl)):
        source = NvidiaSource()
        mig, in_wsl = source.read(0), source.read(1)
    assert mig.reasons["kernel_active_percent"] == "not supported by this device"
    assert mig.values["memory_used_bytes"] == 0 and "energy_j" not in in_wsl.values
    assert in_wsl.values["temperature_c"] == 35

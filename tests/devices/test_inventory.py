import json
from types import SimpleNamespace

import pytest

from labkit.devices import backends, inventory
from labkit.devices.inventory import Device, DeviceSet, choose_devices


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two A6000s, as far as the inventory can tell."""
    fake = SimpleNamespace(
        count=lambda: 2,
        name=lambda index: "NVIDIA RTX A6000",
        uuid=lambda index: f"GPU-{index}",
        memory_bytes=lambda index: 48 << 30,
    )
    monkeypatch.setattr(inventory, "accelerator_kind", lambda: "cuda")
    monkeypatch.setattr(inventory, "backend", lambda kind: fake)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(inventory, "accelerator_kind", lambda: None)


@pytest.mark.parametrize(
    "requested, count, kind",
    [
        ("auto", 1, "cuda"),
        ("auto", 2, "cuda"),
        ("auto", 4, "virtual"),
        ("cuda", 2, "cuda"),
        ("cpu", 2, "cpu"),
    ],
)
def test_auto_takes_accelerators_only_where_there_are_enough(two_gpus, requested, count, kind):
    found = choose_devices(requested, count)
    assert (found.kind, found.count) == (kind, count)
    assert found.provenance == ("virtual:lab" if kind == "virtual" else f"measured:{kind}")


def test_asking_for_more_gpus_than_there_are_says_what_is_there_and_what_to_choose(two_gpus):
    with pytest.raises(ValueError, match="'cuda' with count=4.*2 of kind cuda.*DEVICES=auto"):
        choose_devices("cuda", 4)


def test_asking_for_gpus_without_any_is_a_clear_error(no_gpu):
    with pytest.raises(ValueError, match="'cuda'.*no accelerator.*DEVICES=auto"):
        choose_devices("cuda", 1)


def test_a_kind_that_does_not_exist_is_not_mistaken_for_one_that_is_absent(no_gpu):
    with pytest.raises(ValueError, match="'tpu' is unknown; choose auto, cuda"):
        choose_devices("tpu", 1)


def test_a_count_below_one_is_refused(no_gpu):
    with pytest.raises(ValueError, match="count=0"):
        choose_devices("auto", 0)


def test_a_gpu_knows_its_name_uuid_memory_and_published_peak(two_gpus):
    device = choose_devices("cuda", 2).devices[1]
    assert (device.index, device.uuid, device.memory_bytes) == (1, "GPU-1", 48 << 30)
    assert device.peak_flops["float32"] == 38.7e12


def test_the_peak_of_an_unknown_device_is_unknown(no_gpu):
    assert choose_devices("cpu").devices[0].peak_flops is None


def test_a_device_set_survives_json(no_gpu):
    found = choose_devices("cpu", 2)
    assert DeviceSet.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_set_holds_one_kind():
    with pytest.raises(ValueError, match="cpu.*cuda.*one kind"):
        DeviceSet((Device("cpu", 0, "a"), Device("cuda", 0, "b")), 2)
    with pytest.raises(ValueError, match="at least one"):
        DeviceSet((), 2)


def test_fewer_of_the_same_devices(no_gpu):
    four = choose_devices("cpu", 4)
    assert four.first(2).count == 2
    with pytest.raises(ValueError, match="count=5.*1..4"):
        four.first(5)


def test_a_rank_sees_only_its_own_gpu_and_a_cpu_rank_none(monkeypatch):
    cuda, cpu = backends.Backend("cuda"), backends.Backend("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    assert cuda.visible_environment(1) == {"CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert cuda.visible_environment(1) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert cpu.visible_environment(0)["CUDA_VISIBLE_DEVICES"] == ""


def test_the_cpu_counts_no_memory_instead_of_answering_zero():
    cpu = backends.backend("cpu")
    device = cpu.torch_device(1)
    cpu.reset_peak_bytes(device)
    assert cpu.peak_bytes(device) is None and cpu.allocated_bytes(device) is None
    cpu.synchronize([device])
    assert device.index is None and cpu.bind(1) == device


def test_a_back_end_that_is_not_here_is_named():
    with pytest.raises(ValueError, match="kind='warp'"):
        backends.backend("warp")


def test_virtual_gpus_are_those_of_a_named_machine_and_know_its_peak(no_gpu):
    found = choose_devices("virtual:a6000-nvlink", 4)
    assert found.provenance == "virtual:a6000-nvlink" and found.machine == "a6000-nvlink"
    assert found.devices[3].memory_bytes == 48 << 30
    assert found.devices[3].peak_flops["float32"] == 38.7e12
    assert DeviceSet.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.first(2).machine == "a6000-nvlink"


def test_an_unknown_virtual_machine_lists_those_there_are(no_gpu):
    with pytest.raises(ValueError, match="'b9000'.*a6000-pcie"):
        choose_devices("virtual:b9000", 2)


def test_virtual_gpus_are_executed_by_the_cpu():
    assert backends.backend("virtual") == backends.backend("cpu")

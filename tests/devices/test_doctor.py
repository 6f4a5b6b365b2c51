"""The doctor on made-up machines: each fault seeded once and found."""

from __future__ import annotations

import os
import time

import pytest
import torch
from fake_nvml import FakeGPU

from labkit.devices.doctor.doctor import examine, exit_status, report_json, torch_sees
from labkit.devices.doctor.doctor_checks import FAILURE, OK, UNKNOWN, WARNING, Finding
from labkit.devices.doctor.doctor_gpus import examine_gpus
from labkit.devices.doctor.doctor_system import examine_system, numa_node
from labkit.devices.links.link_copies import DeviceCopies
from labkit.devices.links.peer_data import examine_peer_data
from labkit.devices.nvml import physical_gpus

HOST_BRIDGE = "sys/bus/pci/devices/0000:00:01.0"


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def system(root, num_gpus=0):
    return {finding.check: finding for finding in examine_system(root, num_gpus)}


def of_gpus(root, **options):
    found = examine_gpus(physical_gpus(), root, **options)
    return {(finding.check, finding.device): finding for finding in found}


@pytest.mark.parametrize("option, level", [("Auto", FAILURE), ("off", OK), ("false", OK)])
def test_sli_in_the_x_configuration_is_found(tmp_path, option, level):
    write(tmp_path, "etc/X11/xorg.conf", f'Section "Screen"\n  Option "SLI" "{option}"\n')
    assert system(tmp_path)["sli"].level == level


def test_base_mosaic_in_a_folder_of_x_configurations_is_found(tmp_path):
    write(tmp_path, "etc/X11/xorg.conf.d/20-gpu.conf", 'Option "BaseMosaic" "True"\n')
    found = system(tmp_path)["sli"]
    assert found.level == FAILURE and "20-gpu.conf" in found.found


@pytest.mark.parametrize("boot, level", [("quiet splash", WARNING), ("quiet iommu=pt", OK)])
def test_an_iommu_that_translates_is_a_warning(tmp_path, boot, level):
    write(tmp_path, "proc/cmdline", boot)
    (tmp_path / "sys/class/iommu/dmar0").mkdir(parents=True)
    assert system(tmp_path)["iommu"].level == level


def bridge(root, control):
    """A PCIe bridge whose second extended capability is ACS with these control bits."""
    write(root, f"{HOST_BRIDGE}/class", "0x060400\n")
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 0x150 << 20).to_bytes(4, "little")
    config[0x150:0x154] = (0x000D).to_bytes(4, "little")
    config[0x156:0x158] = control.to_bytes(2, "little")
    return root / HOST_BRIDGE / "config", bytes(config)


@pytest.mark.parametrize("control, level", [(0x1D, WARNING), (0, OK)])
def test_access_control_on_a_bridge_is_read_from_its_configuration(tmp_path, control, level):
    path, config = bridge(tmp_path, control)
    path.write_bytes(config)
    assert system(tmp_path)["acs"].level == level
    assert "no PCI bridge" in system(tmp_path / "none")["acs"].found


def test_a_configuration_that_only_root_may_read_is_unknown(tmp_path):
    path, config = bridge(tmp_path, 0x1D)
    path.write_bytes(config[:64])
    assert system(tmp_path)["acs"].level == UNKNOWN


def test_little_shared_memory_fails_with_several_gpus_and_warns_else(tmp_path, monkeypatch):
    (tmp_path / "dev/shm").mkdir(parents=True)
    small = os.statvfs_result((4096, 4096, 16384, 1, 1, 1, 1, 1, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    assert system(tmp_path, num_gpus=2)["shared memory"].level == FAILURE
    assert system(tmp_path, num_gpus=1)["shared memory"].level == WARNING
    assert "64 MiB" in system(tmp_path)["shared memory"].found


def test_wsl_is_recognised(tmp_path):
    write(tmp_path, "proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n")
    assert system(tmp_path)["wsl"].level == WARNING
    assert system(tmp_path / "else")["wsl"].level == OK


def test_driver_and_module_of_different_versions_fail(tmp_path, gpus):
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.10.01  Tue\n"
    write(tmp_path, "proc/driver/nvidia/version", version)
    with gpus(FakeGPU()):
        found = of_gpus(tmp_path)["driver", ""]
    assert found.level == FAILURE and "570.10.01" in found.found and "580.95.05" in found.found


def test_a_loaded_module_without_a_usable_gpu_fails_and_a_machine_without_one_does_not(tmp_path):
    assert of_gpus(tmp_path)["driver", ""].level == OK
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.10.01  Tue\n"
    write(tmp_path, "proc/driver/nvidia/version", version)
    assert of_gpus(tmp_path)["driver", ""].level == FAILURE


@pytest.mark.parametrize(
    "check, fault, level",
    [
        ("pcie width", {"width": 8}, WARNING),
        ("pcie generation", {"generation": 1}, WARNING),
        ("ecc", {"ecc": (0, 1)}, WARNING),
        ("ecc errors", {"ecc_errors": 3}, FAILURE),
        ("mig", {"mig": 1}, FAILURE),
        ("persistence", {"persistence": 0}, WARNING),
        ("power limit", {"limit_mw": 200_000}, WARNING),
        ("throttling", {"throttle": 0x40}, FAILURE),
        ("display", {"display": 1}, WARNING),
        ("other processes", {"pids": (1,)}, WARNING),
        ("lost", {"lost_from_s": 0}, FAILURE),
    ],
)
def test_a_fault_of_one_gpu_is_found_there_and_not_on_its_neighbour(
    tmp_path, gpus, check, fault, level
):
    with gpus(FakeGPU(), FakeGPU(**fault)):
        found = of_gpus(tmp_path)
    assert found[check, "GPU 1"].level == level
    assert (check, "GPU 0") not in found or found[check, "GPU 0"].level == OK


def test_a_power_cap_under_load_is_no_fault(tmp_path, gpus):
    with gpus(FakeGPU(throttle=0x4)):
        assert of_gpus(tmp_path)["throttling", "GPU 0"].level == OK


def test_own_processes_are_no_others(tmp_path, gpus):
    with gpus(FakeGPU(pids=(os.getpid(), 1))):
        assert of_gpus(tmp_path, own_pids=[1])["other processes", "GPU 0"].level == OK


def test_a_query_that_is_not_supported_is_unknown_and_the_others_go_on(tmp_path, gpus):
    with gpus(FakeGPU(width=4, unsupported=("nvmlDeviceGetEccMode",))):
        found = of_gpus(tmp_path)
    assert found["ecc", "GPU 0"].level == UNKNOWN and "not supported" in found["ecc", "GPU 0"].found
    assert found["pcie width", "GPU 0"].found == "4 of 16 lanes"


def test_pairs_tell_peer_access_and_their_path(tmp_path, gpus):
    with gpus(FakeGPU(), FakeGPU(), FakeGPU(p2p=1)):
        found = of_gpus(tmp_path)
    assert found["peer access", "GPU 0 and 1"].level == OK
    assert "between processors" in found["peer access", "GPU 0 and 1"].found


def test_a_pair_without_peer_access_is_a_warning(tmp_path, gpus):
    with gpus(FakeGPU(p2p=1), FakeGPU()):
        assert of_gpus(tmp_path)["peer access", "GPU 0 and 1"].level == WARNING


def test_nvlinks_are_counted(tmp_path, gpus):
    with gpus(FakeGPU(nvlinks=4), FakeGPU()):
        found = of_gpus(tmp_path)
    assert found["nvlink", "GPU 0"].found == "4 of 4 links up"
    assert found["nvlink", "GPU 1"].found == "none"


def test_different_cards_are_a_warning(tmp_path, gpus):
    with gpus(FakeGPU(), FakeGPU(name="NVIDIA GeForce RTX 3090")):
        assert of_gpus(tmp_path)["mixed cards", ""].level == WARNING


def test_the_numa_node_is_found_by_the_bus_that_nvml_names(tmp_path):
    write(tmp_path, "sys/bus/pci/devices/0000:21:00.0/numa_node", "1\n")
    assert numa_node(tmp_path, "00000000:21:00.0") == 1
    assert numa_node(tmp_path, "00000000:41:00.0") is None


class ZeroesTheEnd(DeviceCopies):
    def _cross(self, sent, target):
        arrived = sent.clone()
        arrived[-5:] = 0
        return arrived


class Hangs(DeviceCopies):
    def _cross(self, sent, target):
        time.sleep(1)
        return sent


def test_peer_copies_that_arrive_wrong_or_not_at_all_fail_and_name_the_direction():
    devices = [torch.device("cpu"), torch.device("cpu")]
    assert {f.level for f in examine_peer_data(DeviceCopies(devices))} == {OK}
    found = examine_peer_data(ZeroesTheEnd(devices))
    assert [f.level for f in found] == [FAILURE, FAILURE] and found[1].device == "GPU 1 to 0"
    assert found[0].found == "no claim, 5 of 4194304 bytes of transfer 0 arrived wrong"
    late = examine_peer_data(Hangs(devices), timeout_s=0.1)
    assert {f.found for f in late} == {"no claim, transfer 0 had not arrived after 0.1 s"}
    assert examine_peer_data(DeviceCopies(devices[:1]))[0].level == UNKNOWN


def test_what_the_driver_claims_stands_beside_what_arrives():
    class Claiming(ZeroesTheEnd):
        def claimed(self, source, target):
            return source == 0

    found = examine_peer_data(Claiming([torch.device("cpu")] * 2))
    assert found[0].found.startswith("peer access claimed, 5 of 4194304 bytes")
    assert found[1].found.startswith("no peer access, 5 of 4194304 bytes")


def test_this_machine_is_examined_and_the_report_explains_every_finding(tmp_path):
    findings = examine(tmp_path, tmp_path / "none.json")
    report = report_json(findings)
    assert report["status"] == exit_status(findings) == 0
    for entry in report["findings"]:
        assert entry["why"] and entry["reference"].startswith("https://") and entry["advice"]


@pytest.mark.parametrize(
    "num_gpus, num_devices, level",
    [(0, 0, OK), (2, 2, OK), (2, 1, WARNING), (2, 0, FAILURE), (0, 1, OK)],
)
def test_gpus_that_torch_cannot_use_are_found(num_gpus, num_devices, level):
    assert torch_sees(num_gpus, num_devices).level == level


def test_settings_left_by_a_killed_run_fail(tmp_path):
    (tmp_path / "left.json").touch()
    findings = examine(tmp_path, tmp_path / "left.json")
    assert exit_status(findings) == 1
    assert [f.check for f in findings if f.level == FAILURE] == ["tuning"]


def test_a_finding_of_an_unknown_check_is_refused():
    with pytest.raises(ValueError, match="'flux'"):
        Finding("flux", OK, "")

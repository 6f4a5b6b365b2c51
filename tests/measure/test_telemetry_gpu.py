"""Telemetry and the peer data check on real GPUs."""

from __future__ import annotations

import pytest
import torch

from labkit.devices.backends import accelerator_kind
from labkit.devices.inventory import choose_devices
from labkit.devices.links.link_copies import DeviceCopies
from labkit.devices.links.peer_data import examine_peer_data
from labkit.measure.regions import region
from labkit.measure.telemetry.telemetry import telemetry
from labkit.measure.telemetry.telemetry_regions import by_region

CUDA = accelerator_kind() == "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU and torch's build for CUDA"),
]


def test_a_busy_gpu_shows_activity_memory_and_energy_by_region():
    devices = choose_devices("cuda", 1)
    matrix = torch.ones(4096, 4096, device="cuda")
    with telemetry(devices, hz=20) as t:
        with region("work", "forward"):
            for _ in range(200):
                matrix @ matrix
            torch.cuda.synchronize()
    assert t.devices[0].uuid == devices.devices[0].uuid and not t.lost(0)
    assert t.peak(0, "memory_used_bytes") > matrix.nbytes
    for metric in ("kernel_active_percent", "power_w", "energy_j", "temperature_c"):
        assert t.mean(0, metric) is not None or t.reason(0, metric), metric
    work = by_region(t)[0]
    assert work.region == "forward" and work.seconds > 0
    if t.energy_j(0) is not None:
        assert 0 <= work.energy_j <= t.energy_j(0) + 1


@pytest.mark.skipif(CUDA and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copies_between_real_gpus_arrive_right():
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    assert {finding.level for finding in examine_peer_data(DeviceCopies(devices))} == {"ok"}

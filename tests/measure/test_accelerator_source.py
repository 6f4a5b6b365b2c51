"""Accelerators without NVML: what their module reports, and reasons for the rest."""

from __future__ import annotations

from types import SimpleNamespace

from labkit.devices.inventory import Device, DeviceSet
from labkit.measure.telemetry.accelerator_source import AcceleratorSource


def refuse(device):
    raise RuntimeError("amdsmi is not installed")


def test_what_the_module_has_is_read_and_what_fails_is_a_reason():
    module = SimpleNamespace(
        utilization=lambda device: 70 + device,
        power_draw=refuse,
        mem_get_info=lambda device: (60, 100),
    )
    devices = DeviceSet((Device("cuda", 1, "Radeon"),), 8)
    reading = AcceleratorSource(devices, module).read(0)
    assert reading.values == {"kernel_active_percent": 71, "memory_used_bytes": 40}
    assert reading.reasons["power_w"] == "RuntimeError: amdsmi is not installed"
    assert reading.reasons["fan_percent"] == "torch.cuda does not report it"


def test_apples_module_reports_allocated_bytes_only():
    module = SimpleNamespace(current_allocated_memory=lambda: 12)
    reading = AcceleratorSource(DeviceSet((Device("mps", 0, "mps"),), 8), module).read(0)
    assert reading.values == {"memory_used_bytes": 12}

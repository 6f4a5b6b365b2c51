"""Figures of accelerators without NVML (AMD, Intel, Apple), as far as torch reports them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labkit.devices.inventory import DeviceSet
from labkit.measure.telemetry.metrics import METRICS, Metered, Reading

# metric -> function of the device module, such as torch.cuda, and the factor to our unit
_FUNCTIONS = {
    "kernel_active_percent": ("utilization", 1.0),
    "power_w": ("power_draw", 1e-3),
    "temperature_c": ("temperature", 1.0),
    "sm_clock_mhz": ("clock_rate", 1.0),
}


class AcceleratorSource:
    """Accelerators through ``torch.accelerator`` and the module of their kind.

    Args:
        devices: of one kind.
        module: of that kind; None for torch's own.
    """

    def __init__(self, devices: DeviceSet, module: object | None = None) -> None:
        self._kind = devices.kind
        self._indices = [device.index for device in devices.devices]
        self._module = module or torch.get_device_module(devices.kind)
        self.devices = tuple(
            Metered(
                f"GPU {place}", devices.provenance, device.name, device.uuid, device.memory_bytes
            )
            for place, device in enumerate(devices.devices)
        )

    def read(self, index: int) -> Reading:
        """Call what the module has; whatever fails is a reason."""
        device = self._indices[index]
        calls: dict[str, Callable[[], float]] = {
            metric: lambda name=name, scale=scale: getattr(self._module, name)(device) * scale
            for metric, (name, scale) in _FUNCTIONS.items()
            if hasattr(self._module, name)
        }
        if hasattr(self._module, "mem_get_info"):
            calls["memory_used_bytes"] = lambda: _used(self._module.mem_get_info(device))
        elif hasattr(self._module, "current_allocated_memory"):  # torch.mps
            calls["memory_used_bytes"] = self._module.current_allocated_memory
        values, reasons = {}, dict.fromkeys(METRICS, f"torch.{self._kind} does not report it")
        for metric, call in calls.items():
            try:
                values[metric] = call()
            except Exception as error:  # vendors' bindings raise types of their own
                reasons[metric] = f"{type(error).__name__}: {error}"
        return Reading(values, reasons)


def _used(free_and_total: tuple[int, int]) -> int:
    free, total = free_and_total
    return total - free

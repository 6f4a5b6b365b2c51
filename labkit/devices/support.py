"""For one to four devices: what kind this machine would use, and which claims it supports."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.devices.inventory import DeviceSet, choose_devices
from labkit.devices.needs import KnownPeak, Need, Timing


@dataclass(frozen=True)
class Support:
    """What a notebook about ``devices.count`` devices may claim here.

    Attributes:
        refusals: reason by claim, None where the claim is supported.
    """

    devices: DeviceSet
    refusals: dict[str, str | None]


def support_for(count: int, requested: str = "auto") -> Support:
    """Choose ``count`` devices as a notebook would, and ask every kind of need of them."""
    devices = choose_devices(requested, count)
    needs: dict[str, Need] = {"wall-clock time": Timing(count), "MFU": KnownPeak()}
    reasons = {name: need.refusal(devices) for name, need in needs.items()}
    return Support(devices, {"numbers and gradients": None, **reasons})

"""For one to four devices: what kind this machine would use, and which claims it supports."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.devices.inventory import DeviceSet, choose_devices
from labkit.devices.needs import KnownPeak, Need, Timing

CLAIMS = ("numbers and gradients", "time", "MFU")


@dataclass(frozen=True)
class Support:
    """What a notebook about ``devices.count`` devices may claim here.

    Attributes:
        refusals: reason by entry of ``CLAIMS``, None where the claim is supported.
    """

    devices: DeviceSet
    refusals: dict[str, str | None]


def support_for(count: int, requested: str = "auto") -> Support:
    """Choose ``count`` devices as a notebook would, and ask every kind of need of them."""
    devices = choose_devices(requested, count)
    needs: tuple[Need | None, ...] = (None, Timing(count), KnownPeak())
    reasons = [need.refusal(devices) if need else None for need in needs]
    return Support(devices, dict(zip(CLAIMS, reasons, strict=True)))

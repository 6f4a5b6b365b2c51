"""Copy a pattern from every GPU to every other and compare: a capability is no proof."""

from __future__ import annotations

from labkit.devices.doctor.doctor_checks import FAILURE, OK, UNKNOWN, Finding
from labkit.devices.links.link_check import Delivery, check_copies
from labkit.devices.links.link_copies import Copies

BYTES = 4 << 20  # a copy


def examine_peer_data(copies: Copies, *, timeout_s: float = 10.0) -> list[Finding]:
    """Data checks of all ordered pairs.

    Args:
        copies: ``DeviceCopies(devices)``, or a stand-in.
        timeout_s: for each copy.
    """
    if copies.count < 2:
        return [Finding("peer data", UNKNOWN, f"{copies.count} GPUs here: there is no pair")]
    return list(map(_finding, check_copies(copies, num_bytes=BYTES, timeout_s=timeout_s)))


def _finding(delivery: Delivery) -> Finding:
    name = f"GPU {delivery.source} to {delivery.target}"
    if not delivery.right:
        return Finding("peer data", FAILURE, f"{delivery.claim}, {delivery.reason}", name)
    return Finding("peer data", OK, f"{delivery.claim}, all copies of 4 MiB right", name)

"""Copy a pattern from every GPU to every other and compare: a capability is no proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import torch

from labkit.devices.doctor.doctor_checks import FAILURE, OK, UNKNOWN, Finding

ELEMENTS = 1 << 20  # 4 MiB a copy
ROUNDS = 3
Copy = Callable[[torch.Tensor, torch.device], torch.Tensor]


def _copy(source: torch.Tensor, target: torch.device) -> torch.Tensor:
    arrived = torch.empty_like(source, device=target)
    arrived.copy_(source)
    return arrived


def examine_peer_data(devices: Sequence[torch.device], copy: Copy = _copy) -> list[Finding]:
    """Data checks of all ordered pairs.

    Args:
        devices: accelerators of this process.
        copy: moves a tensor to a device; torch's own by default.
    """
    if len(devices) < 2:
        return [Finding("peer data", UNKNOWN, f"{len(devices)} GPUs here: there is no pair")]
    return [_pair(i, j, devices, copy) for i, j in permutations(range(len(devices)), 2)]


def _pair(i: int, j: int, devices: Sequence[torch.device], copy: Copy) -> Finding:
    pattern = torch.arange(ELEMENTS, dtype=torch.int32) ^ (i * 7919 + j)
    sent = pattern.to(devices[i])
    wrong = 0
    for _ in range(ROUNDS):
        # to the host and back is the way that is always right
        wrong += int((copy(sent, devices[j]).cpu() != pattern).sum())
    name = f"GPU {i} to {j}"
    if wrong:
        return Finding("peer data", FAILURE, f"{wrong} of {ROUNDS * ELEMENTS} elements wrong", name)
    return Finding("peer data", OK, f"{ROUNDS} copies of 4 MiB right", name)

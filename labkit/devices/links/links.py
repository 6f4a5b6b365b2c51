"""Times messages between every pair of ranks, and collectives of all, against size.

The fastest of several repeats counts: whatever else the machine does can only add to it.

Every function runs on all ranks of a group together, and gives each the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations

import torch
import torch.distributed as dist

from labkit.devices.links.link_fit import LinkFit, Sample, fit_link
from labkit.devices.links.link_transport import COLLECTIVES, GroupTransport, Transport

# from a message that is all latency to one that is all bandwidth, each four times the last
SIZES = tuple(1 << exponent for exponent in range(12, 25, 2))  # 4 KiB ... 16 MiB


def time_pairs(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 25,
    transport: Transport | None = None,
) -> dict[tuple[int, int], tuple[Sample, ...]]:
    """Time messages between every two ranks, one pair at a time while the others wait.

    A sample is half the time there and back, so no two clocks are compared.

    Args:
        group: the ranks; pairs are counted within it.
        device: of this rank.
        sizes: bytes, each a multiple of 4.
        repeats: counted round trips of each size; all sizes take turns, so that a disturbance
            does not hit one size alone.
        transport: of your own in place of the group's.

    Returns:
        Samples by pair (i, j), i < j.

    Raises:
        ValueError: a size is no positive multiple of 4, or ``repeats`` is below 1.
    """
    _check(sizes, repeats)
    way = transport or GroupTransport(group, device)
    own: dict[tuple[int, int], tuple[Sample, ...]] = {}
    for pair in combinations(range(way.size), 2):
        dist.barrier(group)
        if way.rank in pair:
            samples = _round_trips(way, pair, sizes, repeats)
            if way.rank == pair[0]:
                own[pair] = samples
    return _merged(own, group)


def _round_trips(
    way: Transport, pair: tuple[int, int], sizes: Sequence[int], repeats: int
) -> tuple[Sample, ...]:
    first = way.rank == pair[0]
    peer = pair[1] if first else pair[0]
    buffers = [torch.zeros(n // 4, device=way.device) for n in sizes]
    seconds: list[list[float]] = [[] for _ in sizes]
    for _ in range(repeats + 1):  # the first round warms up
        for place, buffer in enumerate(buffers):
            start_s = time.perf_counter()
            for sends in (first, not first):
                (way.send if sends else way.receive)(buffer, peer)
            way.synchronize()
            seconds[place].append((time.perf_counter() - start_s) / 2)
    return _fastest(sizes, seconds)


def _fastest(sizes: Sequence[int], seconds: list[list[float]]) -> tuple[Sample, ...]:
    return tuple(Sample(n, min(s[1:])) for n, s in zip(sizes, seconds, strict=True))


def time_collective(
    kind: str,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 25,
    transport: Transport | None = None,
) -> tuple[Sample, ...]:
    """Time one kind of collective of all ranks of the group; the slowest rank counts.

    Args:
        kind: all_reduce, all_gather, reduce_scatter or broadcast.
        sizes: bytes of the whole tensor, each a multiple of 4 times the group's size.

    Raises:
        ValueError: an unknown kind, or a size that does not divide.
    """
    if kind not in COLLECTIVES:
        raise ValueError(f"collective {kind!r} is unknown; choose one of {', '.join(COLLECTIVES)}")
    way = transport or GroupTransport(group, device)
    _check(sizes, repeats, way.size)
    wholes = [torch.zeros(n // 4, device=device) for n in sizes]
    seconds: list[list[float]] = [[] for _ in sizes]
    for _ in range(repeats + 1):
        for place, whole in enumerate(wholes):
            part = torch.zeros(len(whole) // way.size, device=device)
            dist.barrier(group)
            start_s = time.perf_counter()
            way.collective(kind, whole, part)
            way.synchronize()
            seconds[place].append(time.perf_counter() - start_s)
    everyone: list = [None] * way.size
    dist.all_gather_object(everyone, seconds, group=group)
    slowest = [
        [max(same) for same in zip(*of_size, strict=True)]
        for of_size in zip(*everyone, strict=True)
    ]
    return _fastest(sizes, slowest)


def measure_links(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 25,
    transport: Transport | None = None,
) -> dict[tuple[int, int], LinkFit]:
    """Latency and bandwidth of every pair; see ``time_pairs`` for the arguments."""
    times = time_pairs(group, device, sizes=sizes, repeats=repeats, transport=transport)
    return {pair: fit_link(samples) for pair, samples in times.items()}


def _merged(own: dict, group: dist.ProcessGroup) -> dict:
    everyone: list = [None] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    return {pair: samples for part in everyone for pair, samples in sorted(part.items())}


def _check(sizes: Sequence[int], repeats: int, ranks: int = 1) -> None:
    wrong = [n for n in sizes if n < 1 or n % (4 * ranks)]
    if wrong or not sizes:
        raise ValueError(
            f"sizes={wrong} must be positive multiples of {4 * ranks} bytes (float32 values, "
            f"{ranks} equal parts)"
        )
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")

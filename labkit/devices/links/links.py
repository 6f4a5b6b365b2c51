"""Times messages between every pair of ranks, and collectives of all, against size.

All sizes take turns in random order, several trips each, so that whatever else the machine does
hits all of them alike. A low quantile of the trips counts. The fastest is luck: the receiver was
awake, or both ranks had one warm core. The median is the other programs' on a busy machine.

Every function runs on all ranks of a group together, and gives each the same answer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
import torch.distributed as dist

from labkit.devices.links.link_fit import LinkFit, Sample, fit_link
from labkit.devices.links.link_transport import COLLECTIVES, GroupTransport, Transport

# From a message that is all latency to one that is all bandwidth. No powers of two: 64 KiB is a
# packet of the loopback device and a few bytes more, and takes as long as 80 KiB or longer.
SIZES = tuple(5 << exponent for exponent in range(10, 21))  # 5 KiB ... 5 MiB, doubling
ROUNDS = 60
QUANTILE = 0.25


def time_pairs(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    quantile: float = QUANTILE,
    transport: Transport | None = None,
) -> dict[tuple[int, int], tuple[Sample, ...]]:
    """Time messages between every two ranks, one pair at a time while the others wait.

    A sample is half the time there and back, so no two clocks are compared.

    Args:
        group: the ranks; pairs are counted within it.
        device: of this rank.
        sizes: bytes, each a multiple of 4.
        rounds: in each, every size has its turn of a few trips.
        quantile: of a size's trips that counts, 0 to 1.
        transport: of your own in place of the group's.

    Returns:
        Samples by pair (i, j), i < j.

    Raises:
        ValueError: a size is no positive multiple of 4, ``rounds`` is below 1, or ``quantile``
            is out of range.
    """
    _check(sizes, rounds, quantile)
    way = transport or GroupTransport(group, device)
    own: dict[tuple[int, int], tuple[Sample, ...]] = {}
    for pair in combinations(range(way.size), 2):
        dist.barrier(group)
        if way.rank in pair:
            seconds = _round_trips(way, pair, sizes, rounds)
            if way.rank == pair[0]:
                own[pair] = _samples(sizes, seconds, quantile)
    return _merged(own, group)


def _round_trips(
    way: Transport, pair: tuple[int, int], sizes: Sequence[int], rounds: int
) -> list[list[float]]:
    first = way.rank == pair[0]
    peer = pair[1] if first else pair[0]
    buffers = [torch.zeros(n // 4, device=way.device) for n in sizes]
    seconds: list[list[float]] = [[] for _ in sizes]
    for place, counts in _turns(sizes, rounds):
        start_s = time.perf_counter()
        for sends in (first, not first):
            (way.send if sends else way.receive)(buffers[place], peer)
        way.synchronize()
        if counts:
            seconds[place].append((time.perf_counter() - start_s) / 2)
    return seconds


def _turns(sizes: Sequence[int], rounds: int) -> Iterator[tuple[int, bool]]:
    """Every trip's place in ``sizes``, and whether it counts; the same on every rank.

    A turn is 2 to 8 trips of one size, about 1 MiB, behind one that does not count: it comes after
    another size, which no program's messages do. The first round does not count either.
    """
    order = random.Random(0)
    for turn in range(rounds + 1):
        for place in order.sample(range(len(sizes)), len(sizes)):
            trips = min(8, max(2, (1 << 20) // sizes[place]))
            yield place, False
            for _ in range(trips):
                yield place, turn > 0


def _samples(
    sizes: Sequence[int], seconds: Sequence[Sequence[float]], quantile: float
) -> tuple[Sample, ...]:
    return tuple(
        Sample(n, torch.tensor(s, dtype=torch.float64).quantile(quantile).item())
        for n, s in zip(sizes, seconds, strict=True)
    )


def time_collective(
    kind: str,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS // 2,
    quantile: float = QUANTILE,
    transport: Transport | None = None,
) -> tuple[Sample, ...]:
    """Time one kind of collective of all ranks of the group; the slowest rank counts.

    Args:
        kind: all_reduce, all_gather, reduce_scatter or broadcast.
        sizes: bytes of the whole tensor, each a multiple of 4 times the group's size.
        quantile: where ranks share cores, most trips wait for one; take the fastest, as 0.05.

    Raises:
        ValueError: an unknown kind, a size that does not divide, or as in ``time_pairs``.
    """
    if kind not in COLLECTIVES:
        raise ValueError(f"collective {kind!r} is unknown; choose one of {', '.join(COLLECTIVES)}")
    way = transport or GroupTransport(group, device)
    _check(sizes, rounds, quantile, way.size)
    wholes = [torch.zeros(n // 4, device=device) for n in sizes]
    parts = [torch.zeros(n // 4 // way.size, device=device) for n in sizes]
    seconds: list[list[float]] = [[] for _ in sizes]
    for place, counts in _turns(sizes, rounds):
        dist.barrier(group)
        start_s = time.perf_counter()
        way.collective(kind, wholes[place], parts[place])
        way.synchronize()
        if counts:
            seconds[place].append(time.perf_counter() - start_s)
    everyone: list = [None] * way.size
    dist.all_gather_object(everyone, seconds, group=group)
    slowest = [
        [max(same) for same in zip(*of_size, strict=True)]
        for of_size in zip(*everyone, strict=True)
    ]
    return _samples(sizes, slowest, quantile)


def measure_links(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS // 4,
    transport: Transport | None = None,
) -> dict[tuple[int, int], LinkFit]:
    """Latency and bandwidth of every pair; see ``time_pairs`` for the arguments."""
    times = time_pairs(group, device, sizes=sizes, rounds=rounds, transport=transport)
    return {pair: fit_link(samples) for pair, samples in times.items()}


def _merged(own: dict, group: dist.ProcessGroup) -> dict:
    everyone: list = [None] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    return {pair: samples for part in everyone for pair, samples in sorted(part.items())}


def _check(sizes: Sequence[int], rounds: int, quantile: float, ranks: int = 1) -> None:
    wrong = [n for n in sizes if n < 1 or n % (4 * ranks)]
    if wrong or not sizes:
        raise ValueError(
            f"sizes={wrong} must be positive multiples of {4 * ranks} bytes (float32 values, "
            f"{ranks} equal parts)"
        )
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile={quantile} must lie between 0 and 1")

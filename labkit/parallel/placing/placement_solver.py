"""The exact search behind `place`: which contiguous partition of layers is best.

A cut list (c1, ..., c_{p-1}) gives device i the layers c_i ... c_{i+1} - 1, with c_0 = 0 and
c_p = n. For every device a table says what each layer range [a, b) would take and hold; dynamic
programming over (device, last cut) then looks at all partitions in O(p n^2), a row of numpy at a
time. It is exact because the slowest of the first i stages depends on the cuts before only through
the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RangeTables:
    """Per device an (n + 1, n + 1) table over layer ranges [a, b); entries with a >= b are inf.

    Attributes:
        time_s: seconds per microbatch.
        memory_bytes: weights, gradients, optimizer state and activations in flight.
        capacity_bytes: per device; inf where it does not matter.
    """

    time_s: tuple[np.ndarray, ...]
    memory_bytes: tuple[np.ndarray, ...]
    capacity_bytes: tuple[float, ...]


def range_sums(values: Sequence[float]) -> np.ndarray:
    """(n + 1, n + 1): sum of values[a:b] at [a, b], inf where the range is empty.

    >>> range_sums([2, 3])[0]
    array([inf,  2.,  5.])
    """
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    sums = ends[None, :] - ends[:, None]
    sums[np.tri(len(ends), dtype=bool)] = np.inf
    return sums


def best_cuts(tables: RangeTables) -> tuple[int, ...] | None:
    """The cuts with the fastest slowest stage; ties go to less peak memory, then earlier cuts.

    Returns:
        p - 1 ascending cuts, or None where no partition fits.
    """
    fitting = [
        time if memory[0, -1] <= capacity else np.where(memory <= capacity, time, np.inf)
        for time, memory, capacity in zip(
            tables.time_s, tables.memory_bytes, tables.capacity_bytes, strict=True
        )
    ]
    slowest = smallest_maximum(fitting)
    if slowest == np.inf:
        return None
    lean = [
        np.where(time <= slowest, memory, np.inf)
        for time, memory in zip(fitting, tables.memory_bytes, strict=True)
    ]
    return earliest_cuts(lean, smallest_maximum(lean))


def leanest_cuts(loads: Sequence[np.ndarray]) -> tuple[float, tuple[int, ...]]:
    """The smallest possible maximum of `loads` over all partitions, and the cuts that reach it."""
    least = smallest_maximum(loads)
    return least, earliest_cuts(loads, least)


def smallest_maximum(tables: Sequence[np.ndarray]) -> float:
    """Least over all partitions of the greatest entry that its ranges have; inf if none."""
    best = tables[0][0]  # best[b]: devices so far hold the layers before b
    worst = np.empty_like(tables[0])  # reused: allocating it anew costs as much as filling it
    for table in tables[1:]:
        best = np.maximum(best[:, None], table, out=worst).min(axis=0)
    return float(best[-1])


def earliest_cuts(tables: Sequence[np.ndarray], limit: float) -> tuple[int, ...]:
    """The lexicographically first cuts whose ranges all stay within `limit`, which is reachable."""
    reaches_end = np.zeros(len(tables[0]), dtype=bool)
    reaches_end[-1] = True
    allowed = []  # per device, last first: the ranges from which the rest can be completed
    for table in reversed(tables):
        good = (table <= limit) & reaches_end[None, :]
        allowed.append(good)
        reaches_end = good.any(axis=1)
    cuts, start = [], 0
    for good in reversed(allowed):
        start = int(np.argmax(good[start]))
        cuts.append(start)
    return tuple(cuts[:-1])

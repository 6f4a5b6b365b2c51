"""A link as latency plus bytes over bandwidth, fitted to measured times.

Source: the postal or alpha-beta model, Hockney 1994, "The communication challenge for MPP",
Parallel Computing 20(3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from labkit.devices.profiles import Link, Machine, Profile


class Sample(NamedTuple):
    """One size and what it took."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class LinkFit:
    """Time of a message or collective: latency + bytes / bandwidth.

    Attributes:
        latency_s: what an empty one takes, >= 0.
        bandwidth_bytes_per_s: of the payload, > 0.
        worst_rel_error: of the fit at the sizes it was made from.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    worst_rel_error: float

    def predict_s(self, num_bytes: int) -> float:
        """Seconds for a size, measured or not.

        >>> LinkFit(1e-3, 1e6, 0.0).predict_s(1000)
        0.002
        """
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s

    @property
    def knee_bytes(self) -> float:
        """The size at which latency and transfer take equally long; below it, join messages."""
        return self.latency_s * self.bandwidth_bytes_per_s

    def as_link(self, name: str, source: str, *, rendezvous: bool = False) -> Link:
        """The link for a machine profile; ``source`` says on what it was measured."""
        return Link(name, self.bandwidth_bytes_per_s, self.latency_s, source, rendezvous)


def fit_link(samples: Iterable[Sample | tuple[int, float]]) -> LinkFit:
    """Fit latency and bandwidth to (bytes, seconds).

    Relative errors count, so that small and large sizes weigh alike, and an outlier counts by its
    distance only (Huber's weights, 1964), so that one disturbed size does not bend the line.

    Raises:
        ValueError: fewer than two sizes, a time that is not above 0, or times that do not grow.

    >>> fit = fit_link([(0, 0.001), (1000, 0.002), (2000, 0.003)])
    >>> round(fit.latency_s, 6), round(fit.bandwidth_bytes_per_s)
    (0.001, 1000000)
    """
    pairs = sorted((int(n), float(s)) for n, s in samples)
    _check(pairs)
    sizes, times = torch.tensor(pairs, dtype=torch.float64).T
    weights = torch.ones_like(times)
    for _ in range(20):
        latency, slope = _weighted_line(sizes, times, weights / times)
        errors = ((latency + slope * sizes - times) / times).abs()
        scale = errors.median().clamp(min=1e-9)
        weights = (2 * scale / errors.clamp(min=1e-12)).clamp(max=1.0).sqrt()
    if not slope > 0:
        raise ValueError(f"times do not grow with size: {pairs}; measure larger sizes")
    return LinkFit(latency, 1 / slope, errors.max().item())


def _check(pairs: Sequence[tuple[int, float]]) -> None:
    if len({n for n, _ in pairs}) < 2:
        raise ValueError(f"a fit needs at least two sizes, got {[n for n, _ in pairs]}")
    if not all(s > 0 for _, s in pairs):
        raise ValueError(f"every time must be above 0 s, got {pairs}")


def _weighted_line(
    sizes: torch.Tensor, times: torch.Tensor, weights: torch.Tensor
) -> tuple[float, float]:
    """Weighted least squares for latency + slope * bytes with latency >= 0."""
    scale = sizes.max()  # bytes and seconds differ by ten digits: scale before solving
    columns = torch.stack([weights, weights * sizes / scale], dim=1)
    latency, slope = torch.linalg.lstsq(columns, (weights * times)[:, None]).solution[:, 0]
    if latency < 0:
        column = columns[:, 1]
        latency, slope = torch.zeros(()), (column @ (weights * times)) / (column @ column)
    return latency.item(), (slope / scale).item()


def bandwidth_matrix(fits: Mapping[tuple[int, int], LinkFit], count: int) -> list[list[float]]:
    """Bytes/s between every two devices, for a picture; NaN on the diagonal.

    Args:
        fits: keyed (i, j) with i < j, as ``time_pairs`` has them.
        count: number of devices.
    """
    return [
        [
            float("nan") if i == j else fits[min(i, j), max(i, j)].bandwidth_bytes_per_s
            for j in range(count)
        ]
        for i in range(count)
    ]


def slowest_pair(fits: Mapping[tuple[int, int], LinkFit], num_bytes: int) -> tuple[int, int]:
    """The pair on which a message of this size is predicted to take longest."""
    return max(fits, key=lambda pair: fits[pair].predict_s(num_bytes))


def measured_machine(
    name: str,
    profiles: Sequence[Profile],
    fits: Mapping[tuple[int, int], LinkFit],
    source: str,
    *,
    rendezvous: bool = False,
) -> Machine:
    """A machine for virtual GPUs whose links are measured ones.

    Raises:
        ValueError: a pair has no fit.
    """
    links = {
        (i, j): fit.as_link(f"{i}-{j} measured", source, rendezvous=rendezvous)
        for (i, j), fit in fits.items()
    }
    return Machine(name, tuple(profiles), links)

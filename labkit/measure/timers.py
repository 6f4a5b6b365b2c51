"""Time a training or inference step honestly: synchronised, warmed up, slowest rank counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.benchmark import Measurement, TaskSpec

from labkit.devices.backends import backend
from labkit.devices.inventory import Device


@dataclass(frozen=True)
class StepTimes:
    """Durations in seconds of one step called again and again; three numbers, never one mean.

    Attributes:
        first_s: the first call, with allocation, compilation and cold caches.
        warmup_s: the calls after it that were not counted.
        steady_s: the counted calls.
    """

    first_s: float
    warmup_s: tuple[float, ...]
    steady_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return self._steady.median

    @property
    def spread_s(self) -> float:
        """Interquartile range of the counted calls."""
        return self._steady.iqr

    @property
    def n(self) -> int:
        return len(self.steady_s)

    def per_second(self, items: float) -> float:
        """Rate for ``items`` of work in one step, such as tokens/s, from the median."""
        return items / self.median_s

    @property
    def _steady(self) -> Measurement:
        return Measurement(1, list(self.steady_s), TaskSpec("step()", "pass"))

    def __str__(self) -> str:
        return (
            f"first {self.first_s * 1e3:.3g} ms, then {self.median_s * 1e3:.3g} ms "
            f"(median of {self.n}, spread {self.spread_s * 1e3:.2g} ms)"
        )


def time_steps(
    step: Callable[[], object],
    *,
    devices: Iterable[torch.device] = (torch.device("cpu"),),
    steps: int = 10,
    warmup: int = 2,
    group: dist.ProcessGroup | None = None,
) -> StepTimes:
    """Call ``step`` 1 + ``warmup`` + ``steps`` times and time each call.

    Args:
        devices: every device the step works on; each is synchronised before and after a call
            (synchronising only the current one misses the others: pytorch#181238).
        steps: counted calls, >= 1.
        warmup: calls after the first that are not counted.
        group: the ranks that share the step. All then start from one barrier and each call counts
            the slowest rank's time; every rank gets the same answer. None for one process.

    Raises:
        ValueError: ``steps`` is below 1 or ``warmup`` below 0.
    """
    if steps < 1 or warmup < 0:
        raise ValueError(f"steps={steps} must be at least 1 and warmup={warmup} at least 0")
    devices = tuple(devices)
    own_s = [_one_call_s(step, devices, group) for _ in range(1 + warmup + steps)]
    slowest_s = _slowest(own_s, devices[0], group)
    return StepTimes(slowest_s[0], slowest_s[1 : 1 + warmup], slowest_s[1 + warmup :])


def _one_call_s(step, devices: tuple[torch.device, ...], group) -> float:
    synchronize(devices)
    if group is not None:
        dist.barrier(group)
    start_s = time.perf_counter()
    step()
    synchronize(devices)
    return time.perf_counter() - start_s


def _slowest(own_s: list[float], device: torch.device, group) -> tuple[float, ...]:
    if group is None:
        return tuple(own_s)
    # float32 holds seconds to seven digits, and not every accelerator has float64
    longest = torch.tensor(own_s, dtype=torch.float32, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return tuple(longest.tolist())


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for the queued work of every device, whatever its kind."""
    for device in devices:
        backend(device.type).synchronize([device])


def model_flops_utilisation(
    flops: float, step_time_s: float, device: Device, dtype: str = "float32"
) -> float | None:
    """Share of the device's published peak that the step's FLOPs reach (Chowdhery et al. 2022).

    Returns:
        flops / step_time / peak; None where no peak is published for the device, which a claim
        with ``needs=KnownPeak(dtype)`` then refuses.
    """
    peak = (device.peak_flops or {}).get(dtype)
    return None if peak is None else flops / step_time_s / peak

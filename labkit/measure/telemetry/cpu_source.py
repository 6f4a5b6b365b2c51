"""Figures of CPU ranks, one process each, and of the processor's energy counters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from labkit.measure.telemetry.metrics import METRICS, Metered, Reading

POWERCAP = Path("/sys/class/powercap")
SHORTEST_S = 0.09  # the system counts CPU time in ticks of 10 ms: a shorter difference is noise
TOO_SOON = "no look before it, or less than 0.09 s ago"
NO_GPU = dict.fromkeys(METRICS, "a CPU process has no such figure")
NO_METER = {"energy_j": "a process has no meter; RAPL counts whole packages, where it is readable"}


class ProcessSource:
    """One process for each rank.

    Args:
        pids: by rank.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.devices = tuple(
            Metered(f"rank {rank}", "measured:cpu", has_meter=False) for rank in range(len(pids))
        )
        self._processes = [_process(pid) for pid in pids]
        self._before: list[tuple[float, float] | None] = [None] * len(pids)  # clock, CPU seconds

    def read(self, index: int) -> Reading:
        """CPU share since the previous look, and resident bytes."""
        process = self._processes[index]
        try:
            if process is None:
                raise psutil.NoSuchProcess(0)
            with process.oneshot():
                times, resident = process.cpu_times(), process.memory_info().rss
        except psutil.Error as error:
            gone = isinstance(error, psutil.NoSuchProcess)
            return Reading.nothing("the process has ended" if gone else str(error), lost=gone)
        values = {"memory_used_bytes": float(resident)}
        percent = self._cpu_percent(index, times.user + times.system)
        if percent is None:
            return Reading(values, NO_GPU | NO_METER | {"cpu_percent": TOO_SOON})
        return Reading(values | {"cpu_percent": percent}, NO_GPU | NO_METER)

    def _cpu_percent(self, index: int, cpu_s: float) -> float | None:
        now_s, before = time.perf_counter(), self._before[index]
        if before is not None and now_s - before[0] < SHORTEST_S:
            return None
        self._before[index] = (now_s, cpu_s)
        return None if before is None else 100 * (cpu_s - before[1]) / (now_s - before[0])


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


class RaplSource:
    """Energy of each processor package by its RAPL counter, for the whole package.

    https://docs.kernel.org/power/powercap/powercap.html; only root may read it since Linux 5.10.

    Args:
        folder: of the powercap class.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        # a name with two colons is a part of a package, whose energy would count twice
        zones = [z for z in sorted(folder.glob("intel-rapl:*")) if z.name.count(":") == 1]
        self._zones = zones
        self._ranges_uj = [_number(zone / "max_energy_range_uj") or 0 for zone in zones]
        self._last_uj: list[int | None] = [None] * len(zones)
        self._total_uj = [0] * len(zones)
        self.devices = tuple(Metered(f"CPU {_name(zone)}", "measured:cpu") for zone in zones)

    def read(self, index: int) -> Reading:
        """Energy since the first look; a counter that began anew is continued."""
        now_uj = _number(self._zones[index] / "energy_uj")
        if now_uj is None:
            return Reading({}, NO_GPU | {"energy_j": "no permission to read energy_uj: needs root"})
        last_uj = self._last_uj[index]
        grown_uj = 0 if last_uj is None else now_uj - last_uj
        self._last_uj[index] = now_uj
        self._total_uj[index] += grown_uj if grown_uj >= 0 else grown_uj + self._ranges_uj[index]
        return Reading({"energy_j": self._total_uj[index] / 1e6}, NO_GPU)


def _name(zone: Path) -> str:
    try:
        return (zone / "name").read_text().strip()
    except OSError:
        return zone.name


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

"""Figures of CPU ranks, one process each, and of the processor's energy counters."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import psutil

from labkit.measure.telemetry.metrics import METRICS, Metered, Reading

POWERCAP, PROC = Path("/sys/class/powercap"), Path("/proc")
SHORTEST_S = 0.09  # the system counts CPU time in ticks of 10 ms: a shorter difference is noise
TOO_SOON = "no look before it, or less than 0.09 s ago"
NO_GPU = dict.fromkeys(METRICS, "a CPU process has no such figure")
_NO_METER = NO_GPU | {
    "energy_j": "a process has no meter; RAPL counts whole packages, where it is readable"
}
_UNREADABLE = NO_GPU | {"energy_j": "no permission to read energy_uj: needs root"}
_NO_PERCENT = _NO_METER | {"cpu_percent": TOO_SOON}


class ProcessSource:
    """One process for each rank.

    Args:
        pids: by rank.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.devices = tuple(
            Metered(f"rank {rank}", "measured:cpu", has_meter=False) for rank in range(len(pids))
        )
        self._processes = [_opened(pid) for pid in pids]
        self._before: list[tuple[float, float] | None] = [None] * len(pids)  # clock, CPU seconds

    def read(self, index: int) -> Reading:
        """CPU share since the previous look, and resident bytes."""
        process = self._processes[index]
        try:
            if process is None:
                raise ProcessLookupError
            cpu_s, resident_bytes = process.look()
        except (ProcessLookupError, psutil.NoSuchProcess):
            return Reading.nothing("the process has ended", lost=True)
        except psutil.Error as error:
            return Reading.nothing(str(error))
        values = {"memory_used_bytes": float(resident_bytes)}
        percent = self._cpu_percent(index, cpu_s)
        if percent is None:
            return Reading(values, _NO_PERCENT)
        return Reading(values | {"cpu_percent": percent}, _NO_METER)

    def _cpu_percent(self, index: int, cpu_s: float) -> float | None:
        now_s, before = time.perf_counter(), self._before[index]
        if before is not None and now_s - before[0] < SHORTEST_S:
            return None
        self._before[index] = (now_s, cpu_s)
        return None if before is None else 100 * (cpu_s - before[1]) / (now_s - before[0])


class _KernelFile:
    """A file of the kernel's, opened once and read again and again.

    One system call a look: each gives the interpreter's lock away, the thread that trains takes it,
    and the sampler must wait to get it back. psutil makes a dozen.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self) -> bytes:
        return os.pread(self._descriptor, 1024, 0)


class _ProcProcess:
    """A process of Linux. https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html"""

    def __init__(self, pid: int) -> None:
        self._stat = _KernelFile(PROC / str(pid) / "stat")
        self._ticks_per_s, self._page_bytes = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")

    def look(self) -> tuple[float, int]:
        """CPU seconds so far, and resident bytes."""
        text = self._stat.read()
        fields = text[text.rindex(b")") + 2 :].split()  # the name before it may hold anything
        if fields[0] in b"ZX":  # it has ended, and its parent has not asked how
            raise ProcessLookupError
        ticks = int(fields[11]) + int(fields[12])  # in user mode and in the kernel
        return ticks / self._ticks_per_s, int(fields[21]) * self._page_bytes


class _OtherProcess:
    """A process of another system, through psutil."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def look(self) -> tuple[float, int]:
        """CPU seconds so far, and resident bytes."""
        with self._process.oneshot():
            times, memory = self._process.cpu_times(), self._process.memory_info()
        return times.user + times.system, memory.rss


def _opened(pid: int) -> _ProcProcess | _OtherProcess | None:
    """None where it has ended already."""
    try:
        return _ProcProcess(pid) if PROC.joinpath("stat").exists() else _OtherProcess(pid)
    except (FileNotFoundError, psutil.NoSuchProcess):
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
        self._counters = [_readable(zone / "energy_uj") for zone in zones]
        self._ranges_uj = [_number(zone / "max_energy_range_uj") for zone in zones]
        self._last_uj: list[int | None] = [None] * len(zones)
        self._total_uj = [0] * len(zones)
        self.devices = tuple(Metered(f"CPU {_name(zone)}", "measured:cpu") for zone in zones)

    def read(self, index: int) -> Reading:
        """Energy since the first look; a counter that began anew is continued."""
        counter = self._counters[index]
        if counter is None:
            return Reading({}, _UNREADABLE)
        now_uj = int(counter.read())
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


def _number(zone_file: Path) -> int:
    return int(zone_file.read_text())


def _readable(path: Path) -> _KernelFile | None:
    try:
        return _KernelFile(path)
    except OSError:
        return None

"""What a set of ranks costs: time to start, an empty cell there and back, memory."""

from __future__ import annotations

import statistics
import time

import psutil

from labkit.devices.inventory import choose_devices, physical_cores
from labkit.devices.ranks.ranks import Ranks

CELLS = 100


def cell_times_ms(ranks: Ranks, code: str) -> list[float]:
    """Milliseconds of ``CELLS`` runs of a cell, after one that is not counted."""
    ranks.run(code)
    times = []
    for _ in range(CELLS):
        began = time.perf_counter()
        ranks.run(code)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def memory_mib(pid: int) -> float:
    """Proportional set size where the system tells it (Linux), else the resident set size."""
    memory = psutil.Process(pid).memory_full_info()
    return getattr(memory, "pss", memory.rss) / 2**20


def main() -> None:
    print(f"ranks on {physical_cores()} cores, one thread each; {CELLS} cells")
    print("ranks  start s  empty cell ms (median, p90)  all-reduce ms  MiB a rank")
    for count in (1, 2, 4):
        began = time.perf_counter()
        with Ranks(count, choose_devices("cpu", count), threads=1) as ranks:
            start_s = time.perf_counter() - began
            memory = statistics.mean(memory_mib(pid) for pid in ranks.pids)
            empty = cell_times_ms(ranks, "pass")
            reduce = cell_times_ms(ranks, "x = torch.ones(4); dist.all_reduce(x)")
        ninth = statistics.quantiles(empty, n=10)[-1]
        row = [start_s, statistics.median(empty), ninth, statistics.median(reduce), memory]
        print("{:5d} {:8.2f} {:12.1f} {:8.1f} {:21.1f} {:11.0f}".format(count, *row))


if __name__ == "__main__":
    main()

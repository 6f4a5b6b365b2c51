"""How long this process has been kept from a core: whether other programs disturb a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")


def waited_s() -> float | None:
    """Seconds that this process's threads, gloo's too, have been ready and had no core.

    None where there is no Linux. A thread that ends takes its waiting with it.
    """
    if not _THREADS.exists():
        return None
    waited_ns = 0
    for thread in _THREADS.iterdir():
        with suppress(OSError):  # it has ended meanwhile
            waited_ns += int((thread / "schedstat").read_text().split()[1])
    return waited_ns * 1e-9


def waited_share(work: Callable[[], object]) -> float | None:
    """Call ``work``; the seconds waited in it over its seconds, None where nothing tells."""
    before_s, began_s = waited_s(), time.perf_counter()
    work()
    seconds, after_s = time.perf_counter() - began_s, waited_s()
    return None if before_s is None or after_s is None else max(0.0, after_s - before_s) / seconds

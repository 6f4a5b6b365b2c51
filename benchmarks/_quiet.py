"""Waits until other programs leave the processor alone."""

from __future__ import annotations

import time

import psutil

QUIET_CORES = 0.25


def busy_cores(seconds: float = 0.12) -> float:
    """Cores that are busy while the caller sleeps, all programs of the machine together."""
    return psutil.cpu_percent(seconds) / 100 * psutil.cpu_count()


def wait_for_quiet(longest_s: float) -> bool:
    """Return when the machine is quiet, or after `longest_s`; says whether it became quiet.

    To be called while every rank of the benchmark sleeps in a barrier.
    """
    end_s = time.monotonic() + longest_s
    while busy_cores() > QUIET_CORES:
        if time.monotonic() > end_s:
            return False
    return True

"""Find and end every process that a notebook started, whatever it did to its group or session."""

from __future__ import annotations

import os
import signal
import time

import psutil

MARK = "LABKIT_NOTEBOOK_RUN"  # environment variable; children inherit it


class Family:
    """The processes of one notebook run: those that carry its mark, and descendants seen before.

    The mark survives ``setsid`` and the death of every process between; a descendant that clears
    its environment is known from the samples taken while its parents lived.
    """

    def __init__(self, mark: str):
        self.mark = mark
        self.seen: set[psutil.Process] = set()

    def sample(self, pid: int) -> None:
        """Remember the descendants of ``pid``."""
        try:
            self.seen.update(psutil.Process(pid).children(recursive=True))
        except psutil.Error:
            pass  # it has just ended

    def alive(self) -> list[psutil.Process]:
        """All of them that run now, without the caller."""
        found = {process for process in psutil.process_iter() if self._is_marked(process)}
        found |= {process for process in self.seen if _runs(process)}
        return [process for process in found if process.pid != os.getpid()]

    def wait(self, grace_s: float) -> list[psutil.Process]:
        """Those still alive after at most ``grace_s`` seconds in which they may end themselves."""
        end = time.monotonic() + grace_s
        while (left := self.alive()) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def kill(self) -> None:
        """SIGKILL them all until none is left.

        Raises:
            RuntimeError: some do not die within 10 s; the message has their pids.
        """
        end = time.monotonic() + 10
        while left := self.alive():
            if time.monotonic() > end:
                raise RuntimeError(f"processes {[p.pid for p in left]} do not end on SIGKILL")
            for process in left:
                _send_kill(process)
            time.sleep(0.05)

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark and _runs(process)
        except (psutil.Error, OSError):
            return False  # it has ended, or is another user's


def describe(processes: list[psutil.Process]) -> str:
    """Such as ``1 left and killed: pid 12 (sleep 60)``; empty for none."""
    words = ", ".join(f"pid {process.pid} ({_command(process)})" for process in processes)
    return f"{len(processes)} left and killed: {words}" if processes else ""


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:60] or process.name()
    except psutil.Error:
        return "ended"


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _send_kill(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.Error:
        pass  # it was faster

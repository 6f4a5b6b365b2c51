"""What a person sees while the notebooks run: one line that moves, or plain lines in a log."""

from __future__ import annotations

import time
from shutil import get_terminal_size
from typing import TextIO

PLAIN_EVERY_S = 15.0


class Progress:
    """Prints to ``stream``; on a terminal it updates one line in place.

    Args:
        expected_s: stem -> seconds of each notebook that will run; None where unknown.
    """

    def __init__(self, stream: TextIO, expected_s: dict[str, float | None]):
        self.stream = stream
        self.moves = stream.isatty()
        self.expected_s = expected_s
        self.begun = time.monotonic()
        self.number = 0

    def start(self, stem: str) -> None:
        self.number += 1
        self.stem = stem
        self.started = self.last_shown = time.monotonic()
        if not self.moves:
            self._print(self._line("start"))

    def update(self, cell: str) -> None:
        """Show the running ``cell``, such as ``"7/23"``; empty before the first."""
        now = time.monotonic()
        if now - self.last_shown < (0.2 if self.moves else PLAIN_EVERY_S):
            return
        self.last_shown = now
        line = self._line(f"cell {cell}" if cell else "starting the kernel")
        if self.moves:
            self.stream.write(f"\r{line[: get_terminal_size().columns - 1]}\033[K")
            self.stream.flush()
        else:
            self._print(line)

    def finish(self, verdict: str, reason: str | None) -> None:
        """Close the notebook's line with its verdict."""
        line = self._line(verdict) + (f": {reason}" if reason else "")
        self._print(f"\r{line}\033[K" if self.moves else line)

    def _line(self, what: str) -> str:
        now = time.monotonic()
        known = [seconds for seconds in self.expected_s.values() if seconds is not None]
        whole = sum(known) if len(known) == len(self.expected_s) else None
        return (
            f"[{self.number}/{len(self.expected_s)}] {self.stem}: {what}, "
            f"{_of(now - self.started, self.expected_s[self.stem])}, "
            f"in all {_of(now - self.begun, whole)}"
        )

    def _print(self, line: str) -> None:
        print(line, file=self.stream, flush=True)


def clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock(75.4)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _of(elapsed_s: float, expected_s: float | None) -> str:
    return clock(elapsed_s) + ("" if expected_s is None else f" of about {clock(expected_s)}")

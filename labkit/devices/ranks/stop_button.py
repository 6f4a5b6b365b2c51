"""Jupyter's stop button while the notebook waits for its ranks."""

from __future__ import annotations

import signal
import threading


class StopButton:
    """Counts SIGINTs inside a ``with`` block instead of raising in the middle of it.

    KeyboardInterrupt could otherwise come between a message and its handling, or between the start
    of a process and the note of its pid. It is raised at the end of the block, unless another
    error is on its way. In a thread other than the main one Python delivers no signals: then
    nothing is counted.
    """

    def __enter__(self) -> StopButton:
        self.presses = 0
        self._watches = threading.current_thread() is threading.main_thread()
        if self._watches:
            self._previous = signal.signal(signal.SIGINT, self._press)
        return self

    def _press(self, number, frame) -> None:
        self.presses += 1

    def __exit__(self, kind, error, trace) -> None:
        if self._watches:
            # None: it was set by C code, and Python cannot put it back
            previous = signal.default_int_handler if self._previous is None else self._previous
            signal.signal(signal.SIGINT, previous)
        if self.presses and kind is None:
            raise KeyboardInterrupt

"""One thread that looks at every device of every source at a steady rate."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from labkit.measure.telemetry.metrics import Metered, Reading, Source

DEFAULT_HZ = 4.0


class Sample(NamedTuple):
    """What device number ``device`` showed at ``time_s`` of ``time.perf_counter``."""

    time_s: float
    device: int
    reading: Reading


class Sampler:
    """Collects samples between ``start`` and ``stop``; can be started again and goes on then.

    Prints nothing and raises nothing from its thread: what cannot be read becomes a reason.

    Args:
        sources: their devices are numbered one after the other.
        hz: looks per second, > 0.
        keep: samples kept, the latest; None for all.

    Raises:
        ValueError: ``hz`` is not above 0.
    """

    def __init__(
        self, sources: Sequence[Source], hz: float = DEFAULT_HZ, keep: int | None = None
    ) -> None:
        if not hz > 0:
            raise ValueError(f"hz={hz} must be above 0; try {DEFAULT_HZ}")
        self.sources, self.hz = tuple(sources), hz
        self.devices: tuple[Metered, ...] = tuple(d for s in sources for d in s.devices)
        self.samples: deque[Sample] = deque(maxlen=keep)
        self._lock = threading.Lock()  # of one look: the thread's or the caller's
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Look once now, and go on in a thread. Does nothing while it runs."""
        if self.running:
            return
        self._stopped.clear()
        self.look()
        self._thread = threading.Thread(target=self._loop, name="labkit-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and look a last time. Safe to call twice."""
        if not self.running:
            return
        self._stopped.set()
        self._thread.join()
        self._thread = None
        self.look()

    def look(self) -> None:
        """Read every device once."""
        with self._lock:
            number = 0
            for source in self.sources:
                for index in range(len(source.devices)):
                    reading = _read(source, index)
                    self.samples.append(Sample(time.perf_counter(), number, reading))
                    number += 1

    def _loop(self) -> None:
        due_s = time.perf_counter()
        while True:
            # after a look that took too long, the next ones are left out and not caught up on
            due_s = max(due_s + 1 / self.hz, time.perf_counter())
            if self._stopped.wait(due_s - time.perf_counter()):
                return
            self.look()


def _read(source: Source, index: int) -> Reading:
    try:
        return source.read(index)
    except Exception as error:  # the thread has nobody to raise to
        return Reading.nothing(f"{type(error).__name__}: {error}")

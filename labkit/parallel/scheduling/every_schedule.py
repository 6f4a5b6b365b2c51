"""Every schedule by the name that the notebooks give it."""

from __future__ import annotations

from collections.abc import Callable

from labkit.parallel.scheduling.schedules import (
    Schedule,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
)
from labkit.parallel.scheduling.zero_bubble import zero_bubble, zero_bubble_v

BUILDERS: dict[str, Callable[[int, int], Schedule]] = {  # (ranks, microbatches) -> schedule
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "interleaved": interleaved_one_f_one_b,
    "zero bubble": zero_bubble,
    "zero bubble V": zero_bubble_v,
}

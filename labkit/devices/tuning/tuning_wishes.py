"""Settings worth trying on the cards that are there, and why some are not tried.

Cards differ: a laptop's has no power limit, a server's no fan. What a card does not know or would
refuse is left out with the reason, and the rest is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import nvitop
from nvitop import libnvml

from labkit.devices.tuning.tuning_plan import TuningError, Wish, known, plan


@dataclass(frozen=True)
class Wishes:
    """Settings that every card allows now, and in words what was left out and why."""

    to_try: tuple[Wish, ...] = ()
    left_out: tuple[str, ...] = ()

    def __add__(self, other: Wishes) -> Wishes:
        return Wishes(self.to_try + other.to_try, self.left_out + other.left_out)


def power_wishes(
    gpus: Sequence[nvitop.Device], shares: Sequence[float] = (0.83, 0.67, 0.5)
) -> Wishes:
    """Power caps: shares of the smallest default limit of the cards."""

    def caps() -> list[Wish]:
        default_mw = min(_of_each(gpus, "nvmlDeviceGetPowerManagementDefaultLimit"))
        return [Wish(power_limit_w=round(share * default_mw / 1000)) for share in shares]

    return _allowed(gpus, caps)


def clock_wishes(gpus: Sequence[nvitop.Device], shares: Sequence[float] = (1.0, 0.8)) -> Wishes:
    """Clocks to hold: shares of the highest that every card knows; the first is all it can."""

    def clocks() -> list[Wish]:
        most = min(_of_each(gpus, "nvmlDeviceGetMaxClockInfo", libnvml.NVML_CLOCK_SM))
        return [Wish(clocks_mhz=(round(share * most),) * 2) for share in shares]

    return _allowed(gpus, clocks)


def fan_wishes(gpus: Sequence[nvitop.Device], percents: Sequence[int] = (100,)) -> Wishes:
    """Fan speeds. A fan is never slowed, so one that turns faster than a speed leaves it out; all
    that a fan can do is left out by none, however hot a sweep gets.
    """
    return _allowed(gpus, lambda: [Wish(fan_percent=percent) for percent in percents])


def _of_each(gpus: Sequence[nvitop.Device], function: str, *arguments: int) -> list[int]:
    return [known(f"GPU {place}", function, gpu, *arguments) for place, gpu in enumerate(gpus)]


def _allowed(gpus: Sequence[nvitop.Device], proposed: Callable[[], list[Wish]]) -> Wishes:
    """Those whose plan the cards allow; none for no card."""
    try:
        wishes = proposed() if gpus else []
    except TuningError as error:
        return Wishes((), (str(error),))
    found = Wishes()
    for wish in wishes:
        try:
            plan(gpus, wish)
            found += Wishes((wish,))
        except (ValueError, TuningError) as error:
            found += Wishes((), (str(error),))
    return Wishes(found.to_try, tuple(dict.fromkeys(found.left_out)))

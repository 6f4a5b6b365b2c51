"""Does setting fans and clocks by hand raise training performance? An answer from a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.measure.telemetry.power_sweep import SweepPoint


@dataclass(frozen=True)
class Verdict:
    """``holds`` is None where the sweep cannot tell; ``reason`` has the figures."""

    holds: bool | None
    reason: str


def verdict(points: Sequence[SweepPoint]) -> Verdict:
    """Judge the sentence "manual fan and clock values can raise training performance".

    A setting is faster only where its whole interval lies below the default's time.

    Args:
        points: a sweep, its default first.
    """
    if not points:
        return Verdict(None, "nothing was measured")
    default, *others = points
    if not others:
        return Verdict(None, "only the default was measured; a sweep that applies takes root")
    if any(point.interval is None for point in others):
        return Verdict(None, f"{_single_runs(others)}; {_saving(others)}")
    faster = [point for point in others if point.interval[1] < 1]
    if faster:
        best = min(faster, key=lambda point: point.relative_time)
        gain = f"{_with(best.relative_time, best.interval)} of the default's time"
        return Verdict(True, f"{best.setting} takes {gain}; {_held_back(default)}")
    return Verdict(
        False, f"no setting was faster beyond doubt; {_held_back(default)}; {_saving(others)}"
    )


def _single_runs(points: Sequence[SweepPoint]) -> str:
    fastest = min(points, key=lambda point: point.relative_time)
    return (
        f"single runs: the fastest other setting, {fastest.setting}, takes "
        f"{fastest.relative_time:.3f} of the default's time, and fans were not tried"
    )


def _with(value: float, interval: tuple[float, float] | None) -> str:
    return f"{value:.3f}" + ("" if interval is None else " ({:.3f} to {:.3f})".format(*interval))


def _held_back(default: SweepPoint) -> str:
    if default.throttled:
        return f"by default the clocks were held back by {', '.join(default.throttled)}"
    return "by default nothing held the clocks back, so that cooling could lift nothing"


def _saving(points: Sequence[SweepPoint]) -> str:
    known = [point for point in points if point.relative_energy is not None]
    if not known:
        return "energy was not counted"
    best = min(known, key=lambda point: point.relative_energy)
    return (
        f"{best.setting} takes {_with(best.relative_energy, best.energy_interval)} of the energy a "
        f"token in {_with(best.relative_time, best.interval)} of the time"
    )

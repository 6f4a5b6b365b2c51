"""A sweep of power caps, clocks or fans as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from labkit.lab.plots import Picture
from labkit.lab.tables import Table
from labkit.measure.telemetry.power_sweep import SweepPoint


def sweep_table(points: Sequence[SweepPoint]) -> Table:
    """One row a setting; the intervals are at 95 % confidence."""
    headers = ["setting", "time, default = 1", "its interval"]
    headers += [
        "energy a token, default = 1",
        "its interval",
        "tokens/s",
        "J/token",
        "hottest",
        "clocks held back by",
    ]
    return Table(headers, [_row(point) for point in points])


def _row(point: SweepPoint) -> list[str]:
    counted = point.relative_energy is not None
    return [
        point.setting,
        f"{point.relative_time:.3f}",
        _interval(point.interval),
        _or_null(point.relative_energy, "{:.3f}"),
        _interval(point.energy_interval) if counted else "null",
        _or_null(point.tokens_per_s, "{:,.0f}"),
        _or_null(point.joules_per_token, "{:.4g}"),
        _or_null(point.temperature_c, "{:.0f} °C"),
        ", ".join(point.throttled) or ("nothing" if point.tokens_per_s else "null"),
    ]


def _interval(low_high: tuple[float, float] | None) -> str:
    return "single run" if low_high is None else "{:.3f} to {:.3f}".format(*low_high)


def _or_null(value: float | None, form: str) -> str:
    return "null" if value is None else form.format(value)


def draw_sweep(points: Sequence[SweepPoint], title: str) -> Picture:
    """Time and energy of each setting beside the default's; whiskers are the intervals."""
    figure = Figure(figsize=(1.8 + 1.3 * len(points), 3.4), layout="constrained")
    axes = figure.subplots()
    places = range(len(points))
    times = [point.relative_time for point in points]
    axes.bar([p - 0.2 for p in places], times, 0.38, label="time", color="#4c78a8")
    for place, point in zip(places, points, strict=True):
        if point.interval is not None:
            axes.plot([place - 0.2] * 2, point.interval, color="k", lw=1.5)
        if point.energy_interval is not None:
            axes.plot([place + 0.2] * 2, point.energy_interval, color="k", lw=1.5)
    energies = [(p, x.relative_energy) for p, x in zip(places, points, strict=True)]
    known = [(place, energy) for place, energy in energies if energy is not None]
    if known:
        where, heights = zip(*known, strict=True)
        axes.bar([p + 0.2 for p in where], heights, 0.38, label="energy a token", color="#f58518")
    axes.axhline(1, color="k", lw=0.8, ls=":")
    axes.set_xticks(list(places), [point.setting for point in points])
    axes.set_ylabel("relative to the default")
    axes.legend(frameon=False)
    provenances = ", ".join(dict.fromkeys(point.provenance for point in points))
    axes.set_title(f"{title}\n[{provenances}]", size=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return Picture(figure)

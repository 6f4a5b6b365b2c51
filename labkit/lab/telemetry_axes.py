"""The rows of a telemetry picture: each device's activity and regions, and figures of all."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.lab.plots import COLOURS
from labkit.measure.telemetry.metrics import ACTIVITY
from labkit.measure.telemetry.telemetry import Telemetry
from labkit.parallel.placing.placement_view import readable_bytes

LABELS = {
    "compute_percent": "computes",
    "kernel_active_percent": "a kernel is active",
    "cpu_percent": "CPU of the process",
    "link_percent": "link in use",
}
_STYLES = {
    "compute_percent": dict(ls="-", color="k", lw=1.2),
    "kernel_active_percent": dict(ls="--", color="k", lw=1.2),
    "cpu_percent": dict(ls="-", color="k", lw=1.2),
    "link_percent": dict(ls="-", color=COLOURS["transfer"], lw=0.9),
}
_BYTES = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


def draw_activity(axis: Axes, t: Telemetry, device: int, unit_s: float) -> None:
    """How busy a device was, in percent, and below it the regions of its rank.

    Args:
        unit_s: seconds in one unit of the time axis.
    """
    names = [name for name in _STYLES if t.series(device, name)]
    # a meter tells what was before the look, a modelled one what is around it
    where = "mid" if t.devices[device].provenance.startswith("virtual") else "pre"
    for name in names:
        series = t.series(device, name)
        values = [value for _, value in series]
        axis.step(
            _times(t, series, unit_s), values, where=where, label=LABELS[name], **_STYLES[name]
        )
    if not names:
        reason = t.reason(device, _activity_of(t, device)) or "not read"
        axis.text(0.5, 0.6, f"null: {reason}", transform=axis.transAxes, ha="center", va="center")
    elif device == 0:
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    _draw_regions(axis, t, device, unit_s)
    highest = max((t.peak(device, name) for name in names), default=0)
    axis.set_ylim(-28, max(108, 1.05 * highest))  # a process on several cores exceeds 100
    axis.set_yticks([tick for tick in axis.get_yticks() if 0 <= tick <= max(100, highest)])
    axis.set_ylabel(_label(t, device), rotation=0, ha="right", va="center")


def _label(t: Telemetry, device: int) -> str:
    """The device, and what a curve would not show of it."""
    lines = [f"{t.devices[device].name}, %", *(["(lost)"] if t.lost(device) else [])]
    peak_bytes = t.peak(device, "memory_peak_bytes")
    if peak_bytes is not None:
        lines.append(f"most {readable_bytes(peak_bytes)}")
    return "\n".join(lines)


def _draw_regions(axis: Axes, t: Telemetry, device: int, unit_s: float) -> None:
    for span in t.spans:
        if span.rank == device and span.stream == "compute":
            start, width = (span.start_s - _zero(t)) / unit_s, span.duration_s / unit_s
            axis.barh(-15, width, left=start, height=20, color=COLOURS[span.kind])


def _activity_of(t: Telemetry, device: int) -> str:
    """Which activity a device of this kind would show."""
    kinds = {"measured:cpu": "cpu_percent", "measured:cuda": "kernel_active_percent"}
    return kinds.get(t.devices[device].provenance, ACTIVITY[0])


def draw_metric(axis: Axes, t: Telemetry, metric: str, unit_s: float) -> None:
    """Memory or power of all devices."""
    unit, name = (1.0, "power\nW") if metric == "power_w" else _memory_unit(t, metric)
    for device, metered in enumerate(t.devices):
        series = t.series(device, metric)
        if series:
            axis.plot(_times(t, series, unit_s), [v / unit for _, v in series], label=metered.name)
    most = max(t.peak(device, metric) or 0 for device in range(len(t.devices)))
    axis.set_ylim(0, 1.15 * most / unit or 1)  # a line on the edge could be cut off
    axis.set_ylabel(name, rotation=0, ha="right", va="center")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)


def _memory_unit(t: Telemetry, metric: str) -> tuple[float, str]:
    """Bytes of the largest unit that leaves at least 1, and the axis' label."""
    most = max(t.peak(device, metric) or 0 for device in range(len(t.devices)))
    power, unit = next((pair for pair in _BYTES if most >= 1 << pair[0]), (0, "B"))
    return float(1 << power), f"memory\n{unit}"


def name_regions(figure: Figure, axis: Axes, t: Telemetry) -> None:
    """A legend below of the kinds of regions that can be seen."""
    whole_s = max((s.end_s for s in t.spans), default=0) - _zero(t)
    visible = [s for s in t.spans if s.stream == "compute" and s.duration_s > 0.002 * whole_s]
    kinds = dict.fromkeys(span.kind for span in visible)
    handles = [axis.barh(0, 0, color=COLOURS[kind], label=kind) for kind in kinds]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)


def time_unit(seconds: float) -> tuple[float, str]:
    """Seconds in one unit of a time axis of this length, and its name."""
    return (1.0, "s") if seconds >= 1 else (1e-3, "ms")


def _times(t: Telemetry, series: list[tuple[float, float]], unit_s: float) -> list[float]:
    return [(time_s - _zero(t)) / unit_s for time_s, _ in series]


def _zero(t: Telemetry) -> float:
    starts = [span.start_s for span in t.spans]
    return min([t.start_s, *starts]) if t.samples else min(starts, default=0.0)

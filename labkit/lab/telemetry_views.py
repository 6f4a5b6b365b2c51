"""Telemetry as tables and as a picture."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.lab.plots import COLOURS, Picture
from labkit.lab.tables import Table
from labkit.measure.telemetry.metrics import ACTIVITY, METRICS, throttle_reasons
from labkit.measure.telemetry.telemetry import Telemetry
from labkit.measure.telemetry.telemetry_regions import by_region

GIB = 1 << 30
_LABELS = {
    "compute_percent": "computes",
    "kernel_active_percent": "a kernel is active",
    "cpu_percent": "CPU of the process",
}


Cell = tuple[str | None, str | None]  # what is shown, or why nothing


def telemetry_table(t: Telemetry) -> Table:
    """One row a device: means and peaks; ``null`` for what was not read, and the reason."""
    columns = _columns(t)
    rows = []
    for device in range(len(t.devices)):
        cells = [show(device) for show in columns.values()]
        reasons = dict.fromkeys(reason for said, reason in cells if said is None)
        said = ["null" if cell is None else cell for cell, _ in cells]
        rows.append([_name(t, device), *said, "; ".join(r or "not read" for r in reasons)])
    return Table(["device", *columns, "null because"], rows)


def _columns(t: Telemetry) -> dict[str, Callable[[int], Cell]]:
    """By header, what gives a device's cell."""
    given = set(t.metrics)
    activities = [name for name in ACTIVITY if name in given] or ["kernel_active_percent"]
    memory = "memory_peak_bytes" if "memory_peak_bytes" in given else "memory_used_bytes"
    columns = {_LABELS[name]: _cell(t, name, t.mean, "{:.0f} %") for name in activities}
    if "link_percent" in given:
        columns["link in use"] = _cell(t, "link_percent", t.mean, "{:.0f} %")
    columns["most memory"] = _cell(t, memory, t.peak, "{:.2f} GiB", GIB)
    columns["power"] = _cell(t, "power_w", t.mean, "{:.0f} W")
    columns["energy"] = _cell(t, "energy_j", t.mean, "{:.1f} J")
    columns["hottest"] = _cell(t, "temperature_c", t.peak, "{:.0f} °C")
    columns["clocks held back by"] = lambda device: _throttled(t, device)
    for way in ("sent", "received"):
        name = f"pcie_{way}_bytes_per_s"
        if name in given:
            columns[f"PCIe {way}"] = _cell(t, name, t.mean, "{:.2f} GB/s", 1e9)
        name = f"nvlink_{way}_bytes"
        if name in given:
            columns[f"NVLink {way}"] = _cell(t, name, t.mean, "{:.2f} GB", 1e9)
    return columns


def _cell(
    t: Telemetry, metric: str, value_of: Callable[[int, str], float | None], form: str, unit=1.0
) -> Callable[[int], Cell]:
    def show(device: int) -> Cell:
        value = value_of(device, metric)
        if value is None:
            return None, t.reason(device, metric)
        return form.format(value / unit), None

    return show


def _name(t: Telemetry, device: int) -> str:
    metered = t.devices[device]
    lost = " (lost)" if t.lost(device) else ""
    return f"{metered.name}{lost}" + (f", {metered.model}" if metered.model else "")


def _throttled(t: Telemetry, device: int) -> Cell:
    """Reasons that a clock was not higher, each with the share of samples that had it."""
    bits = [int(value) for _, value in t.series(device, "throttle_bits")]
    if not bits:
        return None, t.reason(device, "throttle_bits")
    shares: dict[str, float] = {}
    for value in bits:
        for name in throttle_reasons(value):
            shares[name] = shares.get(name, 0) + 1 / len(bits)
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items()) or "nothing", None


def region_table(t: Telemetry) -> Table:
    """What each device showed during each kind of region."""
    readings = by_region(t)
    activities = [n for n in ACTIVITY if any(n in r.active_percent for r in readings)]
    headers = ["device", "during", "ms", "samples", *(_LABELS[n] for n in activities)]
    rows = [
        [
            t.devices[r.device].name,
            r.region,
            f"{r.seconds * 1e3:.1f}",
            r.samples,
            *(_percent(r.active_percent.get(name)) for name in activities),
            "null" if r.power_w is None else f"{r.power_w:.0f} W",
            "null" if r.energy_j is None else f"{r.energy_j:.2f} J",
        ]
        for r in readings
    ]
    return Table([*headers, "power", "energy"], rows)


def _percent(value: float | None) -> str:
    return "no sample" if value is None else f"{value:.0f} %"


def draw_telemetry(t: Telemetry, title: str) -> Picture:
    """A row for each device with its activity and regions, then memory and power of all."""
    panels = [name for name in ("memory_used_bytes", "power_w") if name in t.metrics]
    shown = len(t.devices)
    figure = Figure(figsize=(9, 0.8 + 1.1 * shown + 1.3 * len(panels)), layout="constrained")
    axes = figure.subplots(max(1, shown + len(panels)), sharex=True, squeeze=False)[:, 0]
    for device in range(shown):
        _draw_activity(axes[device], t, device)
    for metric, axis in zip(panels, axes[shown : shown + len(panels)], strict=True):
        _draw_metric(axis, t, metric)
    axes[-1].set_xlabel(f"time in {_scale(t)[1]}{_no_power(t)}")
    provenances = ", ".join(dict.fromkeys(device.provenance for device in t.devices))
    axes[0].set_title(f"{title}   [{provenances}]", size=10)
    _name_kinds(figure, axes[0], t)
    for axis in axes:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return Picture(figure)


def _no_power(t: Telemetry) -> str:
    if "power_w" in t.metrics or not t.samples:
        return ""
    return f"   (power is null: {t.reason(0, 'power_w')})"


def _name_kinds(figure: Figure, axis: Axes, t: Telemetry) -> None:
    kinds = dict.fromkeys(span.kind for span in t.spans if span.stream == "compute")
    handles = [axis.barh(0, 0, color=COLOURS[kind], label=kind) for kind in kinds]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)


def _scale(t: Telemetry) -> tuple[float, str]:
    return (1.0, "s") if t.seconds >= 1 else (1e-3, "ms")


def _times(t: Telemetry, series: list[tuple[float, float]]) -> list[float]:
    unit_s, _ = _scale(t)
    return [(time_s - _zero(t)) / unit_s for time_s, _ in series]


def _zero(t: Telemetry) -> float:
    starts = [span.start_s for span in t.spans]
    return min([t.start_s, *starts]) if t.samples else min(starts, default=0.0)


def _draw_activity(axis: Axes, t: Telemetry, device: int) -> None:
    names = [name for name in ACTIVITY if t.series(device, name)]
    # a meter tells what was before the look, a modelled one what is around it
    where = "mid" if t.devices[device].provenance.startswith("virtual") else "pre"
    for name, style in zip(names, ("-", "--", ":"), strict=False):
        series = t.series(device, name)
        values = [value for _, value in series]
        axis.step(_times(t, series), values, style, where=where, label=_LABELS[name], color="k")
    if names:
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    else:
        reason = t.reason(device, _activity_of(t, device)) or "not read"
        axis.text(0.5, 0.6, f"null: {reason}", transform=axis.transAxes, ha="center", va="center")
    unit_s, _ = _scale(t)
    for span in t.spans:
        if span.rank == device and span.stream == "compute":
            start = (span.start_s - _zero(t)) / unit_s
            width = span.duration_s / unit_s
            axis.barh(-15, width, left=start, height=20, color=COLOURS[span.kind])
    highest = max((t.peak(device, name) for name in names), default=0)
    axis.set_ylim(-28, max(108, 1.05 * highest))  # a process on several cores exceeds 100
    name = t.devices[device].name + ("\n(lost)" if t.lost(device) else "")
    axis.set_ylabel(f"{name}\n%", rotation=0, ha="right", va="center")


def _activity_of(t: Telemetry, device: int) -> str:
    """Which activity a device of this kind would show."""
    kinds = {"measured:cpu": "cpu_percent", "measured:cuda": "kernel_active_percent"}
    return kinds.get(t.devices[device].provenance, ACTIVITY[0])


def _draw_metric(axis: Axes, t: Telemetry, metric: str) -> None:
    unit, name = (GIB, "memory\nGiB") if metric == "memory_used_bytes" else (1, "power\nW")
    for device, metered in enumerate(t.devices):
        series = t.series(device, metric)
        if series:
            axis.plot(_times(t, series), [v / unit for _, v in series], label=metered.name)
    axis.set_ylim(bottom=0)
    axis.set_ylabel(name, rotation=0, ha="right", va="center")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)


def metrics_table() -> Table:
    """What each figure means."""
    rows = [[name, metric.unit, metric.meaning] for name, metric in METRICS.items()]
    return Table(["figure", "unit", "what it is"], rows)

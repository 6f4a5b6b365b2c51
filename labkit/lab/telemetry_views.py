"""Telemetry as tables and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.lab.plots import Picture
from labkit.lab.tables import Table
from labkit.lab.telemetry_axes import LABELS, draw_activity, draw_metric, name_regions, time_unit
from labkit.measure.telemetry.metrics import ACTIVITY, METRICS, throttle_reasons
from labkit.measure.telemetry.telemetry import Telemetry
from labkit.measure.telemetry.telemetry_regions import by_region
from labkit.parallel.placing.placement_view import readable_bytes, readable_seconds

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
    columns = {LABELS[name]: _cell(t, name, t.mean, "{:.0f} %") for name in activities}
    if "link_percent" in given:
        columns["link in use"] = _cell(t, "link_percent", t.mean, "{:.0f} %")
    columns["most memory"] = _cell(t, memory, t.peak, readable_bytes)
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
    t: Telemetry,
    metric: str,
    value_of: Callable[[int, str], float | None],
    form: str | Callable[[float], str],
    unit: float = 1.0,
) -> Callable[[int], Cell]:
    def show(device: int) -> Cell:
        value = value_of(device, metric)
        if value is None:
            return None, t.reason(device, metric)
        return (form(value) if callable(form) else form.format(value / unit)), None

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
    headers = ["device", "during", "for", "samples", *(LABELS[n] for n in activities)]
    rows = [
        [
            t.devices[r.device].name,
            r.region,
            readable_seconds(r.seconds),
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


def draw_telemetry(t: Telemetry, title: str, *, window_s: float | None = None) -> Picture:
    """A row for each device with its activity and regions, then memory and power of all over time.

    Modelled devices have neither over time: their most memory stands beside their activity.

    Args:
        window_s: length of the time axis; None for as long as was watched.
    """
    panels = [name for name in ("memory_used_bytes", "power_w") if name in t.metrics]
    figure = Figure(
        figsize=(9, 0.8 + 1.1 * len(t.devices) + 1.3 * len(panels)), layout="constrained"
    )
    num_rows = max(1, len(t.devices) + len(panels))
    axes = figure.subplots(num_rows, sharex=True, squeeze=False)[:, 0]
    unit = time_unit(window_s or t.seconds)
    _draw_rows(figure, list(axes), t, panels, unit[0])
    if window_s is not None:
        axes[-1].set_xlim(0, window_s / unit[0])
    return _finished(figure, axes, t, title, unit[1])


def draw_watched_waterfall(causes: Mapping[str, float], t: Telemetry, title: str) -> Picture:
    """Where a step's time went, over what each device did meanwhile, on one time axis.

    Args:
        causes: seconds by cause; each bar starts where the one before it ended, and the last one
            ends with the step.
        t: of that step, as ``timeline_telemetry`` gives it or ``Telemetry.join`` completes it.
    """
    heights = [0.25 * len(causes) + 0.2, *[1.1] * len(t.devices)]
    figure = Figure(figsize=(9, 1.0 + sum(heights)), layout="constrained")
    top, *axes = figure.subplots(len(heights), sharex=True, height_ratios=heights)
    unit_s, unit = time_unit(t.seconds)
    reached_s = 0.0
    for place, seconds in enumerate(causes.values()):
        colour = "#4c78a8" if not place else "#f58518"
        top.barh(place, seconds / unit_s, left=reached_s / unit_s, color=colour)
        reached_s += seconds
        end = max(reached_s, reached_s - seconds) / unit_s
        top.text(end, place, f" {seconds / unit_s:.3g} {unit}", va="center", size=8)
    top.set_yticks(range(len(causes)), list(causes))
    top.invert_yaxis()
    _draw_rows(figure, axes, t, [], unit_s)
    top.set_xlim(0, 1.1 * max(reached_s, t.seconds) / unit_s)  # room for the last figure
    return _finished(figure, [top, *axes], t, title, unit)


def _draw_rows(
    figure: Figure, axes: list[Axes], t: Telemetry, panels: Sequence[str], unit_s: float
) -> None:
    for device in range(len(t.devices)):
        draw_activity(axes[device], t, device, unit_s)
    for metric, axis in zip(panels, axes[len(t.devices) :], strict=False):
        draw_metric(axis, t, metric, unit_s)
    name_regions(figure, axes[0], t)


def _finished(figure: Figure, axes: Sequence[Axes], t: Telemetry, title: str, unit: str) -> Picture:
    axes[-1].set_xlabel(f"time in {unit}{_no_power(t)}")
    provenances = ", ".join(dict.fromkeys(device.provenance for device in t.devices))
    axes[0].set_title(f"{title}   [{provenances}]", size=10)
    for axis in axes:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return Picture(figure)


def _no_power(t: Telemetry) -> str:
    if "power_w" in t.metrics or not t.samples:
        return ""
    return f"   (power is null: {t.reason(0, 'power_w')})"


def metrics_table(t: Telemetry) -> Table:
    """What each figure means that some device gave."""
    rows = [[name, METRICS[name].unit, METRICS[name].meaning] for name in t.metrics]
    return Table(["figure", "unit", "what it is"], rows)

"""How a placement shows itself: as text, as an HTML table, as a figure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from labkit.parallel.placing.placement_plan import Placement

COLUMNS = ("device", "layers", "time per microbatch", "of slowest", "memory", "capacity")


def readable_bytes(count: float | None) -> str:
    """Bytes in the largest unit that leaves at least 1; None is no limit.

    >>> readable_bytes(1536), readable_bytes(3 << 30), readable_bytes(None)
    ('1.50 KiB', '3.00 GiB', 'no limit')
    """
    if count is None:
        return "no limit"
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.2f} {unit}"
    return f"{count:g} B"


def readable_seconds(seconds: float) -> str:
    """Seconds in a unit that leaves at least 1.

    >>> readable_seconds(0.0125), readable_seconds(2.0), readable_seconds(3e-6)
    ('12.5 ms', '2 s', '3 us')
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def rows(placement: Placement) -> list[tuple[str, ...]]:
    """One row of text per device, under `COLUMNS`."""
    return [
        (
            device.name,
            names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})",
            readable_seconds(time_s),
            f"{time_s / placement.slowest_stage_s:.0%}" if placement.slowest_stage_s else "-",
            readable_bytes(memory),
            readable_bytes(device.memory_bytes),
        )
        for device, names, time_s, memory in zip(
            placement.devices,
            placement.layer_names,
            placement.stage_time_s,
            placement.memory_bytes,
            strict=True,
        )
    ]


def headline(placement: Placement) -> str:
    return (
        f"{len(placement.costs)} layers on {len(placement.devices)} devices, slowest stage "
        f"{readable_seconds(placement.slowest_stage_s)} per microbatch ({placement.provenance})"
    )


def as_text(placement: Placement) -> str:
    """The table with aligned columns."""
    table = [COLUMNS, *rows(placement)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return "\n".join([headline(placement), *lines])


def as_html(placement: Placement) -> str:
    """The table as Jupyter shows it."""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows(placement)
    )
    caption = escape(headline(placement))
    return f"<table><caption>{caption}</caption><tr>{head}</tr>{body}</table>"


def as_figure(placement: Placement) -> Figure:
    """Two panels: seconds per microbatch by cause, and memory against capacity."""
    figure = Figure(figsize=(9, 1.4 + 0.45 * len(placement.devices)), layout="constrained")
    figure.suptitle(headline(placement), fontsize="medium")
    time_axes, memory_axes = figure.subplots(1, 2)
    _draw_times(time_axes, placement)
    _draw_memory(memory_axes, placement)
    return figure


def _draw_times(axes: Axes, placement: Placement) -> None:
    parts = {
        "forward": placement.forward_s,
        "backward": placement.backward_s,
        "transfer": placement.transfer_s,
    }
    left = [0.0] * len(placement.devices)
    for name, seconds in parts.items():
        axes.barh(range(len(left)), [1e3 * s for s in seconds], left=left, label=name)
        left = [start + 1e3 * s for start, s in zip(left, seconds, strict=True)]
    axes.set_yticks(range(len(left)), [device.name for device in placement.devices])
    axes.invert_yaxis()
    axes.set_xlabel("time per microbatch [ms]")
    _legend_above(axes)


def _draw_memory(axes: Axes, placement: Placement) -> None:
    power, unit = (30, "GiB") if max(placement.memory_bytes) >= 1 << 30 else (20, "MiB")
    needed = [memory / (1 << power) for memory in placement.memory_bytes]
    axes.barh(range(len(needed)), needed, color="tab:gray", label="needed")
    for row, device in enumerate(placement.devices):
        if device.memory_bytes is not None:
            label = "capacity" if row == 0 else None
            capacity = device.memory_bytes / (1 << power)
            axes.vlines(capacity, row - 0.4, row + 0.4, color="tab:red", label=label)
    axes.set_yticks(range(len(needed)), [""] * len(needed))
    axes.invert_yaxis()
    axes.set_xlabel(f"memory [{unit}]")
    _legend_above(axes)


def _legend_above(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize="small", frameon=False)

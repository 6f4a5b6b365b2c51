"""The pictures of the series: one call a figure, units on the axes, provenance in the title."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from labkit.measure.timeline import Timeline

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "weight": "#e6c229",
    "optimizer": "#54a24b",
    "compute": "#4c78a8",
    "transfer": "#b279a2",
    "collective": "#e45756",
    "wait": "#d8d8d8",
}


class Picture:
    """A finished figure that any notebook front end shows as a PNG.

    Drawing goes to a ``Figure`` of its own, not through pyplot, whose global list of open figures
    grows with every cell that is run again.
    """

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        return buffer.getvalue()


def draw_timeline(timeline: Timeline, title: str, *, unit_s: float = 1e-3) -> Picture:
    """One row a rank, one bar a span, coloured by kind; idle time stays white."""
    figure = Figure(figsize=(9, 0.9 + 0.55 * timeline.num_ranks))
    axes = figure.subplots()
    zero = timeline.start_s
    for span in timeline.spans:
        start, width = (span.start_s - zero) / unit_s, span.duration_s / unit_s
        axes.barh(span.rank, width, left=start, height=0.7, color=COLOURS[span.kind], ec="white")
        if span.duration_s > 0.04 * timeline.step_time_s:
            axes.text(start + width / 2, span.rank, span.label, ha="center", va="center", size=8)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {r}" for r in range(timeline.num_ranks)])
    axes.invert_yaxis()
    axes.set_xlabel("time in ms" if unit_s == 1e-3 else f"time in units of {unit_s} s")
    kinds = dict.fromkeys(span.kind for span in timeline.spans)
    handles = [axes.barh(0, 0, color=COLOURS[kind], label=kind) for kind in kinds]
    axes.legend(handles=handles, ncols=len(handles), loc="upper center", bbox_to_anchor=(0.5, -0.3))
    return _finished(figure, axes, title, timeline.provenance)


def draw_lines(
    lines: Mapping[str, Sequence[float]],
    x: Sequence[float],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    provenance: str,
    log: bool = False,
) -> Picture:
    """Curves over the same x values; with ``log`` both axes are logarithmic."""
    figure = Figure(figsize=(7, 3.4))
    axes = figure.subplots()
    for name, values in lines.items():
        axes.plot(x, values, label=name, marker="o" if len(x) < 20 else None)
    if log:
        axes.set(xscale="log", yscale="log")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend()
    return _finished(figure, axes, title, provenance)


def draw_stacks(
    stacks: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    ylabel: str,
    provenance: str,
) -> Picture:
    """A bar for each key, stacked from the parts inside it: ``{"rank 0": {"gradients": 3.1}}``."""
    figure = Figure(figsize=(1.6 + 1.5 * len(stacks), 3.4))
    axes = figure.subplots()
    parts = dict.fromkeys(part for stack in stacks.values() for part in stack)
    bottoms = [0.0] * len(stacks)
    for part in parts:
        heights = [stack.get(part, 0.0) for stack in stacks.values()]
        axes.bar(list(stacks), heights, bottom=bottoms, label=part, width=0.6)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    axes.set_ylabel(ylabel)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _finished(figure, axes, title, provenance)


def _finished(figure: Figure, axes, title: str, provenance: str) -> Picture:
    axes.set_title(f"{title}   [{provenance}]", size=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return Picture(figure)

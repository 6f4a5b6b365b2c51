"""The pictures of the series: one call a figure, units on the axes, provenance in the title."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from labkit.measure.timeline import Span, Timeline
from labkit.parallel.scheduling.gaps import Gap

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "weight": "#e6c229",
    "optimizer": "#54a24b",
    "compute": "#9ecae9",
    "transfer": "#b279a2",
    "collective": "#e45756",
    "wait": "#d8d8d8",
}

GAP_COLOURS = {
    "warm-up": "#4c78a8",
    "drain": "#f58518",
    "imbalance": "#9467bd",
    "transfer": "#54a24b",
    "overhead": "#d62728",
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
    """One row a rank, one bar a span, coloured by kind; idle time stays white.

    Args:
        unit_s: seconds in one unit of the time axis; 1 for plans whose costs are units.
    """
    figure = Figure(figsize=(9, 0.9 + 0.55 * timeline.num_ranks))
    axes = figure.subplots()
    _draw_rows(axes, timeline, unit_s, offset=0.0, height=0.7)
    _label_ranks(axes, timeline.num_ranks, unit_s)
    _explain_kinds(axes, timeline.spans)
    return _finished(figure, axes, title, timeline.provenance)


def draw_slots(timeline: Timeline, title: str) -> Picture:
    """One row a slot of a server, one bar a request; a free slot stays white."""
    figure = Figure(figsize=(9, 0.9 + 0.3 * timeline.num_ranks))
    axes = figure.subplots()
    _draw_rows(axes, timeline, 1e-3, offset=0.0, height=0.7)
    _label_ranks(axes, timeline.num_ranks, 1e-3, name="slot")
    return _finished(figure, axes, title, timeline.provenance)


def draw_plan_and_run(
    plan: Timeline,
    run: Timeline,
    title: str,
    *,
    gaps: Sequence[Gap] = (),
    unit_s: float = 1e-3,
) -> Picture:
    """Two rows a rank on one time axis: the plan, pale, above what ran.

    Args:
        gaps: of the run, as ``label_gaps`` gives them; hatched in the colour of their cause.
    """
    figure = Figure(figsize=(9, 1.0 + 0.8 * run.num_ranks))
    axes = figure.subplots()
    _draw_rows(axes, plan, unit_s, offset=-0.22, height=0.36, alpha=0.45)
    _draw_rows(axes, run, unit_s, offset=0.2, height=0.42)
    for gap in gaps:
        start, width = (gap.start_s - run.start_s) / unit_s, gap.duration_s / unit_s
        colour = GAP_COLOURS[gap.cause]
        axes.barh(
            gap.rank + 0.2, width, left=start, height=0.3, fc="none", ec=colour, hatch="////", lw=0
        )
    _label_ranks(axes, run.num_ranks, unit_s)
    _explain_kinds(axes, run.spans, dict.fromkeys(gap.cause for gap in gaps))
    return _finished(figure, axes, f"{title}: plan (pale) above run", run.provenance)


def _draw_rows(
    axes, timeline: Timeline, unit_s: float, *, offset: float, height: float, alpha: float = 1.0
) -> None:
    zero = timeline.start_s
    for span in timeline.spans:
        start, width = (span.start_s - zero) / unit_s, span.duration_s / unit_s
        row = span.rank + offset
        axes.barh(
            row,
            width,
            left=start,
            height=height,
            color=COLOURS[span.kind],
            ec="white",
            lw=0.4,
            alpha=alpha,
        )
        if span.duration_s > 0.018 * len(span.label) * timeline.step_time_s / 2:
            axes.text(start + width / 2, row, span.label, ha="center", va="center", size=7)


def _label_ranks(axes, num_ranks: int, unit_s: float, name: str = "rank") -> None:
    axes.set_yticks(range(num_ranks), [f"{name} {rank}" for rank in range(num_ranks)])
    axes.invert_yaxis()
    axes.set_xlabel("time in ms" if unit_s == 1e-3 else "time in units of one forward")


def _explain_kinds(axes, spans: Sequence[Span], causes: Iterable[str] = ()) -> None:
    whole_s = max((s.end_s for s in spans), default=0) - min((s.start_s for s in spans), default=0)
    visible = [span for span in spans if span.duration_s > 0.002 * whole_s]
    kinds = dict.fromkeys(span.kind for span in visible)
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in kinds]
    handles += [
        Patch(fc="none", ec=GAP_COLOURS[cause], hatch="////", label=f"gap: {cause}")
        for cause in causes
    ]
    axes.legend(
        handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8
    )


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
        _plain_ticks(axes.xaxis, x, at=x)
        _plain_ticks(axes.yaxis, [value for values in lines.values() for value in values])
    elif all(float(value).is_integer() for value in x) and len(x) <= 8:
        axes.set_xticks(x)  # there is no device and a half
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend()
    return _finished(figure, axes, title, provenance)


def _plain_ticks(axis, values: Sequence[float], at: Sequence[float] | None = None) -> None:
    """Numbers instead of powers of ten, where they are few: ``at`` each of some, or one decade."""
    if at is not None and len(at) <= 8 and max(values) < 1000 * min(values):
        axis.set_major_locator(FixedLocator(at))
        axis.set_minor_locator(NullLocator())
    elif not 0 < max(values) < 10 * min(values):
        return
    for set_formatter in (axis.set_major_formatter, axis.set_minor_formatter):
        set_formatter(StrMethodFormatter("{x:,g}"))


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


def draw_matrix(
    values: Sequence[Sequence[float]], *, title: str, unit: str, provenance: str
) -> Picture:
    """A value for each pair of devices, row to column; NaN stays empty."""
    figure = Figure(figsize=(1.6 + 0.9 * len(values), 1.2 + 0.7 * len(values)))
    axes = figure.subplots()
    image = axes.imshow(values, cmap="Blues", vmin=0)
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if value == value:  # not NaN
                text = f"{value:.3g}"
                axes.text(column, row, text, ha="center", va="center", size=9, color="#d62728")
    names = [f"device {i}" for i in range(len(values))]
    axes.set_xticks(range(len(values)), names)
    axes.set_yticks(range(len(values)), names)
    figure.colorbar(image, ax=axes, label=unit)
    return _finished(figure, axes, title, provenance)


def _finished(figure: Figure, axes, title: str, provenance: str) -> Picture:
    axes.set_title(f"{title}   [{provenance}]", size=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return Picture(figure)

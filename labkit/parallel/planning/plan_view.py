"""How a plan shows itself: as text, as an HTML table, and as the cells that run its best layout."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from html import escape
from typing import TYPE_CHECKING

from labkit.parallel.placing.placement_view import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from labkit.parallel.planning.planner import Plan
    from labkit.parallel.planning.predictor import Prediction

COLUMNS = ("devices", "layout", "step", "tokens/s", "bubble", "communication", "memory", "of which")
LAB_GIVEN = {name: name for name in ("config", "inputs", "targets")}
OWN_GIVEN = {name: f"chain.{name}" for name in ("blocks", "inputs", "targets", "loss_fn")}
SHOWN = 12  # rows of each table; the rest is counted


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """One row of text for each ranked layout, under `COLUMNS`."""
    return [_row(plan, prediction) for prediction in plan.ranked]


def _row(plan: Plan, prediction: Prediction) -> tuple[str, ...]:
    largest = max(prediction.memory, key=lambda memory: memory.peak_bytes)
    state = largest.parameters + largest.gradients + largest.optimizer
    return (
        str(prediction.choice.layout.ranks),
        str(prediction.choice),
        readable_seconds(prediction.step_time_s),
        f"{plan.batch * plan.tokens / prediction.step_time_s:,.0f}",
        f"{prediction.bubble:.0%}",
        _seconds_or_none(max(prediction.communication_s)),
        readable_bytes(largest.peak_bytes),
        f"state {readable_bytes(state)}",
    )


def _seconds_or_none(seconds: float) -> str:
    return readable_seconds(seconds) if seconds else "-"


def headline(plan: Plan) -> str:
    first = plan.machine.profiles[0]
    return (
        f"{plan.model}, batch {plan.batch}, up to {plan.machine.count} x {first.name} of "
        f"{readable_bytes(first.memory_bytes)}: {len(plan.ranked)} layouts fit, "
        f"{len(plan.rejected)} do not (predicted:{plan.machine.name})"
    )


def as_text(plan: Plan) -> str:
    """Both tables with aligned columns."""
    lines = [headline(plan), *_aligned([COLUMNS, *rows(plan)[:SHOWN]])]
    lines += _more(len(plan.ranked))
    if not plan.ranked:
        lines.append(plan.advice)
    lines += _aligned([("rejected", "why")] + [(r.what, r.reason) for r in plan.rejected[:SHOWN]])
    return "\n".join(lines + _more(len(plan.rejected)))


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def _more(count: int) -> list[str]:
    return [f"... and {count - SHOWN} more"] if count > SHOWN else []


def as_html(plan: Plan) -> str:
    """The tables as Jupyter shows them; the rejected ones fold out."""
    ranked = _html_table(COLUMNS, rows(plan)[:SHOWN])
    rejected = _html_table(("layout", "why not"), [(r.what, r.reason) for r in plan.rejected])
    advice = "" if plan.ranked else f"<p>{escape(plan.advice)}</p>"
    more = "".join(f"<p>{line}</p>" for line in _more(len(plan.ranked)))
    return (
        f"<p>{escape(headline(plan))}</p>{advice}{ranked}{more}"
        f"<details><summary>{len(plan.rejected)} rejected</summary>{rejected}</details>"
    )


def _html_table(columns: tuple[str, ...], cells: list[tuple[str, ...]]) -> str:
    def line(tag: str, row: tuple[str, ...]) -> str:
        inner = "".join(f"<{tag} style='text-align:left'>{escape(c)}</{tag}>" for c in row)
        return f"<tr>{inner}</tr>"

    return f"<table>{line('th', columns)}{''.join(line('td', row) for row in cells)}</table>"


def as_cells(plan: Plan) -> tuple[str, str]:
    """The notebook's cell, which starts ranks, and theirs, which trains one step."""
    choice = plan.best.choice
    given = LAB_GIVEN if plan.is_lab else OWN_GIVEN
    model = "config, choice, device" if plan.is_lab else "blocks, choice, device, loss_fn=loss_fn"
    pushed = ", ".join(f"{name}={value}" for name, value in given.items())
    here = (
        "from labkit import Ranks\n"
        "from labkit.parallel.planning.choices import Choice\n"
        "from labkit.parallel.planning.levers import Levers\n"
        "from labkit.parallel.sharding.layouts import Layout\n"
        "\n"
        f"choice = {_constructor(choice)}\n"
        f"ranks = Ranks({choice.layout.ranks}, threads=1)\n"
        f"ranks.push(choice=choice, {pushed})"
    )
    on_ranks = (
        "%%ranks\n"
        "from labkit.parallel.planning.plan_training import train_choice\n"
        "\n"
        f"training = train_choice({model})\n"
        "loss = training.step(inputs, targets)\n"
        "print(loss)"
    )
    return here, on_ranks


def _constructor(value: object) -> str:
    """The call that makes a dataclass, without what is as by default."""
    if not is_dataclass(value):
        return repr(value)
    given = {f.name: getattr(value, f.name) for f in fields(value)}
    defaults = {f.name: f.default for f in fields(value)}
    listed = (f"{n}={_constructor(v)}" for n, v in given.items() if v != defaults[n])
    return f"{type(value).__name__}({', '.join(listed)})"

"""``make report``: one self-contained page of a run's results."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby
from pathlib import Path

from labkit.lab import results
from labkit.lab.claims import shown
from labkit.lab.headless.comparison import WORKLOADS, Row, compare
from labkit.lab.headless.state import RunState
from labkit.lab.results import Record

STYLE = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
RULES = {"at_most": "at most", "at_least": "at least", "equals": "equal to"}


def write_report(build: Path, run_name: str | None = None) -> Path:
    """Write ``report.html`` into the folder of ``run_name``, or of the latest run; where it is.

    Raises:
        ValueError: there are no results.
    """
    run = build / run_name if run_name else latest_run(build)
    records = results.read(run / results.FILE_NAME)
    if not records:
        there = sorted(file.parent.name for file in build.glob(f"*/{results.FILE_NAME}"))
        others = f"there are: {', '.join(there)}" if there else "run make execute-notebooks first"
        raise ValueError(f"{run} has no results; {others}")
    target = run / "report.html"
    verdicts = {stem: entry["verdict"] for stem, entry in RunState(run).finished.items()}
    target.write_text(page(run.name, records, verdicts), encoding="utf-8")
    return target


def latest_run(build: Path) -> Path:
    """The run folder whose results changed last; what was run by hand counts only if alone."""
    files = [file for file in build.glob(f"*/{results.FILE_NAME}") if file.stat().st_size]
    if not files:
        raise ValueError(f"no results in {build}; run make execute-notebooks first")
    return max(files, key=lambda f: (f.parent.name != "interactive", f.stat().st_mtime)).parent


def page(run_name: str, records: list[Record], verdicts: dict[str, str]) -> str:
    """The whole page: no script, no link, nothing to load.

    Args:
        verdicts: notebook -> passed, failed or interrupted, as the run ended.
    """
    rows = compare(records)
    parts = [f"<h1>{escape(run_name)}</h1>", _where(records), _not_passed(verdicts)]
    for workload in WORKLOADS:
        parts.append(f"<h2>{workload.capitalize()} on 1, 2 and 4 devices</h2>")
        its = [row for row in rows if row.workload == workload]
        parts += [_quantity(list(group)) for _, group in groupby(its, key=lambda r: r.quantity)]
        if not its:
            parts.append(f"<p>No notebook of this run measured {workload}.</p>")
    parts.append(_claims([record for record in records if record.kind == "claim"]))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(run_name)}</title>'
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _where(records: list[Record]) -> str:
    """What the numbers rest on: presets, devices, versions, commits."""
    devices = {
        f"{r.devices['count']} × {r.devices['devices'][0]['name']}" for r in records if r.devices
    }
    versions = {f"{name} {v}" for r in records for name, v in r.versions.items()}
    facts = {
        "preset": {r.preset for r in records if r.preset},
        "devices": devices,
        "versions": versions,
        "commit": {r.git for r in records if r.git},
    }
    lines = (f"<b>{n}</b>: {escape(', '.join(sorted(v)) or 'unknown')}" for n, v in facts.items())
    return f"<p>{'<br>'.join(lines)}</p>"


def _not_passed(verdicts: dict[str, str]) -> str:
    """Without this line a page of passed claims would hide a notebook that broke before its own."""
    names = [f"{stem} ({verdict})" for stem, verdict in verdicts.items() if verdict != "passed"]
    passed = [stem for stem, verdict in verdicts.items() if verdict == "passed"]
    text = f"Not passed: {', '.join(names)}" if names else f"Run and passed: {', '.join(passed)}."
    return f'<p class="{"failed" if names else "passed"}">{escape(text)}</p>' if verdicts else ""


def _quantity(rows: list[Row]) -> str:
    """One quantity over the device counts, measured (dark) and predicted (light) to one scale."""
    numbers = [n for row in rows for n in (row.measured, row.predicted) if n is not None]
    scale = max(map(abs, numbers), default=0) or 1
    lines = [
        (
            _number(str(row.num_devices)),
            _cell(row.variant),
            _number(_shown(row.measured, row.unit)),
            _number(_shown(row.predicted, row.unit)),
            _number("" if row.ratio is None else f"{row.ratio:.2f} ×"),
            f'<td class="bars">{_bar(row.measured, scale)}{_bar(row.predicted, scale, True)}</td>',
            _code(row.provenance),
            _cell(row.notebook),
        )
        for row in rows
    ]
    head = ("devices", "", "measured", "predicted", "against one", "", "provenance", "notebook")
    return f"<h3>{escape(rows[0].quantity)}</h3>{_table(head, lines)}"


def _claims(claims: list[Record]) -> str:
    count = {s: sum(c.status == s for c in claims) for s in ("passed", "refused", "failed")}
    lines = [
        (
            _cell(claim.notebook),
            _cell(claim.id),
            _number(_shown(claim.value, claim.unit)),
            _cell(_rule(claim)),
            f'<td class="{claim.status}">{claim.status}</td>',
            _code(claim.provenance),
            _cell(claim.reason or ""),
        )
        for claim in claims
    ]
    head = ("notebook", "claim", "measured", "expected", "status", "provenance", "reason")
    words = ", ".join(f"{number} {status}" for status, number in count.items())
    return f"<h2>Claims: {words}</h2>{_table(head, lines)}"


def _rule(claim: Record) -> str:
    name, bound = next(iter(claim.tolerance.items()), ("equals", None))
    expected = _shown(claim.expected, claim.unit)
    return f"{expected} within {bound * 100:g} %" if name == "rel" else f"{RULES[name]} {expected}"


def _shown(value, unit: str) -> str:
    return "" if value is None else shown(value, unit)


def _bar(value: float | None, scale: float, predicted: bool = False) -> str:
    if value is None:
        return ""
    kind = "bar predicted" if predicted else "bar"
    return f'<div class="{kind}" style="width: {abs(value) / scale:.1%}"></div>'


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in lines)
    return f"<table><tr>{top}</tr>{body}</table>"


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _number(text: str) -> str:
    return f'<td class="number">{escape(text)}</td>'


def _code(text: str) -> str:
    return f"<td><code>{escape(text)}</code></td>"

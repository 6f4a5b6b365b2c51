"""What came of one notebook, and the table of all at the end of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from labkit.lab.headless.gate import Gate


@dataclass
class Outcome:
    """One row of the table.

    ``verdict``: passed, failed, interrupted or not run; ``reason``: why it did not pass;
    ``kept``: it passed in an earlier run and nothing has changed since.
    """

    stem: str
    verdict: str = "passed"
    reason: str | None = None
    cells_run: int = 0
    cells: int = 0
    gate: Gate = field(default_factory=Gate)
    seconds: float = 0.0
    kept: bool = False

    def fail(self, reason: str) -> None:
        """Not passed; the first reason stands."""
        self.verdict = "failed"
        self.reason = self.reason or reason


HEADINGS = ("notebook", "verdict", "cells", "passed", "refused", "failed", "missing", "seconds")


def table(outcomes: list[Outcome], of_series: int) -> str:
    """Rows under headings, then refusals and failures with their reasons, then the totals.

    Args:
        of_series: how many notebooks there are, also those that were not chosen.
    """
    rows = [HEADINGS, *(_row(outcome) for outcome in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join(_pad(row, widths)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    for outcome in outcomes:
        for name, reason in outcome.gate.refused.items():
            lines.append(f"refused  {outcome.stem}: {name}: {reason}")
    for outcome in outcomes:
        if outcome.reason:
            lines.append(f"{outcome.verdict}  {outcome.stem}: {outcome.reason}")
    return "\n".join([*lines, totals(outcomes, of_series)])


def totals(outcomes: list[Outcome], of_series: int) -> str:
    """One sentence: notebooks by verdict, which they are where not all ran, claims by status."""
    passed = sum(outcome.verdict == "passed" for outcome in outcomes)
    gates = [outcome.gate for outcome in outcomes]
    which = f"{passed} of {len(outcomes)} notebooks passed"
    if len(outcomes) < of_series:
        chosen = ", ".join(outcome.stem for outcome in outcomes)
        which = f"{passed} of {len(outcomes)} chosen of {of_series} notebooks passed ({chosen})"
    return (
        f"{which}; claims: "
        f"{sum(len(g.passed) for g in gates)} passed, {sum(len(g.refused) for g in gates)} "
        f"refused, {sum(len(g.failed) for g in gates)} failed, "
        f"{sum(len(g.missing) for g in gates)} missing"
    )


def _row(outcome: Outcome) -> tuple[str, ...]:
    gate = outcome.gate
    counts = (len(gate.passed), len(gate.refused), len(gate.failed), len(gate.missing))
    return (
        outcome.stem,
        outcome.verdict + (" (kept)" if outcome.kept else ""),
        f"{outcome.cells_run}/{outcome.cells}",
        *map(str, counts),
        f"{outcome.seconds:.1f}",
    )


def _pad(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [
        text.ljust(width) if column < 2 else text.rjust(width)
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    ]

"""A small table that a notebook shows as HTML and a terminal as text."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Headers and rows of cells; cells are shown by ``str``, and None as null.

    >>> Table(["device", "MiB"], [["rank 0", 12], ["rank 1", 9]])
    device  MiB
    rank 0  12
    rank 1  9

    Raises:
        ValueError: a row has more or fewer cells than there are headers.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.headers):
                raise ValueError(
                    f"row {number} has {len(row)} cells, the table {len(self.headers)} headers"
                )

    def __repr__(self) -> str:
        lines = [[_shown(cell) for cell in row] for row in (self.headers, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{html.escape(h)}</th>" for h in self.headers)
        body = "".join(
            "<tr>"
            + "".join(f"<td style='text-align:left'>{html.escape(_shown(c))}</td>" for c in row)
            + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shown(cell: object) -> str:
    return "null" if cell is None else str(cell)

"""Measurements of a run side by side: 1, 2 and 4 devices, predicted beside measured."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from labkit.lab.results import Record

WORKLOADS = ("training", "inference")
_COUNT = re.compile(r"\b(\d+|one|two|four) (?:device|GPU|rank)s?\b")
_WORDS = {"one": 1, "two": 2, "four": 4}


@dataclass(frozen=True)
class Row:
    """One quantity in one notebook, ``measured`` and ``predicted`` in ``unit``.

    ``variant``: what the name says after its first comma; ``ratio``: measured against one device
    of the same provenance, None where there is none.
    """

    workload: str
    quantity: str
    variant: str
    num_devices: int
    notebook: str
    measured: float | None
    predicted: float | None
    unit: str
    provenance: str
    ratio: float | None = None


def compare(records: Iterable[Record]) -> list[Row]:
    """Every measurement whose name begins with a workload, by workload, quantity and devices.

    ``training tokens/s, naive split`` is the quantity ``tokens/s`` of the workload ``training``.
    The number of devices is the one in the name (``training tokens/s, one device``), else the
    notebook's. The ratio is against one device in the same notebook, else in any.
    """
    rows = [
        _row(record)
        for record in records
        if record.kind == "measurement" and record.id.split(" ")[0] in WORKLOADS
    ]
    rows.sort(key=lambda row: (WORKLOADS.index(row.workload), row.quantity, row.num_devices))
    return [replace(row, ratio=_ratio(row, rows)) for row in rows]


def num_devices(record: Record) -> int:
    """How many devices a measurement is about."""
    named = _COUNT.search(record.id)
    if named:
        return _WORDS.get(named[1]) or int(named[1])
    return record.devices["count"] if record.devices else 1


def _row(record: Record) -> Row:
    workload, _, rest = record.id.partition(" ")
    quantity, _, variant = rest.partition(", ")
    return Row(
        workload,
        quantity,
        variant,
        num_devices(record),
        record.notebook,
        record.value,
        record.expected,
        record.unit,
        record.provenance,
    )


def _ratio(row: Row, rows: list[Row]) -> float | None:
    """Times measured on unlike devices are not divided by each other."""
    key = (row.workload, row.quantity, row.unit, row.provenance)
    ones = [
        other
        for other in rows
        if (other.workload, other.quantity, other.unit, other.provenance) == key
        and other.num_devices == 1
        and other.measured
    ]
    ones.sort(key=lambda other: other.notebook != row.notebook)
    return row.measured / ones[0].measured if ones and row.measured is not None else None

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
    notebook's. The prediction is the one of the same name in the same notebook.
    """
    records = list(records)
    predictions = {(r.notebook, r.id): r.value for r in records if r.kind == "prediction"}
    rows = [
        _row(record, predictions.get((record.notebook, record.id)))
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


def _row(record: Record, predicted: float | None) -> Row:
    workload, _, rest = record.id.partition(" ")
    quantity, _, variant = rest.partition(", ")
    return Row(
        workload,
        quantity,
        variant,
        num_devices(record),
        record.notebook,
        record.value,
        predicted,
        record.unit,
        record.provenance,
    )


def _ratio(row: Row, rows: list[Row]) -> float | None:
    """Times measured on unlike devices are not divided by each other."""
    key = (row.workload, row.quantity, row.unit, row.provenance)
    for other in rows:
        same = (other.workload, other.quantity, other.unit, other.provenance) == key
        if same and other.num_devices == 1 and other.measured and row.measured is not None:
            return row.measured / other.measured
    return None

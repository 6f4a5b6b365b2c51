"""Telemetry as CSV, one figure a line, and as JSON."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path

from labkit.measure.telemetry.metrics import METRICS
from labkit.measure.telemetry.telemetry import Telemetry

COLUMNS = ("time_s", "device", "provenance", "metric", "value", "unit", "reason")


def write_csv(telemetry: Telemetry, path: Path) -> Path:
    """One line for each figure of each look; what was not read has no value but a reason.

    Metrics that no device gave are left out; ``time_s`` counts from the first look.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for sample in telemetry.samples:
            device = telemetry.devices[sample.device]
            for name in telemetry.metrics:
                value = sample.reading.values.get(name)
                reason = "" if value is not None else sample.reading.reasons.get(name, "")
                at_s = f"{sample.time_s - telemetry.start_s:.6f}"
                row = [at_s, device.name, device.provenance, name, value]
                writer.writerow([*row, METRICS[name].unit, reason])
    return path


def write_json(telemetry: Telemetry, path: Path) -> Path:
    """Everything: devices, metrics with their units and meanings, samples, spans; times from 0."""
    zero = telemetry.start_s
    path.write_text(
        json.dumps(
            {
                "schema": 1,
                "devices": [device._asdict() for device in telemetry.devices],
                "metrics": {name: METRICS[name]._asdict() for name in telemetry.metrics},
                "missing": [
                    {
                        name: reason
                        for name in METRICS
                        if (reason := telemetry.reason(device, name)) is not None
                    }
                    for device in range(len(telemetry.devices))
                ],
                "samples": [
                    {"time_s": s.time_s - zero, "device": s.device, "lost": s.reading.lost}
                    | s.reading.values
                    for s in telemetry.samples
                ],
                "spans": [
                    asdict(s) | {"start_s": s.start_s - zero, "end_s": s.end_s - zero}
                    for s in telemetry.spans
                ],
            },
            allow_nan=False,
        ),
        encoding="utf-8",
    )
    return path

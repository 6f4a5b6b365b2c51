"""``python -m labkit gpu-check``: what this project says of itself, tried on real GPUs.

Runs the doctor, telemetry under load, and those notebooks that the machine has enough GPUs for,
within a time limit, and writes one JSON file to bring back. Without a GPU it runs what can be run
and says so.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from labkit.devices.backends import accelerator_kind, backend
from labkit.devices.doctor.doctor import examine, exit_status, report_json
from labkit.devices.inventory import DeviceSet, choose_devices
from labkit.lab import results
from labkit.lab.doctor_table import doctor_table
from labkit.lab.telemetry_views import telemetry_table
from labkit.measure.telemetry.metrics import METRICS
from labkit.measure.telemetry.telemetry import Telemetry, telemetry

FILE_NAME = "gpu-check.json"
# by the GPUs that they need, in order of what to try: the time limit cuts off the end
NOTEBOOKS = {1: ("00", "01", "03"), 2: ("10", "11", "12", "13", "14"), 4: ("23", "20", "21")}
FIRST = NOTEBOOKS[1][0]
LOAD_S = 3.0
ENDING_S, SHORTEST_S = 35.0, 15.0  # how long a stopped notebook may take to end; too short to try
SIZE = {"cpu": 512}  # rows of the matrices; 4096 on an accelerator


def check_gpus(notebooks: Path, build: Path, limit_s: float) -> int:
    """Run everything, print a table for each part, and write ``build/gpu-check.json``.

    Args:
        notebooks: folder of the series.
        build: folder of runs.
        limit_s: of all parts together; what does not fit is left out and named.

    Returns:
        0 when all parts passed on GPUs; 1 when one failed; 2 without a GPU.
    """
    ends_s = time.monotonic() + limit_s
    kind = accelerator_kind()
    count = backend(kind).count() if kind else 0
    devices = choose_devices(kind or "cpu", max(1, count))
    report = {
        "schema": 1,
        "started": results.now_s(),
        "devices": devices.to_json(),
        "versions": results.versions(),
        "git": results.git_state(),
        "torch": {"cuda": torch.version.cuda, "hip": torch.version.hip},
        "parts": [
            _part("doctor", _doctor),
            _part("telemetry", lambda: _telemetry(devices)),
            *_notebook_parts(notebooks, build, kind, count, ends_s),
        ],
    }
    report["verdict"] = _verdict(report["parts"], count)
    report["seconds"] = round(results.now_s() - report["started"], 1)
    build.mkdir(parents=True, exist_ok=True)
    path = build / FILE_NAME
    path.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"\n{report['verdict']}\nbring back: {path}")
    failed = any(part["status"] == "failed" for part in report["parts"])
    return 2 if not count else int(failed)


def _part(name: str, run: Callable[[], tuple[str, object]]) -> dict:
    """One part; it ends with a status and what it found, also when it raises."""
    print(f"\n== {name}", flush=True)
    began_s = time.monotonic()
    try:
        status, found = run()
    except Exception as error:  # the other parts go on: the machine may be hard to come by
        status, found = "failed", f"{type(error).__name__}: {error}"
        print(found)
    seconds = round(time.monotonic() - began_s, 1)
    return {"part": name, "status": status, "seconds": seconds, "found": found}


def _verdict(parts: list[dict], count: int) -> str:
    """In words: what failed, and what was not tried."""
    named = {
        status: ", ".join(part["part"] for part in parts if part["status"] == status)
        for status in ("passed", "failed", "left out")
    }
    if not count:
        words = f"no GPU here, so nothing that needs one was checked: only tried {named['passed']}"
    else:
        words = "failed" if named["failed"] else "passed"
    return "; ".join(
        [words, *(f"{s}: {names}" for s, names in named.items() if names and s != "passed")]
    )


def _doctor() -> tuple[str, object]:
    findings = examine()
    print(doctor_table(findings))
    return ("failed" if exit_status(findings) else "passed"), report_json(findings)


def _telemetry(devices: DeviceSet) -> tuple[str, object]:
    """Watch every device multiply matrices for some seconds."""
    on = [torch.device(devices.kind, d.index) for d in devices.devices]
    size = SIZE.get(devices.kind, 4096)
    matrices = [torch.ones(size, size, device=device) for device in on]
    with telemetry(devices, hz=10, traffic=True) as t:
        until = time.monotonic() + LOAD_S
        while time.monotonic() < until:
            for matrix in matrices:
                matrix @ matrix
            for device in on:
                backend(devices.kind).synchronize([device])
    print(telemetry_table(t))
    found = [_summary(t, device) for device in range(len(t.devices))]
    seen = all(summary["mean"] for summary in found)
    return ("passed" if seen else "failed"), found


def _summary(t: Telemetry, device: int) -> dict:
    missing = {name: t.reason(device, name) for name in METRICS}
    return {
        "device": t.devices[device]._asdict(),
        "samples": len(t.of(device)),
        "mean": {n: m for n in t.metrics if (m := t.mean(device, n)) is not None},
        "peak": {n: m for n in t.metrics if (m := t.peak(device, n)) is not None},
        "missing": {name: reason for name, reason in missing.items() if reason},
    }


def _notebook_parts(
    notebooks: Path, build: Path, kind: str | None, count: int, ends_s: float
) -> list[dict]:
    there = {path.name[:2] for path in notebooks.glob("[0-9]*.ipynb")}
    parts = []
    for needs, names in NOTEBOOKS.items():
        for name in (name for name in names if name in there):
            few = count < needs and name != FIRST  # the first one runs on any machine
            run = partial(_notebook, name, notebooks, build, kind, ends_s)
            parts.append(_part(f"notebook {name}", partial(_too_few, needs, count) if few else run))
    return parts


def _too_few(needs: int, count: int) -> tuple[str, object]:
    reason = f"needs {needs} GPU{'s' * (needs > 1)}, this machine has {count}"
    print(f"left out: {reason}")
    return "left out", reason


def _notebook(
    name: str, notebooks: Path, build: Path, kind: str | None, ends_s: float
) -> tuple[str, object]:
    left_s = ends_s - time.monotonic() - ENDING_S
    if left_s < SHORTEST_S:
        print("left out: the time limit is near")
        return "left out", f"{max(0, left_s):.0f} s were left"
    folder = build / "gpu-check" / name
    shutil.rmtree(folder, ignore_errors=True)  # else it would count as done already
    command = [sys.executable, "-m", "labkit", "execute", "--only", name]
    command += ["--devices", kind or "auto", "--build", str(folder), "--notebooks", str(notebooks)]
    command += ["--notebook-timeout", f"{left_s:.0f}", "--cell-timeout", f"{left_s:.0f}"]
    status = subprocess.run(command, timeout=left_s + ENDING_S).returncode
    records = [r for path in folder.rglob(results.FILE_NAME) for r in results.read(path)]
    shown = [
        {"id": r.id, "kind": r.kind, "value": r.value, "unit": r.unit, "status": r.status}
        | {"reason": r.reason, "provenance": r.provenance}
        for r in records
    ]
    return ("failed" if status else "passed"), shown

"""The results file: one JSON line for each claim, prediction and measurement of a run."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

SCHEMA = 1
KINDS = ("claim", "prediction", "measurement")
STATUSES = ("passed", "failed", "refused", None)
FILE_NAME = "results.jsonl"
_VERSIONS_OF = ("torch", "jupyterlab", "matplotlib", "ipywidgets", "nvitop", "papermill")


@dataclass(frozen=True)
class Record:
    """One line of the results file; the fields are DESIGN's, in the file's order.

    ``value`` and ``expected`` are in ``unit``; ``tolerance`` says how far apart they may be, such
    as ``{"rel": 0.05}``. ``devices`` is a DeviceSet as JSON, ``needs`` a need as JSON or None.
    """

    notebook: str
    id: str
    kind: str
    value: float | str | bool | None
    unit: str = ""
    expected: float | str | bool | None = None
    tolerance: dict[str, Any] = field(default_factory=dict)
    status: str | None = None
    reason: str | None = None
    provenance: str = ""
    devices: dict[str, Any] | None = None
    needs: dict[str, Any] | None = None
    preset: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    git: str | None = None
    started: float = 0.0
    seconds: float = 0.0
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} of record {self.id!r} must be one of {KINDS}")
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status!r} of {self.id!r} must be one of {STATUSES}")


def append(path: Path, record: Record) -> None:
    """Add one line in one write, so that two writers never mix theirs.

    Numbers that JSON lacks (NaN, infinity) are stored as None, with the reason where there is
    none yet.
    """
    fields = asdict(record)
    for name in ("value", "expected"):
        if isinstance(fields[name], float) and not math.isfinite(fields[name]):
            fields["reason"] = fields["reason"] or f"{name} was {fields[name]}"
            fields[name] = None
    line = json.dumps(fields, allow_nan=False, ensure_ascii=False).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Record]:
    """All records of the file, in order; an absent file has none.

    A last line that a kill cut short is left out.

    Raises:
        ValueError: any other line is not a record of this schema; the message names the line.
    """
    if not path.is_file():
        return []
    *lines, last = path.read_text(encoding="utf-8").split("\n")  # a whole file ends with "\n"
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(Record(**json.loads(line)))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(
                f"{path.name} line {number} is no record of schema {SCHEMA}: {error}; "
                "move the file away and run again"
            ) from error
    return records


def replace_all(path: Path, records: list[Record]) -> None:
    """Write the whole file anew; readers see the old or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".partial-{os.getpid()}")
    partial.unlink(missing_ok=True)
    partial.touch()
    for record in records:
        append(partial, record)
    partial.replace(path)


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a result."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS_OF:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@cache
def git_state() -> str | None:
    """Commit of the working tree, with ``+changes`` where it was edited; None outside git."""
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "--short", "HEAD")
        return commit + ("+changes" if _git(here, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.strip()


def now_s() -> float:
    """Seconds since the epoch, rounded to a millisecond, for ``started``."""
    return round(time.time(), 3)

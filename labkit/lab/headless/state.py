"""What a run folder knows of earlier runs: what need not be run again, how long it takes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path

FILE_NAME = "state.json"
PACKAGE = Path(__file__).resolve().parents[2]


class RunState:
    """The file ``state.json`` of a run folder.

    ``finished``: stem -> {"verdict", "fingerprint", "seconds"} of the last execution;
    ``complete``: the last run of the whole series was green, so that the next one starts anew.
    """

    def __init__(self, folder: Path):
        self.path = folder / FILE_NAME
        try:
            data = json.loads(self.path.read_text())
        except (OSError, ValueError):  # the first run; or a file cut by a full disk: start anew
            data = {}
        self.finished: dict[str, dict] = data.get("finished", {})
        self.complete: bool = data.get("complete", False)

    def save(self) -> None:
        partial = self.path.with_suffix(f".{os.getpid()}")
        data = {"complete": self.complete, "finished": self.finished}
        partial.write_text(json.dumps(data, indent=1))
        partial.replace(self.path)

    def passed(self, stem: str, fingerprint: str) -> bool:
        """Whether this very notebook, labkit, parameters and versions have passed before."""
        entry = self.finished.get(stem, {})
        return entry.get("verdict") == "passed" and entry["fingerprint"] == fingerprint

    def seconds(self, stem: str) -> float | None:
        """How long the notebook took the last time that it passed; None if it never did."""
        return self.finished.get(stem, {}).get("seconds")

    def forget(self) -> None:
        """Start anew: nothing counts as passed; the durations stay known."""
        for entry in self.finished.values():
            entry["verdict"] = "earlier run"

    def note(self, stem: str, verdict: str, fingerprint: str, seconds: float) -> None:
        """Remember and save an execution; a failed one keeps the earlier duration."""
        known = seconds if verdict == "passed" else self.seconds(stem)
        self.finished[stem] = {"verdict": verdict, "fingerprint": fingerprint, "seconds": known}
        self.save()


def fingerprint(notebook: bytes) -> str:
    """Digest of what an earlier result rests on: the source, labkit, the installed versions.

    The parameters need not be in it: other ones have another run folder.
    """
    digest = hashlib.sha256(notebook)
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    digest.update(_installed().encode())
    return digest.hexdigest()


@cache
def _installed() -> str:
    packages = sorted(f"{d.name}=={d.version}" for d in metadata.distributions())
    return "\n".join([platform.python_version(), *packages])


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Hold the run folder, so that two commands do not mix their results in it.

    Raises:
        ValueError: another command runs in it.
    """
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another command runs in {folder}; wait for it or stop it") from None
        yield

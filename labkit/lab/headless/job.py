"""What the process that executes one notebook is told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Job:
    """One notebook to run. Paths are absolute.

    ``progress``: file for ``cell/cells``, in a folder for things of this run only; ``mark``: what
    its processes carry in their environment; ``parent``: pid of the process that must stay alive.
    """

    source: str
    target: str
    progress: str
    parameters: dict[str, str]
    cell_timeout_s: float
    notebook_timeout_s: float
    mark: str
    parent: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

"""One notebook of a run: start its process, watch it, end what it left, judge it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

from labkit.lab import results
from labkit.lab.headless import gate, source, truth
from labkit.lab.headless.job import Job
from labkit.lab.headless.outcome import Outcome
from labkit.lab.headless.processes import MARK, Family, describe
from labkit.lab.headless.progress import Progress
from labkit.lab.headless.state import PACKAGE, RunState, fingerprint

if TYPE_CHECKING:
    from labkit.lab.headless.runner import Settings, Stop

POLL_S = 0.1
SAMPLE_EVERY = 10  # polls between two looks at the descendants


class Execution:
    """The notebook at ``path`` under the settings of a run."""

    def __init__(self, path: Path, settings: Settings, state: RunState):
        self.path, self.settings, self.state = path, settings, state
        self.stem = path.stem
        self.target = settings.run / path.name
        self.results = settings.run / results.FILE_NAME
        self.parameters = {
            "PRESET": settings.preset,
            "DEVICES": settings.devices,
            "RUN": str(settings.run),
        }
        self.fingerprint = fingerprint(path.read_bytes())

    def can_be_kept(self) -> bool:
        """Whether it passed before, unchanged since, and what it left still says so."""
        if not self.state.passed(self.stem, self.fingerprint):
            return False
        return self.target.is_file() and self.kept().verdict == "passed"

    def kept(self) -> Outcome:
        """The outcome of the earlier execution, from the files that it left."""
        outcome = Outcome(self.stem, kept=True)
        self._judge(outcome)
        return outcome

    def run(self, progress: Progress, stop: Stop) -> Outcome:
        """Execute and judge; the state file remembers it."""
        outcome = Outcome(self.stem)
        began = time.monotonic()
        progress.start(self.stem)
        self._remove_old()
        notebook = self._read(outcome)
        if notebook is not None:
            self._execute(notebook, outcome, progress, stop)
            self._judge(outcome)
        outcome.seconds = time.monotonic() - began
        if stop.signal:
            outcome.verdict = "interrupted"
        self.state.note(self.stem, outcome.verdict, self.fingerprint, outcome.seconds)
        progress.finish(outcome.verdict, outcome.reason)
        return outcome

    def _remove_old(self) -> None:
        """Only what this run leaves may count."""
        for path in (self.target, self.target.with_suffix(".html")):
            path.unlink(missing_ok=True)
        others = [r for r in results.read(self.results) if r.notebook != self.stem]
        results.replace_all(self.results, others)

    def _read(self, outcome: Outcome) -> nbformat.NotebookNode | None:
        try:
            notebook = nbformat.read(self.path, as_version=4)
        except Exception as error:  # nbformat raises many kinds for what is no notebook
            outcome.fail(f"{self.path.name} is no notebook: {type(error).__name__}: {error}")
            return None
        promised = source.promises(notebook)
        outcome.gate.missing = list(promised.claims)
        if promised.problems:
            outcome.fail("; ".join(promised.problems))
            return None
        return notebook

    def _execute(self, notebook, outcome: Outcome, progress: Progress, stop: Stop) -> None:
        family = Family(uuid.uuid4().hex)
        log = self.target.with_suffix(".log")
        with (
            tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as scratch,
            log.open("w") as errors,
        ):
            job = self._job(notebook, family.mark, Path(scratch))
            process = subprocess.Popen(
                [sys.executable, "-m", "labkit.lab.headless.child", job.to_json()],
                env=_environment(family.mark, Path(scratch)),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
            try:
                problem = self._watch(process, job, family, progress, stop)
                left = describe(family.wait(self.settings.grace_s)) if problem is None else ""
            finally:  # also when the terminal that shows the progress is gone
                family.kill()
                process.wait()
        if problem is None and process.returncode != 0:
            problem = f"its process ended {_how(process.returncode, log)}"
        for name, reason in (("Interrupted", problem), ("ProcessesLeft", left)):
            if reason:
                truth.record_failure_in_file(self.target, notebook, name, reason)

    def _watch(self, process, job, family, progress, stop) -> str | None:
        """Until the process ends by itself (None), or must be ended: why."""
        deadline = time.monotonic() + job.notebook_timeout_s + self.settings.margin_s
        polls = 0
        while process.poll() is None:
            if stop.signal:
                return f"stopped by {signal.Signals(stop.signal).name}"
            if time.monotonic() > deadline:
                return f"its process did not end {self.settings.margin_s:g} s past the deadline"
            if polls % SAMPLE_EVERY == 0:
                family.sample(process.pid)
            polls += 1
            progress.update(_read_text(Path(job.progress)))
            time.sleep(POLL_S)
        return None

    def _job(self, notebook: nbformat.NotebookNode, mark: str, scratch: Path) -> Job:
        own = source.promises(notebook).timeout_s
        return Job(
            source=str(self.path),
            target=str(self.target),
            progress=str(scratch / "progress"),
            parameters=self.parameters,
            cell_timeout_s=self.settings.cell_timeout_s,
            notebook_timeout_s=own or self.settings.notebook_timeout_s,
            mark=mark,
            parent=os.getpid(),
        )

    def _judge(self, outcome: Outcome) -> None:
        """The verdict of the saved notebook, then of the gate."""
        try:
            notebook = nbformat.read(self.target, as_version=4)
            records = [r for r in results.read(self.results) if r.notebook == self.stem]
        except (OSError, ValueError) as error:
            outcome.fail(str(error))
            return
        outcome.cells = len(truth.code_cells(notebook))
        outcome.cells_run = truth.cells_run(notebook)
        outcome.gate = gate.check(source.promises(notebook).claims, records)
        for reason in (truth.failure(notebook), outcome.gate.problem):
            if reason:
                outcome.fail(reason)


def _environment(mark: str, scratch: Path) -> dict[str, str]:
    """For the process of one notebook and all that it starts."""
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),  # the kernel imports this very labkit
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "TQDM_DISABLE": "1",
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_RUNTIME_DIR": str(scratch / "runtime"),  # nothing is left in the home folder
        "IPYTHONDIR": str(scratch / "ipython"),  # and no start-up file of the user changes a result
    }


def _read_text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _how(status: int, log: Path) -> str:
    if status < 0:
        return f"by {signal.Signals(-status).name}"
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"with status {status}: {lines[-1] if lines else 'it said nothing'}"

"""The process that executes one notebook: ``python -m labkit.lab.headless.child JOB``.

It leaves the executed notebook, which says what happened, and its HTML page. It ends itself, the
kernel and everything they started when the process that started it is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError
from papermill.execute import remove_error_markers

from labkit.lab.headless import engine, truth  # noqa: F401  registers the engine
from labkit.lab.headless.html import trust, write_html
from labkit.lab.headless.job import Job
from labkit.lab.headless.processes import Family


def run(job: Job) -> None:
    """Execute the notebook, write the page, sign the notebook."""
    target = Path(job.target)
    _execute(job)
    notebook = nbformat.read(target, as_version=4)
    if truth.failure(notebook) is None:  # papermill marks expected exceptions as errors too
        remove_error_markers(notebook)
        truth.save(notebook, target)
    write_html(notebook, Path(job.source).parent, target.with_suffix(".html"))
    trust(target)


def _execute(job: Job) -> None:
    def on_cell(number: int, total: int) -> None:
        Path(job.progress).write_text(f"{number}/{total}")

    try:
        papermill.execute_notebook(
            job.source,
            job.target,
            parameters=job.parameters,
            engine_name="labkit",
            kernel_name="python3",
            language="python",
            progress_bar=False,
            cwd=Path(job.source).parent,
            execution_timeout=job.cell_timeout_s,
            notebook_timeout=job.notebook_timeout_s,
            on_cell=on_cell,
        )
    except PapermillExecutionError:
        pass  # the executed notebook says so


def watch_parent(job: Job) -> None:
    """End everything of this run as soon as the parent is gone."""
    while os.getppid() == job.parent:
        time.sleep(0.5)
    with truth.LAST_WORD:
        Family(job.mark).kill()
        shutil.rmtree(Path(job.progress).parent, ignore_errors=True)
        source = nbformat.read(job.source, as_version=4)
        truth.record_failure_in_file(
            Path(job.target), source, "Interrupted", "the command that ran the notebooks was killed"
        )
        os._exit(1)


if __name__ == "__main__":
    job = Job(**json.loads(sys.argv[1]))
    threading.Thread(target=watch_parent, args=(job,), daemon=True).start()
    run(job)

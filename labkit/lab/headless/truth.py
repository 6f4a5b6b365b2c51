"""What an executed notebook says about its own run: written down, and read back as a verdict."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import nbformat
from nbformat import NotebookNode

LAST_WORD = threading.RLock()  # a thread that ends the process holds it: no other saves any more
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


def record_failure(notebook: NotebookNode, name: str, message: str) -> None:
    """Mark the cell that was running (or was to be next) as failed, with an error output.

    Args:
        name: kind of failure, such as ``CellTimeoutError``.
        message: what happened, for the reader.
    """
    text = f"{name}: {message}"
    notebook.metadata.setdefault("papermill", {})["exception"] = True
    own = notebook.metadata.setdefault("labkit", {})
    if "failure" in own:  # its cell says the first one
        own["failure"] += f"; {text}"
        return
    own["failure"] = text
    cell = _unfinished_cell(notebook)
    if cell is None:
        return
    cell.metadata.setdefault("papermill", {}).update(status="failed", exception=True)
    if not any(output.output_type == "error" and output.ename == name for output in cell.outputs):
        cell.outputs.append(
            nbformat.v4.new_output("error", ename=name, evalue=message, traceback=[text])
        )


def _unfinished_cell(notebook: NotebookNode) -> NotebookNode | None:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    for wanted in ("failed", "running", "pending", None):
        for cell in cells:
            if cell.metadata.get("papermill", {}).get("status") == wanted:
                return cell
    return None


def record_failure_in_file(path: Path, source: NotebookNode, name: str, message: str) -> None:
    """Write the failure into the executed notebook of a run that could not do so itself.

    Where nothing readable was saved, the source stands in, with no cell run.
    """
    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError):
        notebook = source
    record_failure(notebook, name, message)
    save(notebook, path)


def save(notebook: NotebookNode, path: Path) -> None:
    """Write the notebook so that a kill leaves the old file or the new one, never half of it."""
    with LAST_WORD:
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(nbformat.writes(notebook), encoding="utf-8")
        partial.replace(path)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells that are to run: code, not empty, not tagged ``skip-execution``."""
    return [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code"
        and cell.source.strip()
        and "skip-execution" not in cell.metadata.get("tags", [])
    ]


def cells_run(notebook: NotebookNode) -> int:
    """How many of ``code_cells`` ran to their end."""
    return sum(
        cell.execution_count is not None
        and cell.metadata.get("papermill", {}).get("status") == "completed"
        for cell in code_cells(notebook)
    )


def failure(notebook: NotebookNode) -> str | None:
    """Why this run does not count, in words; None when every cell ran as it should."""
    written = notebook.metadata.get("labkit", {}).get("failure")
    if written:
        return written
    cells = code_cells(notebook)
    for number, cell in enumerate(cells, start=1):
        problem = _cell_failure(cell)
        if problem:
            return f"code cell {number}: {problem}"
    if cells_run(notebook) != len(cells):
        return f"only {cells_run(notebook)} of {len(cells)} code cells ran"
    return _widget_failure(notebook)


def _cell_failure(cell: NotebookNode) -> str | None:
    errors = [output for output in cell.outputs if output.output_type == "error"]
    if "raises-exception" not in cell.metadata.get("tags", []):
        return _error_words(errors[0]) if errors else None
    if cell.execution_count is not None and not errors:
        return "is tagged raises-exception and raised none"
    return None


def _widget_failure(notebook: NotebookNode) -> str | None:
    """An ``Output`` widget swallows the exceptions of its ``with`` block and shows them inside."""
    state = notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    for widget in state.values():
        for output in widget.get("state", {}).get("outputs", ()):
            if output.get("output_type") == "error":
                return f"inside an Output widget: {_error_words(NotebookNode(output))}"
    return None


def _error_words(output: NotebookNode) -> str:
    words = output.evalue.strip().splitlines()
    return f"{output.ename}: {words[0] if words else 'no message'}"

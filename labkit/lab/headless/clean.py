"""Strip what a run left in the notebooks; cell ids, tags and the text stay as they are."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbformat import NotebookNode

RUN_METADATA = ("papermill", "execution", "collapsed", "scrolled", "trusted", "ExecuteTime")
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def strip(notebook: NotebookNode) -> None:
    """Remove outputs, counts and run metadata, in place; the same input gives the same result."""
    for name in ("papermill", "widgets", "signature"):
        notebook.metadata.pop(name, None)
    notebook.metadata.get("labkit", {}).pop("failure", None)
    notebook.metadata["kernelspec"] = dict(KERNELSPEC)
    notebook.metadata["language_info"] = {"name": "python"}  # its version is the last user's
    notebook.cells = [cell for cell in notebook.cells if not _is_injected(cell)]
    for cell in notebook.cells:
        for name in RUN_METADATA:
            cell.metadata.pop(name, None)
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None


def _is_injected(cell: NotebookNode) -> bool:
    return "injected-parameters" in cell.metadata.get("tags", [])


def stripped(text: str) -> str:
    """The notebook ``text`` without what a run left, in nbformat's canonical form."""
    notebook = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
    strip(notebook)
    return nbformat.writes(notebook) + "\n"


def clean_folder(folder: Path) -> list[Path]:
    """Rewrite the notebooks under ``folder`` that need it.

    Returns:
        Those that were rewritten, in order.
    """
    changed = []
    for path in sorted(folder.rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        before = path.read_text(encoding="utf-8")
        after = stripped(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed

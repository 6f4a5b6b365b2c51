import threading

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit.lab.headless import truth


def cell(source, status, count=None, *tags):
    return new_code_cell(
        source,
        execution_count=count,
        metadata={"tags": list(tags), "papermill": {"status": status}},
    )


def test_a_failure_goes_to_the_running_cell_and_later_ones_only_to_the_notebook():
    cells = [new_markdown_cell("text"), cell("1", "completed", 1), cell("2", "running")]
    notebook = new_notebook(cells=[*cells, cell("3", "pending")])
    truth.record_failure(notebook, "DeadKernelError", "gone")
    truth.record_failure(notebook, "ProcessesLeft", "1 left")
    assert truth.failure(notebook) == "DeadKernelError: gone; ProcessesLeft: 1 left"
    assert [c.metadata.papermill.status for c in cells[1:]] == ["completed", "failed"]
    assert [output.evalue for output in cells[2].outputs] == ["gone"]
    assert truth.cells_run(notebook) == 1


def test_a_notebook_in_which_a_cell_did_not_run_fails_even_without_an_error():
    notebook = new_notebook(cells=[cell("1", "completed", 1), cell("2", "pending")])
    assert truth.failure(notebook) == "only 1 of 2 code cells ran"


def test_cells_that_are_empty_or_to_be_skipped_need_not_run():
    skipped = cell("1 / 0", "completed", None, "skip-execution")
    notebook = new_notebook(cells=[cell("1", "completed", 1), cell(" ", "completed"), skipped])
    assert truth.failure(notebook) is None


def test_nothing_is_saved_any_more_once_a_thread_has_the_last_word(tmp_path):
    """A killed command's notebook once said that its kernel died of lack of memory."""
    path = tmp_path / "a.ipynb"
    late = threading.Thread(target=truth.save, args=(new_notebook(), path), daemon=True)
    with truth.LAST_WORD:
        truth.save(new_notebook(metadata={"labkit": {"failure": "the last word"}}), path)
        late.start()
        late.join(timeout=0.3)
        assert nbformat.read(path, as_version=4).metadata.labkit.failure == "the last word"
    late.join()

import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output

from labkit.lab.headless.clean import clean_folder


def executed(path):
    code = new_code_cell("1", id="kept-id", execution_count=3)
    code.outputs = [new_output("stream", text="1")]
    code.metadata = {"tags": ["parameters"], "papermill": {"status": "completed"}}
    injected = new_code_cell("RUN = 'x'", metadata={"tags": ["injected-parameters"]})
    metadata = {"papermill": {}, "widgets": {}, "labkit": {"timeout_s": 60, "failure": "x"}}
    nbformat.write(new_notebook(cells=[code, injected], metadata=metadata), path)


def test_outputs_go_and_ids_tags_and_settings_stay(tmp_path):
    path = tmp_path / "01_a.ipynb"
    executed(path)
    assert clean_folder(tmp_path) == [path]
    notebook = nbformat.read(path, as_version=4)
    [cell] = notebook.cells
    assert (cell.id, cell.source, cell.outputs, cell.execution_count) == ("kept-id", "1", [], None)
    assert cell.metadata == {"tags": ["parameters"]}
    assert notebook.metadata.labkit == {"timeout_s": 60}
    assert set(notebook.metadata) == {"labkit", "kernelspec", "language_info"}


def test_a_clean_notebook_is_left_untouched(tmp_path):
    executed(tmp_path / "01_a.ipynb")
    clean_folder(tmp_path)
    before = (tmp_path / "01_a.ipynb").read_bytes()
    assert clean_folder(tmp_path) == []
    assert (tmp_path / "01_a.ipynb").read_bytes() == before and before.endswith(b"}\n")

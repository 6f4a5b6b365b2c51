import time

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output

from labkit.lab.headless.compact import compact


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def compacted(*outputs, limit=100):
    notebook = new_notebook(cells=[new_code_cell(outputs=list(outputs))])
    compact(notebook, limit)
    return notebook.cells[0].outputs


def test_chunks_of_one_stream_are_joined_and_other_outputs_stay_between_them():
    picture = new_output("display_data", data={"text/plain": "figure"})
    outputs = compacted(
        stream("a"), stream("b\n"), stream("e", "stderr"), stream("c"), picture, stream("d")
    )
    assert [o.get("text", "figure") for o in outputs] == ["ab\n", "e", "c", "figure", "d"]


def test_a_progress_bar_split_over_chunks_keeps_its_last_state():
    assert compacted(stream("10%\r"), stream("20%"), stream("\rdone\n"))[0].text == "done\n"


def test_long_texts_keep_both_ends_in_every_kind_of_output():
    result = new_output("execute_result", data={"text/plain": "x" * 500, "image/png": "p" * 500})
    error = new_output("error", ename="E", evalue="v" * 500, traceback=["t" * 500])
    text, value, failed = compacted(stream("s" * 500), result, error)
    for shown in (text.text, value.data["text/plain"], failed.evalue, failed.traceback[0]):
        assert "400 characters cut" in shown and len(shown) < 150
    assert value.data["image/png"] == "p" * 500


def test_the_time_grows_with_the_size_only():
    """nbclient's coalesce_streams took minutes on one line of 5 MB."""
    chunks = [stream("x" * 5_000_000)]
    chunks += [NotebookNode(chunks[0], text=f"{i}\r") for i in range(100_000)]
    notebook = new_notebook(cells=[NotebookNode(new_code_cell(), outputs=chunks)])
    began = time.process_time()
    compact(notebook)
    assert time.process_time() - began < 5

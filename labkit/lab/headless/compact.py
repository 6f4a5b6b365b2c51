"""Shorten the outputs of an executed notebook, in time linear in their size.

nbclient's ``coalesce_streams`` does the merging with regular expressions and took minutes on one
line of 5 MB.
"""

from __future__ import annotations

from nbformat import NotebookNode

LIMIT = 20_000  # characters kept of one output, half from each end


def compact(notebook: NotebookNode, limit: int = LIMIT) -> None:
    """Merge stream chunks, apply carriage returns, cut long texts; in place."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = merge_streams(cell.outputs)
            for output in cell.outputs:
                _shorten(output, limit)


def merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """One output for each run of stream chunks with the same name."""
    merged: list[NotebookNode] = []
    chunks: list[str] = []
    for output in outputs:
        if output.output_type != "stream":
            merged.append(output)
            continue
        last = merged[-1] if merged else None
        if last is None or last.output_type != "stream" or last.name != output.name:
            merged.append(output)
            chunks = output.text = [output.text]
        else:
            chunks.append(output.text)
    for output in merged:
        if output.output_type == "stream":
            output.text = apply_returns("".join(output.text))
    return merged


def apply_returns(text: str) -> str:
    """What a terminal would still show: a carriage return starts its line again.

    >>> apply_returns("10%\\r20%\\rdone\\nnext\\r\\n")
    'done\\nnext\\n'
    """
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines)


def cut(text: str, limit: int) -> str:
    """Both ends of ``text``, and how much is missing between them.

    >>> cut("abcdefghij", 4)
    'ab\\n... 6 characters cut ...\\nij'
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[-half:]}"


def _shorten(output: NotebookNode, limit: int) -> None:
    if output.output_type == "stream":
        output.text = cut(output.text, limit)
    elif output.output_type == "error":
        output.evalue = cut(output.evalue, limit)
        output.traceback = [cut(line, limit) for line in output.traceback]
    elif "text/plain" in output.data:
        output.data["text/plain"] = cut(output.data["text/plain"], limit)

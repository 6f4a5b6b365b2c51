"""The page of an executed notebook: complete without a network, and in a browser without one."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.lab.headless.html import write_html

NOTEBOOKS = sorted((Path(__file__).parents[3] / "notebooks").glob("[0-9]*.ipynb"))
PIXEL = "iVBORw0KGgo="


class Loads(HTMLParser):
    """What a browser would fetch or run."""

    def __init__(self):
        super().__init__()
        self.fetched, self.scripts = [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "script" and given.get("type", "text/javascript") in (
            "text/javascript",
            "module",
        ):
            self.scripts.append(given)
        if tag in ("script", "img", "link", "iframe"):
            self.fetched += [v for k, v in given.items() if k in ("src", "href")]


def test_a_page_with_table_picture_and_widget_fetches_and_runs_nothing(tmp_path):
    outputs = [
        new_output("display_data", {"text/html": "<table><tr><td>7 GiB</td></tr></table>"}),
        new_output("display_data", {"image/png": PIXEL}),
        new_output(
            "display_data",
            {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "text/plain": "VBox()"},
        ),
    ]
    cells = [new_markdown_cell("bubble = (p - 1) / m"), new_code_cell("1", outputs=outputs)]
    state = {"application/vnd.jupyter.widget-state+json": {"state": {}, "version_major": 2}}
    notebook = new_notebook(cells=cells, metadata={"widgets": state})
    write_html(notebook, tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    loads = Loads()
    loads.feed(page)
    assert loads.scripts == [] and [f[:10] for f in loads.fetched] == ["data:image"]
    assert not re.search(r"@import|url\(\s*[\"']?https?:", page)
    assert "7 GiB" in page and "bubble" in page


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_no_notebook_writes_a_formula_that_only_mathjax_could_show(path):
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert not re.search(r"\$[^$\n]*\\[a-zA-Z]+[^$\n]*\$|\\\(|```mermaid", text)

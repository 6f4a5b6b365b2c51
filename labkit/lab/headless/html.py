"""The executed notebook as one HTML page, and Jupyter's trust in it."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from nbformat.sign import NotebookNotary

# Jupyter's own page loads require.js, MathJax, Mermaid and the renderer of widgets from other
# servers. No notebook here needs them: formulas are text, and beside each widget is its picture.
_LOADS_NOTHING = "{% extends 'lab/index.html.j2' %}" + "".join(
    f"{{% block {name} %}}{{% endblock %}}"
    for name in (
        "html_head_js_requirejs",
        "jupyter_widgets",
        "html_head_js_mathjax",
        "html_head_js_mermaidjs",
    )
)


def write_html(notebook: NotebookNode, folder: Path, target: Path) -> None:
    """Write ``notebook`` as a page that holds its own pictures and loads nothing.

    Args:
        folder: where the notebook's relative links to pictures start.
    """
    exporter = HTMLExporter(template_name="lab", raw_template=_LOADS_NOTHING, embed_images=True)
    page, _ = exporter.from_notebook_node(
        notebook, resources={"metadata": {"name": target.stem, "path": str(folder)}}
    )
    target.write_text(page, encoding="utf-8")


def trust(path: Path) -> None:
    """What ``jupyter trust`` does: without it JupyterLab shows widgets and HTML as plain text."""
    NotebookNotary().sign(nbformat.read(path, as_version=4))

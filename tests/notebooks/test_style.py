"""House rules of the notebooks, checked on their source: no kernel is needed."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit.lab.headless.source import promises

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
MAX_LINES = 20
MAX_IMPORT_LINES = 30  # of a cell that holds nothing else
MAX_CODE_CELLS_IN_A_ROW = 3
PARAMETERS = {"PRESET", "DEVICES", "RUN"}
INSTALLERS = re.compile(r"^\s*%\s*(pip|conda|mamba|micromamba|uv)\b", re.MULTILINE)
NEW_RANKS = re.compile(r"(?<!\w)Ranks\(")
IMPORTS = ast.Import | ast.ImportFrom


def code_cells(notebook: NotebookNode) -> list[tuple[int, NotebookNode]]:
    """(position in the notebook, cell) of each code cell."""
    cells = enumerate(notebook.cells)
    return [(number, cell) for number, cell in cells if cell.cell_type == "code"]


def on_ranks(cell: NotebookNode) -> bool:
    return cell.source.startswith("%%ranks")


def tree_of(cell: NotebookNode) -> ast.Module:
    """The cell as Python; of a cell with a %% magic its body."""
    body = cell.source.partition("\n")[2] if cell.source.startswith("%%") else cell.source
    python = TransformerManager().transform_cell(body)
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compile(python, "cell", "exec", flags)


def top_of(cell: NotebookNode) -> list[ast.stmt]:
    """Its statements; none where it is no Python, which unreadable_cells reports."""
    try:
        return tree_of(cell).body
    except SyntaxError:
        return []


def nodes_of(cell: NotebookNode) -> list[ast.AST]:
    """Every node of its statements."""
    return [node for statement in top_of(cell) for node in ast.walk(statement)]


def committed_outputs(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in code_cells(notebook):
        if cell.outputs or cell.execution_count is not None:
            yield f"cell {number} has outputs or an execution count: make clean-notebooks"


def doubtful_ids(notebook: NotebookNode) -> Iterator[str]:
    ids = Counter(cell.get("id") for cell in notebook.cells)
    if ids[None]:
        yield f"{ids[None]} cells have no id, and would get a new one at each save"
    yield from (f"{count} cells have the id {name}" for name, count in ids.items() if count > 1)


def other_kernels(notebook: NotebookNode) -> Iterator[str]:
    name = notebook.metadata.get("kernelspec", {}).get("name")
    if name != "python3":
        yield f"the kernel is {name}, and must be python3, which every environment has"


def misplaced_parameters(notebook: NotebookNode) -> Iterator[str]:
    cells = [cell for _, cell in code_cells(notebook)]
    tagged = [n for n, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", [])]
    if tagged != [1]:
        yield f"code cells {tagged} are tagged parameters; it must be the second one alone"
        return
    targets = [node.id for node in nodes_of(cells[1]) if isinstance(node, ast.Name)]
    if missing := PARAMETERS - set(targets):
        yield f"the parameters cell does not set {', '.join(sorted(missing))}"


def unreadable_cells(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in code_cells(notebook):
        try:
            tree_of(cell)
        except SyntaxError as error:
            yield f"cell {number} is no Python: {error.msg}"
        if not cell.source.strip():
            yield f"cell {number} is empty"


def scattered_imports(notebook: NotebookNode) -> Iterator[str]:
    """Imports stand in the first cell of the notebook and in the first one of each set of ranks."""
    ranks_are_new = True
    for number, cell in code_cells(notebook)[1:]:
        ranks_are_new |= NEW_RANKS.search(cell.source) is not None
        imports = any(isinstance(node, IMPORTS) for node in nodes_of(cell))
        if imports and not (on_ranks(cell) and ranks_are_new):
            where = "first %%ranks cell" if on_ranks(cell) else "first code cell"
            yield f"cell {number} imports: the place for it is the {where}"
        ranks_are_new &= not on_ranks(cell)


def long_cells(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in code_cells(notebook):
        lines = sum(1 for line in cell.source.splitlines() if line.strip())
        only_imports = all(isinstance(node, IMPORTS) for node in top_of(cell))
        most = MAX_IMPORT_LINES if only_imports else MAX_LINES
        if lines > most:
            yield f"cell {number} has {lines} lines, at most {most}: move code to labkit"


def unexplained_code(notebook: NotebookNode) -> Iterator[str]:
    row = 0
    for number, cell in enumerate(notebook.cells):
        row = row + 1 if cell.cell_type == "code" else 0
        if row == MAX_CODE_CELLS_IN_A_ROW + 1:
            yield f"cell {number} is the fourth code cell in a row: say what it is for"


def installers(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in code_cells(notebook):
        if INSTALLERS.search(cell.source):
            yield f"cell {number} installs packages: that is make setup's part"


def unscored_predictions(notebook: NotebookNode) -> Iterator[str]:
    claims = promises(notebook).claims
    for number, cell in code_cells(notebook):
        for call in (node for node in nodes_of(cell) if is_call_of(node, "predict")):
            name = getattr(call.args[0], "value", None) if call.args else None
            if name not in claims:
                yield f"cell {number} predicts {name!r}, and no claim of that id scores it"


def is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", None) == name


def doubtful_claims(notebook: NotebookNode) -> Iterator[str]:
    """What the gate reads: literal, unique ids, and no shell line, whose failure is lost."""
    found = promises(notebook)
    yield from found.problems
    if not found.claims:
        yield "no claim: the notebook checks nothing that it says"


RULES = [
    committed_outputs,
    doubtful_ids,
    other_kernels,
    misplaced_parameters,
    unreadable_cells,
    scattered_imports,
    long_cells,
    unexplained_code,
    installers,
    unscored_predictions,
    doubtful_claims,
]


def problems(notebook: NotebookNode) -> list[str]:
    """Every broken rule, in words."""
    return [problem for rule in RULES for problem in rule(notebook)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_the_house_rules(path):
    # nbformat.read would give a cell without an id a new one, and hide that it is missing
    assert problems(nbformat.v4.reads(path.read_text(encoding="utf-8"))) == []


def good_notebook() -> NotebookNode:
    """A small notebook that keeps every rule; the tests below break one each."""
    parameters = new_code_cell('PRESET = "tiny"\nDEVICES = "auto"\nRUN = ""')
    parameters.metadata.tags = ["parameters"]
    cells = [
        new_markdown_cell("# A question"),
        new_code_cell("import torch\nfrom labkit import Ranks, claim, predict"),
        parameters,
        new_code_cell('predict("two is two", 2)'),
        new_markdown_cell("The ranks, and a cell for them."),
        new_code_cell("%%ranks --only 0\nimport math\nx = math.pi"),
        new_code_cell("%%ranks\nx"),
        new_code_cell('claim("two is two", measured=2, equals=2)'),
    ]
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernelspec})


def with_source(number: int, source: str) -> NotebookNode:
    notebook = good_notebook()
    notebook.cells[number].source = source
    return notebook


def test_a_notebook_that_keeps_the_rules_has_no_problem():
    assert problems(good_notebook()) == []


@pytest.mark.parametrize(
    "number, source, problem",
    [
        (3, "import math", "cell 3 imports: the place for it is the first code cell"),
        (3, "def f():\n    import math", "cell 3 imports"),
        (6, "%%ranks\nimport math", "cell 6 imports: the place for it is the first %%ranks cell"),
        (3, "\n".join(["x = 1"] * 21), "cell 3 has 21 lines"),
        (1, "\n".join(["import math"] * 31), "cell 1 has 31 lines"),
        (3, "x = (", "cell 3 is no Python"),
        (6, "%%ranks\nx = (", "cell 6 is no Python"),
        (3, " ", "cell 3 is empty"),
        (3, "!ls", "exit status of a shell line is lost"),
        (3, "files = !ls", "exit status of a shell line is lost"),
        (3, "%pip install numpy", "cell 3 installs packages"),
        (3, 'predict("three", 3)', "no claim of that id scores it"),
        (3, 'claim("two is two", measured=2, equals=2)', "used twice"),
        (3, 'claim(f"{1}", measured=2, equals=2)', "literal string"),
        (7, "x = 1", "no claim: the notebook checks nothing"),
        (2, 'PRESET = "tiny"', "does not set DEVICES, RUN"),
    ],
)
def test_a_cell_that_breaks_a_rule_is_named(number, source, problem):
    assert problem in " | ".join(problems(with_source(number, source)))


def test_committed_outputs_and_execution_counts_are_found():
    counted, printed = good_notebook(), good_notebook()
    counted.cells[3].execution_count = 1
    printed.cells[3].outputs = [nbformat.v4.new_output("stream", text="2")]
    for notebook in (counted, printed):
        assert problems(notebook) == [
            "cell 3 has outputs or an execution count: make clean-notebooks"
        ]


def test_a_missing_and_a_repeated_cell_id_are_found():
    notebook = good_notebook()
    del notebook.cells[0]["id"]
    notebook.cells[3].id = notebook.cells[1].id
    assert [problem.split()[:3] for problem in problems(notebook)] == [
        ["1", "cells", "have"],
        ["2", "cells", "have"],
    ]


def test_another_kernel_is_found():
    notebook = good_notebook()
    notebook.metadata.kernelspec.name = "my-lab"
    assert problems(notebook) == [
        "the kernel is my-lab, and must be python3, which every environment has"
    ]


def test_parameters_anywhere_but_in_the_second_code_cell_are_found():
    notebook = good_notebook()
    notebook.cells[2].metadata.tags, notebook.cells[3].metadata.tags = [], ["parameters"]
    assert any("must be the second one alone" in problem for problem in problems(notebook))


def test_a_fourth_code_cell_in_a_row_is_found():
    notebook = good_notebook()
    del notebook.cells[4]
    assert any("fourth code cell in a row" in problem for problem in problems(notebook))

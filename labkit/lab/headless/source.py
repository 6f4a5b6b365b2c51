"""What a notebook's source promises: its claims' ids; and what no headless run can check."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

# Cell magics whose body runs as Python in the notebook; other magics' bodies are not looked into.
PYTHON_MAGICS = ("capture", "prun", "time")
SHELL_CALLS = ("system", "getoutput")  # what IPython makes of !command and name = !command
SHELL_MAGICS = ("!", "sx", "system")  # unlike %%bash, they hide a failure


@dataclass
class Promises:
    """What ``promises`` finds.

    ``claims``: id -> whether it names ``needs=``; ``timeout_s``: the notebook's own time limit,
    None for the default; ``problems``: sentences, empty when none.
    """

    claims: dict[str, bool] = field(default_factory=dict)
    timeout_s: float | None = None
    problems: list[str] = field(default_factory=list)


def promises(notebook: NotebookNode) -> Promises:
    """Read the code cells of ``notebook`` without running them."""
    found = Promises()
    number = 0
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source.strip():
            number += 1
            where = f"code cell {number}"
            _read(cell.source, where, found, on_ranks=False)
            for tag in cell.metadata.get("tags", []):
                if tag.startswith("timeout="):
                    _seconds(tag.removeprefix("timeout="), f"{where}: tag {tag!r}", found)
    if not any("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells):
        found.problems.append(
            "no cell is tagged 'parameters': PRESET, DEVICES and RUN have no place"
        )
    own = notebook.metadata.get("labkit", {}).get("timeout_s")
    if own is not None:
        found.timeout_s = _seconds(own, f"metadata labkit.timeout_s={own!r}", found)
    return found


def _seconds(value: object, where: str, found: Promises) -> float | None:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if seconds > 0:
        return seconds
    found.problems.append(f"{where} must be a number of seconds above 0")
    return None


def _read(source: str, where: str, found: Promises, on_ranks: bool) -> None:
    for call in _calls(source):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else _id(call.func)
        if name == "claim":
            _read_claim(call, where, found, on_ranks)
        elif _is_ipython(call.func):
            _read_ipython(name, call, where, found, on_ranks)


def _read_ipython(name: str, call: ast.Call, where: str, found: Promises, on_ranks: bool) -> None:
    """A line that IPython rewrote: a shell command, a line magic or a cell magic."""
    first = _text(call)
    if name in SHELL_CALLS or (name.startswith("run_") and first in SHELL_MAGICS):
        found.problems.append(
            f"{where}: !{first}: the exit status of a shell line is lost in a headless run; "
            "use subprocess.run([...], check=True)"
        )
    elif name == "run_cell_magic" and first in (*PYTHON_MAGICS, "ranks"):
        body = call.args[2].value
        _read(body, where, found, on_ranks or first == "ranks")


def _read_claim(call: ast.Call, where: str, found: Promises, on_ranks: bool) -> None:
    name = _text(call)
    if on_ranks:
        found.problems.append(
            f"{where}: claim({name!r}) runs on the ranks; pull the number and claim in the notebook"
        )
    elif name is None:
        found.problems.append(f"{where}: a claim's id must be a literal string, its first argument")
    elif name in found.claims:
        found.problems.append(f"{where}: claim id {name!r} is used twice; each needs its own")
    else:
        found.claims[name] = any(keyword.arg == "needs" for keyword in call.keywords)


def _calls(source: str) -> Iterator[ast.Call]:
    """Calls in the order of the text; none where the cell is no Python (running it will tell)."""
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes are the author's
            tree = ast.parse(TransformerManager().transform_cell(source))
    except SyntaxError:
        return iter(())
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return iter(sorted(calls, key=lambda node: (node.lineno, node.col_offset)))


def _is_ipython(function: ast.expr) -> bool:
    value = getattr(function, "value", None)
    return isinstance(value, ast.Call) and _id(value.func) == "get_ipython"


def _id(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _text(call: ast.Call) -> str | None:
    first = call.args[0] if call.args else None
    literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return first.value if literal else None

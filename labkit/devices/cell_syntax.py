"""Checks in the notebook that a cell compiles, before any rank has run a part of it."""

from __future__ import annotations

import ast
import traceback

from IPython.core.inputtransformer2 import TransformerManager


class CellSyntaxError(SyntaxError):
    """Shown by its place in the cell, without the stack of the code that looked."""

    def _render_traceback_(self) -> list[str]:
        return "".join(traceback.format_exception_only(SyntaxError(*self.args))).splitlines()


def check_syntax(code: str) -> None:
    """Compile a cell as IPython would: magics and top-level ``await`` are allowed.

    Raises:
        CellSyntaxError: it does not compile. Reported once, and the process group stays as it is.
    """
    python = TransformerManager().transform_cell(code)
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        compile(python, "<%%ranks cell>", "exec", flags=flags)
    except SyntaxError as error:
        raise CellSyntaxError(*error.args) from None

"""Checks in the notebook that a cell compiles, before any rank has run a part of it."""

from __future__ import annotations

import ast
import traceback

from IPython.core.inputtransformer2 import TransformerManager

from labkit.devices.ranks.rank_errors import RanksUseError


def check_syntax(code: str) -> None:
    """Compile a cell as IPython would: magics and top-level ``await`` are allowed.

    Raises:
        RanksUseError: it does not compile. Said once, and the process group stays as it is.
    """
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        python = TransformerManager().transform_cell(code)
        compile(python, "this cell", "exec", flags=flags)
    except SyntaxError as error:
        # not raised as it is: IPython shows a SyntaxError with the stack of whoever found it
        place = "".join(traceback.format_exception_only(error))
        raise RanksUseError(f"no rank ran the cell, for it does not compile\n{place}") from None

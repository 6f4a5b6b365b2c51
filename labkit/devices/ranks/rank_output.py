"""Shows in the notebook what the ranks print and display, each with its rank in front."""

from __future__ import annotations

import sys
from collections.abc import Collection

from IPython import get_ipython
from IPython.display import publish_display_data

# A widget lives in the kernel that made it, and a rank's kernel has no page to show it on.
WIDGET = "application/vnd.jupyter.widget-view+json"
NO_WIDGET = "(a widget, which only the notebook's own kernel can show)"


class RankOutput:
    """Writes whole lines as they arrive: ``[1] loss 2.31``.

    A progress bar redraws its line by carriage returns; only what it showed last is written, so
    an executed notebook holds one line of it.

    Args:
        show: the ranks whose output appears; None for all.
    """

    def __init__(self, show: Collection[int] | None = None) -> None:
        self._show = show
        self._unfinished: dict[tuple[int, str], str] = {}

    def take(self, rank: int, kind: str, content: dict) -> None:
        """Show one Jupyter message of a rank; kinds that have no place here are dropped."""
        if self._show is not None and rank not in self._show:
            return
        if kind == "stream":
            self._write(rank, content["name"], content["text"])
        elif kind in ("display_data", "execute_result", "update_display_data"):
            self._display(rank, content, update=kind == "update_display_data")

    def end(self) -> None:
        """Write the lines that lack their newline."""
        for (rank, name), text in self._unfinished.items():
            if line := _last_drawn(text):
                _stream(name).write(_marked(rank, line))
        self._unfinished.clear()
        sys.stdout.flush()
        sys.stderr.flush()

    def _write(self, rank: int, name: str, text: str) -> None:
        *lines, rest = (self._unfinished.pop((rank, name), "") + text).split("\n")
        if rest:
            self._unfinished[rank, name] = rest[rest.rstrip("\r").rfind("\r") + 1 :]
        if lines:
            whole = "".join(_marked(rank, _last_drawn(line)) for line in lines)
            _stream(name).write(whole)
            _stream(name).flush()

    def _display(self, rank: int, content: dict, update: bool) -> None:
        data = {"text/plain": NO_WIDGET} if WIDGET in content["data"] else content["data"]
        if get_ipython() is None or set(data) <= {"text/plain"}:
            self._write(rank, "stdout", f"{data.get('text/plain', '')}\n")
            return
        # a handle that a rank made up must not update another rank's picture
        handle = content.get("transient", {}).get("display_id")
        transient = {"display_id": f"rank{rank}-{handle}"} if handle else None
        if not update:
            self._write(rank, "stdout", "\n")
        publish_display_data(
            data, content.get("metadata"), transient=transient, update=update and bool(handle)
        )


def _marked(rank: int, line: str) -> str:
    return f"[{rank}] {line}\n" if line else f"[{rank}]\n"


def _last_drawn(line: str) -> str:
    r"""
    >>> _last_drawn("10%\r50%\r100%\r")
    '100%'
    """
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def _stream(name: str):
    return sys.stderr if name == "stderr" else sys.stdout

"""Runs inside a rank: keeps a record of what it is doing, for the report after a failure.

A process that gets SIGKILL cannot say a last word. So a thread looks at the main thread's Python
stack ten times a second while a cell runs (some 20 microseconds a look) and leaves one line in a
file that the notebook reads. For crashes that Python notices (SIGSEGV, SIGABRT, ...)
``faulthandler`` writes the exact stack at that moment beside it.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

RECORD_BYTES = 400
LOOKS_PER_S = 10


class OperationRecord:
    """One line in ``path`` on what this process does; its crashes go to ``path`` + ``.crash``."""

    def __init__(self, shell, path: Path) -> None:
        faulthandler.enable(open(f"{path}.crash", "w"))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._running = threading.Event()
        shell.events.register("pre_run_cell", self._begin)
        shell.events.register("post_run_cell", self._end)
        threading.Thread(target=self._look, daemon=True, name="labkit-operation").start()

    def _write(self, text: str) -> None:
        # one write of constant length: a reader never sees half of one and half of another
        os.pwrite(self._file, text.encode()[:RECORD_BYTES].ljust(RECORD_BYTES), 0)

    def _begin(self, info) -> None:
        lines = [line.strip() for line in info.raw_cell.splitlines() if line.strip()]
        self._write(f"the cell that begins with: {lines[0]}" if lines else "")
        self._running.set()

    def _end(self, result) -> None:
        self._running.clear()
        error = result.error_in_exec if result else None
        stack = list(traceback.walk_tb(error.__traceback__)) if error else []
        self._write(place(_named(reversed(stack))))

    def _look(self) -> None:
        main = threading.main_thread().ident
        while self._running.wait():
            time.sleep(1 / LOOKS_PER_S)
            where = place(_named(traceback.walk_stack(sys._current_frames()[main])))
            if where and self._running.is_set():
                self._write(where)


def _named(stack: Iterable[tuple]) -> Iterable[tuple[str, int, str]]:
    return ((f.f_code.co_filename, line, f.f_code.co_name) for f, line in stack)


def is_cell(file: str) -> bool:
    """Whether a source file is a notebook cell, by the name that ipykernel gives it."""
    return re.search(r"ipykernel_\d+/\d+\.py$", file) is not None


def place(stack: Iterable[tuple[str, int, str]]) -> str:
    """One line about a stack: the collective, if it is in one, and the line of the cell.

    Args:
        stack: file, line and function, the innermost first.

    >>> place([("/l/distributed_c10d.py", 9, "all_reduce"), ("/tmp/ipykernel_7/42.py", 2, "f")])
    'all_reduce, line 2 of its cell'
    """
    operation = ""
    for file, line, function in stack:
        if is_cell(file):
            source = linecache.getline(file, line).strip()
            return f"{operation}line {line} of its cell" + f": {source}" * bool(source)
        if file.endswith("distributed_c10d.py") and not function.startswith("_"):
            operation = f"{function}, "
    return ""


def crash_place(dump: str) -> str:
    """``place`` of the main thread in what faulthandler wrote about all threads.

    >>> crash_place('Current thread 0x1:\\n  <no Python frame>\\n\\nThread 0x2:\\n'
    ...             '  File "/l/distributed_c10d.py", line 9 in all_reduce\\n'
    ...             '  File "/tmp/ipykernel_7/42.py", line 2 in <module>')
    'all_reduce, line 2 of its cell'
    """
    for thread in dump.split("\n\n"):
        frames = re.findall(r'  File "(.+)", line (\d+) in (.+)', thread)
        if where := place((file, int(line), function) for file, line, function in frames):
            return where
    return ""

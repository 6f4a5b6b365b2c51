"""Ranks of a real notebook kernel: what arrives on the page, and what ends with the kernel."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time

import psutil
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import KernelManager


class ThisPython(KernelSpecManager):
    """The kernel of the Python that runs the tests, whatever is installed under python3."""

    def get_kernel_spec(self, kernel_name):
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name=kernel_name, language="python")


class Notebook:
    """A notebook kernel that runs cells and hands out what they put on the page."""

    def __init__(self):
        self.manager = KernelManager(kernel_name="test", kernel_spec_manager=ThisPython())
        environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        self.manager.start_kernel(env=environment)
        self._connect()

    def _connect(self):
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=90)

    def run(self, code, stop_after_s=None):
        """Outputs of a cell as (type, content) pairs."""
        if stop_after_s is not None:
            threading.Timer(stop_after_s, self.manager.interrupt_kernel).start()
        request = self.client.execute(code)
        outputs = []
        while True:
            message = self.client.get_iopub_msg(timeout=90)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return outputs
            outputs.append((kind, content))

    def start_ranks(self):
        self.run("from labkit import Ranks\nfrom labkit.devices.inventory import choose_devices")
        self.run("ranks = Ranks(2, choose_devices('cpu', 2), threads=1)")
        shown = text(self.run("print(ranks.pids, ranks.connection_files[0])"))
        *pids, self.folder = re.match(r"\[(\d+), (\d+)\] (.*)/rank0.json", shown).groups()
        return [int(pid) for pid in pids]

    def restart(self):
        self.client.stop_channels()
        self.manager.restart_kernel()
        self._connect()

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook():
    started = Notebook()
    yield started
    started.close()


def text(outputs):
    return "".join(content["text"] for kind, content in outputs if kind == "stream")


def error(outputs):
    return "\n".join("\n".join(c["traceback"]) for kind, c in outputs if kind == "error")


def left_after(limit_s, pids, folder=None):
    """What of these processes and of this folder is still there after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while True:
        left = [pid for pid in pids if runs(pid)]
        if folder and os.path.exists(folder):
            left.append(folder)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_notebook_drives_its_ranks_by_the_magic(notebook):
    pids = notebook.start_ranks()
    page = notebook.run("%%ranks\nimport matplotlib.pyplot as plt\nplt.plot([rank, 1])\nplt.show()")
    figures = [c for kind, c in page if kind == "display_data"]
    assert [sorted(figure["data"]) for figure in figures] == [["image/png", "text/plain"]] * 2
    assert sorted(text(page).split()) == ["[0]", "[1]"]

    page = notebook.run("%%ranks --only 1\nfrom IPython.display import HTML\nHTML('<b>bold</b>')")
    assert [c["data"]["text/html"] for k, c in page if k == "display_data"] == ["<b>bold</b>"]

    page = notebook.run("%%ranks --only 0\nimport ipywidgets\nipywidgets.IntSlider()")
    assert "a widget, which only the notebook's own kernel can show" in text(page)

    page = notebook.run("%%ranks --show 1\nprint('hello')\nrank")
    assert text(page) == "[1] hello\n[1] 1\n"

    assert "unrecognized arguments: --onyl 1" in error(notebook.run("%%ranks --onyl 1\n1"))
    assert "'a' is not a list of ranks" in error(notebook.run("%%ranks --only a\n1"))

    page = notebook.run("%%ranks\ndist.recv(torch.zeros(1), 1 - rank)", stop_after_s=1)
    assert "KeyboardInterrupt: stopped\nrank 0 was interrupted, while in" in error(page)

    page = notebook.run("import asyncio\nawait asyncio.sleep(0)\nranks.pull('world_size')")
    assert [c["data"]["text/plain"] for k, c in page if k == "execute_result"] == ["{0: 2, 1: 2}"]

    page = notebook.run("%%ranks\nif rank == 1: raise ValueError('mine')\ndist.barrier()")
    assert error(page).startswith("RankError: rank 1 failed first: ValueError: mine")
    assert "labkit" not in error(page), "the stack of our own code is no help to a reader"

    # running the cell that made them again ends the first ones
    again = notebook.start_ranks()
    assert left_after(10, pids) == [] and all(runs(pid) for pid in again)
    notebook.run("ranks.shutdown()")
    assert "no ranks are alive; run first: ranks = Ranks(2)" in error(notebook.run("%%ranks\n1"))


def test_no_rank_outlives_its_notebook_and_two_notebooks_do_not_meet(notebook):
    other = Notebook()
    try:
        mine, theirs = notebook.start_ranks(), other.start_ranks()
        for each, value in ((notebook, 1), (other, 10)):
            each.run(f"%%ranks\nx = torch.ones(1) * {value}\ndist.all_reduce(x)")
        for each, total in ((notebook, "[2.0]"), (other, "[20.0]")):
            assert total in text(each.run("print(ranks.pull('x.tolist()', only=[0])[0])"))

        # SIGKILL, as papermill's time limit does it, while the ranks are stuck in a collective
        notebook.client.execute("%%ranks\ndist.recv(torch.zeros(1), 1 - rank)")
        time.sleep(1)
        os.kill(notebook.manager.provisioner.pid, signal.SIGKILL)
        assert left_after(10, mine, notebook.folder) == []
        assert all(runs(pid) for pid in theirs)
        assert "[1] 1" in text(other.run("%%ranks\nrank"))

        other.restart()
        assert left_after(10, theirs, other.folder) == []
        more = other.start_ranks()
        other.client.shutdown()
        assert left_after(10, more, other.folder) == []
    finally:
        other.close()

"""A series of notebooks made by the test, run by the real executor with real kernels."""

import io
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

import labkit
from labkit.lab.headless import state
from labkit.lab.headless.runner import Settings, execute

PARAMETERS = 'PRESET = "tiny"\nDEVICES = "auto"\nRUN = ""'
PACKAGE = Path(labkit.__file__).parent


def cell(source, *tags):
    """A code cell; tests put plain strings where no tag is needed."""
    return new_code_cell(source, metadata={"tags": list(tags)})


class Series:
    """Notebooks in ``notebooks/`` and runs in ``build/`` of a folder, all processes countable."""

    run_name = "tiny-auto"

    def __init__(self, folder: Path, root: Path):
        self.root = root
        self.notebooks, self.build = folder / "notebooks", folder / "build"
        self.notebooks.mkdir()
        self.run_folder = self.build / self.run_name
        self.token = uuid.uuid4().hex

    def add(self, name, *cells, parameters=True, **metadata):
        first = [cell("import os, signal, subprocess, sys, time")]
        if parameters:
            first.append(cell(PARAMETERS, "parameters"))
        cells = [c if isinstance(c, dict) else new_code_cell(c) for c in cells]
        nbformat.write(
            new_notebook(cells=first + cells, metadata=metadata), self.notebooks / f"{name}.ipynb"
        )

    def execute(self, **settings):
        """Run in this process: exit status and what was printed."""
        out = io.StringIO()
        settings = {"grace_s": 1.0, "margin_s": 5.0, **settings}
        os.environ["LABKIT_TEST"] = self.token
        try:
            return execute(Settings(self.notebooks, self.build, **settings), out), out.getvalue()
        finally:
            del os.environ["LABKIT_TEST"]

    def start(self, *options, command=()):
        """Run as a reader does, in a process group of its own, as a terminal gives a command."""
        labkit = [sys.executable, "-m", "labkit", "execute", "--notebooks", str(self.notebooks)]
        return subprocess.Popen(
            [*command, *labkit, "--build", str(self.build), *options],
            cwd=self.root,
            env={**os.environ, "LABKIT_TEST": self.token},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    def processes(self):
        """All processes that a run of this series started and that live."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("LABKIT_TEST") == self.token:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def wait_until_gone(self, seconds):
        """The processes left after at most ``seconds``."""
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def executed(self, name):
        return nbformat.read(self.run_folder / f"{name}.ipynb", as_version=4)


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """A copy of labkit, so that edits while the tests run do not count as changes."""
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(PACKAGE, root / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.fixture
def series(tmp_path, root, monkeypatch):
    monkeypatch.setattr(state, "PACKAGE", root / "labkit")
    return Series(tmp_path, root)


@pytest.fixture(scope="session")
def make_series(root):
    return lambda folder: Series(folder, root)


@pytest.fixture(autouse=True, scope="session")
def jupyter_data(tmp_path_factory):
    """Signatures go to a folder of the tests."""
    os.environ["JUPYTER_DATA_DIR"] = str(tmp_path_factory.mktemp("jupyter"))
    yield
    del os.environ["JUPYTER_DATA_DIR"]

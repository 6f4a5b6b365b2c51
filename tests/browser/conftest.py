"""A JupyterLab server of its own, and a page of Chromium that shows one of its notebooks."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
START_LIMIT_S = 90
# No sandbox: Chromium refuses to run as root with one, and it only sees this test's own server.
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
]
SERVER_OPTIONS = [
    "--no-browser",
    "--allow-root",
    "--ServerApp.ip=127.0.0.1",
    "--ServerApp.port_retries=0",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.expose_app_in_browser=True",
]


@dataclass(frozen=True)
class Server:
    """A running JupyterLab: where it is, the folder it shows, and its process."""

    address: str
    token: str
    folder: Path
    process: psutil.Process

    def url(self, notebook: str) -> str:
        return f"{self.address}/lab/tree/{notebook}?reset&token={self.token}"

    def kernels_and_ranks(self) -> list[psutil.Process]:
        return self.process.children(recursive=True)


@dataclass(frozen=True)
class OpenNotebook:
    """A notebook that JupyterLab shows, with its kernel idle."""

    page: Page

    def command(self, name: str) -> None:
        """Start a JupyterLab command without waiting: run-all ends when the last cell does."""
        self.page.evaluate(f"() => {{ window.jupyterapp.commands.execute({name!r}) }}")

    def select(self, cell: int) -> None:
        self.page.evaluate(f"() => {{ {CONTENT}.activeCellIndex = {cell} }}")

    def text(self, cell: int) -> str:
        """What the outputs of a cell say, errors included; pictures as <image/png>."""
        return self.page.evaluate(TEXT_OF_CELL, cell)

    def runs(self, cell: int) -> bool:
        return self.page.evaluate(f"n => {CELL}.executionState === 'running'", cell)

    def done(self, cell: int) -> bool:
        """Whether the cell has been run to its end."""
        counted = self.page.evaluate(f"n => {CELL}.executionCount !== null", cell)
        return counted and not self.runs(cell)

    def errors(self, cell: int) -> list[str]:
        """The names of the errors among its outputs."""
        outputs = f"{CELL}.outputs.toJSON()"
        return self.page.evaluate(
            f"n => {outputs}.filter(o => o.output_type === 'error').map(o => o.ename)", cell
        )

    def wait_for_text(self, cell: int, *texts: str, limit_s: float) -> None:
        self.wait_until(lambda: all(t in self.text(cell) for t in texts), limit_s)

    def wait_until_done(self, cell: int, limit_s: float) -> None:
        self.wait_until(lambda: not self.runs(cell), limit_s)

    def wait_until(self, holds: Callable[[], bool], limit_s: float) -> None:
        """Wait until ``holds()``; on a time-out fail with what the cells say instead."""
        deadline = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > deadline:
                self.screenshot("failed")
                count = self.page.evaluate(f"() => {CONTENT}.model.cells.length")
                pytest.fail(f"not after {limit_s} s: {[self.text(n) for n in range(count)]}")
            self.page.wait_for_timeout(100)

    def press_stop(self) -> None:
        self.page.locator('[data-command="notebook:interrupt-kernel"]').first.click()

    def shut_down_kernel(self) -> None:
        self.page.evaluate(f"() => {WIDGET}.sessionContext.shutdown()")

    def screenshot(self, name: str) -> None:
        folder = ROOT / "build" / "browser"
        folder.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=folder / f"{name}.png")


WIDGET = "window.jupyterapp.shell.currentWidget"
CONTENT = WIDGET + ".content"
CELL = CONTENT + ".model.cells.get(n)"
KERNEL_IS_IDLE = (
    "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status"
    " === 'idle'"
)
# The model has every output; the page draws only the cells in view.
TEXT_OF_CELL = (
    "n => {"
    f"  const outputs = {CELL}.outputs.toJSON();"
    "  const show = o => [].concat("
    "    o.text ?? [], o.ename ?? [], o.evalue ?? [], o.traceback ?? [],"
    "    o.data?.['text/plain'] ?? [], o.data?.['image/png'] ? '<image/png>' : []).join('');"
    "  return outputs.map(show).join('\\n');"
    "}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """JupyterLab on a free port of this machine alone, with no settings but its own."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium, such as Debian's package of that name")
    folder = tmp_path_factory.mktemp("notebooks")
    private = tmp_path_factory.mktemp("jupyter")
    ask_for_no_news(private / "SETTINGS_DIR")
    port, token = free_port(), secrets.token_hex(16)
    options = [f"--ServerApp.port={port}", f"--ServerApp.root_dir={folder}"]
    with (private / "log").open("w") as log:
        process = psutil.Popen(
            [sys.executable, "-m", "jupyterlab", *SERVER_OPTIONS, *options],
            env=server_environment(private, token),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for_server(address, process, private / "log")
        yield Server(address, token, folder, process)
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask_for_no_news(settings: Path) -> None:
    """Keep JupyterLab's question about news out of the pictures."""
    file = settings / "@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    file.parent.mkdir(parents=True)
    file.write_text('{"fetchNews": "false"}')


def server_environment(private: Path, token: str) -> dict[str, str]:
    """The environment without the reader's Jupyter settings, and with this checkout's labkit."""
    names = ["CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"]
    folders = {f"JUPYTER_{name}": str(private / name) for name in names}
    lab_names = ["SETTINGS_DIR", "WORKSPACES_DIR"]
    folders |= {f"JUPYTERLAB_{name}": str(private / name) for name in lab_names}
    kernels = {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONPATH": str(ROOT), "JUPYTER_TOKEN": token}
    return os.environ | folders | kernels


def wait_for_server(address: str, process: psutil.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/api", timeout=2)
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start in {START_LIMIT_S} s:\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    """One page of a Chromium with a profile of its own.

    Playwright keeps an event loop running as long as it lives: no longer than its own tests, or
    asyncio.run fails in the others.
    """
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("chromium"),
            executable_path=CHROMIUM,
            viewport={"width": 1280, "height": 1300},
            args=CHROMIUM_FLAGS,
        )
        yield context.pages[0]
        context.close()


@pytest.fixture
def open_notebook(server, page):
    """A function that opens a notebook of the server's folder and waits for its kernel."""

    def open_it(name: str) -> OpenNotebook:
        page.goto(server.url(name), wait_until="domcontentloaded", timeout=START_LIMIT_S * 1000)
        page.wait_for_selector(".jp-NotebookPanel .jp-Notebook", timeout=START_LIMIT_S * 1000)
        page.wait_for_function(KERNEL_IS_IDLE, timeout=START_LIMIT_S * 1000)
        return OpenNotebook(page)

    return open_it

"""The live view as a reader meets it: it follows ranks that work, and its button stops it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = pytest.mark.browser

SHOW, WORK, AGAIN = range(3)
CELLS = [
    "from labkit import Ranks\n"
    "from labkit.devices.inventory import choose_devices\n"
    "from labkit.lab.live_view import LiveView\n"
    'devices = choose_devices("cpu", 2)\n'
    "ranks = Ranks(2, devices)\n"
    "view = LiveView(devices, pids=ranks.pids, seconds=10)\n"
    "view.show()",
    "%%ranks\n"
    "import time\n"
    "until = time.time() + 20\n"
    "while time.time() < until:\n"
    "    if rank == 0:\n"
    "        torch.ones(300, 300) @ torch.ones(300, 300)\n"
    "    else:\n"
    "        time.sleep(0.1)",
    "import time\nview.show()\ntime.sleep(3)\nview.stop()",
]


def write_notebook(path: Path) -> None:
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [new_code_cell(source) for source in CELLS]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), path)


def test_the_view_follows_busy_ranks_and_its_button_stops_it_while_they_work(server, open_notebook):
    write_notebook(server.folder / "live.ipynb")
    notebook = open_notebook("live.ipynb")
    button = notebook.page.locator("button:has-text('Stop')").first
    images = "Array.from(document.querySelectorAll('img.widget-image')).map(i => i.src)"

    for cell in (SHOW, WORK):
        notebook.select(cell)
        notebook.command("notebook:run-cell")
        if cell == SHOW:
            notebook.wait_until(lambda: notebook.done(SHOW), limit_s=60)
            assert notebook.errors(SHOW) == [], notebook.text(SHOW)
            button.wait_for(timeout=20_000)
    notebook.page.wait_for_timeout(500)
    before = notebook.page.evaluate(f"() => {images}")
    notebook.page.wait_for_timeout(3000)
    after = notebook.page.evaluate(f"() => {images}")
    assert before and before != after, "the picture follows while the ranks work"
    notebook.screenshot("live_view")

    assert notebook.runs(WORK)
    button.click()
    notebook.page.get_by_text("stopped", exact=True).wait_for(timeout=20_000)
    notebook.wait_for_text(SHOW, "<image/png>", limit_s=10)
    assert notebook.runs(WORK), "the click was heard only after the cell"
    notebook.screenshot("live_view_stopped")

    notebook.wait_until_done(WORK, limit_s=40)
    assert notebook.text(WORK) == "", "nothing is printed from threads"
    notebook.select(AGAIN)
    notebook.command("notebook:run-cell")
    notebook.wait_until(lambda: notebook.done(AGAIN), limit_s=30)
    assert notebook.errors(AGAIN) == [] and "<image/png>" in notebook.text(AGAIN)
    notebook.screenshot("live_view_again")
    notebook.shut_down_kernel()

"""The notebooks as a reader meets them: in JupyterLab, in a browser."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).parents[2]
FIRST_NOTEBOOK = ROOT / "notebooks" / "00_know_your_machine.ipynb"

pytestmark = pytest.mark.browser

START, SHOW, BLOCK, AFTER = range(4)
RANKS_CELLS = [
    "from labkit import Ranks\n\nranks = Ranks(2)",
    "%%ranks\n"
    "import matplotlib.pyplot as plt\n"
    'print("hello from rank", rank)\n'
    "plt.figure(figsize=(3, 2))\n"
    "plt.plot([0, rank + 1])\n"
    "plt.show()",
    '%%ranks\nprint("blocks now")\nif rank == 0:\n    dist.recv(torch.zeros(1), src=1)',
    "%%ranks\nx = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)\nprint('sum', x.item())",
]


def write_notebook(path: Path, sources: list[str]) -> None:
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [new_code_cell(source) for source in sources]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), path)


def test_ranks_show_text_and_figures_and_the_stop_button_frees_a_blocked_one(server, open_notebook):
    write_notebook(server.folder / "ranks.ipynb", RANKS_CELLS)
    notebook = open_notebook("ranks.ipynb")
    notebook.command("notebook:run-all-cells")

    notebook.wait_until(lambda: notebook.done(START), limit_s=60)
    assert notebook.errors(START) == [], notebook.text(START)
    notebook.wait_for_text(SHOW, "[0] hello from rank 0", "[1] hello from rank 1", limit_s=60)
    notebook.wait_until(lambda: notebook.text(SHOW).count("<image/png>") == 2, limit_s=30)
    notebook.page.wait_for_selector(".jp-OutputArea img", timeout=10_000)
    notebook.screenshot("ranks_figures")

    notebook.wait_for_text(BLOCK, "[0] blocks now", limit_s=30)
    time.sleep(1)
    assert notebook.runs(BLOCK), "rank 0 waits for a message that nobody sends"
    notebook.press_stop()
    notebook.wait_until_done(BLOCK, limit_s=15)
    assert "KeyboardInterrupt" in notebook.text(BLOCK)

    notebook.select(AFTER)
    notebook.command("notebook:run-cell")
    notebook.wait_for_text(AFTER, "[0] sum 3.0", "[1] sum 3.0", limit_s=30)
    notebook.screenshot("ranks_after_stop")

    started = server.kernels_and_ranks()
    assert len(started) >= 3, "a kernel and two ranks"
    notebook.shut_down_kernel()
    _, alive = psutil.wait_procs(started, timeout=15)
    assert alive == []


@pytest.mark.skipif(not FIRST_NOTEBOOK.exists(), reason=f"there is no {FIRST_NOTEBOOK.name}")
def test_the_first_notebook_runs_to_its_end_without_an_error(server, open_notebook):
    shutil.copy(FIRST_NOTEBOOK, server.folder)
    notebook = open_notebook(FIRST_NOTEBOOK.name)
    cells = nbformat.read(FIRST_NOTEBOOK, as_version=4).cells
    code = [number for number, cell in enumerate(cells) if cell.cell_type == "code"]
    notebook.command("notebook:run-all-cells")

    def ended() -> bool:
        return notebook.done(code[-1]) or any(notebook.errors(number) for number in code)

    notebook.wait_until(ended, limit_s=120)
    notebook.screenshot(FIRST_NOTEBOOK.stem)
    for number in code:
        assert notebook.done(number) and not notebook.errors(number), notebook.text(number)
    notebook.shut_down_kernel()

"""One run over notebooks that go wrong in every way known: each verdict, each saved file."""

import re
from dataclasses import dataclass, field

import nbformat
import pytest
from nbformat.sign import NotebookNotary
from nbformat.v4 import new_code_cell

TWO_CHILDREN = (
    "subprocess.Popen(['sleep', '600'])\n"
    "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
)
DEAF = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)"
DETACHED = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True, env={})"


def tagged(source, *tags):
    return new_code_cell(source, metadata={"tags": list(tags)})


@dataclass
class Case:
    """``reason`` is None for a notebook that must pass; ``ran``: code cells that end well.

    The cells follow imports, parameters and the injected parameters: three that always run.
    """

    cells: list
    reason: str | None = None
    ran: int = 3
    metadata: dict = field(default_factory=dict)
    parameters: bool = True


CASES = {
    "01_widgets": Case(
        ["import ipywidgets"]
        + ["out = ipywidgets.Output()\nwith out:\n    print('hello')\nout"] * 60,
        ran=64,
    ),
    "02_raises": Case(["1 / 0", "print('never')"], "ZeroDivisionError: division by zero"),
    "03_endless": Case(
        [tagged("while True: pass", "timeout=2")],
        "CellTimeoutError: the cell ran longer than its 2 s",
    ),
    "04_killed": Case(
        [TWO_CHILDREN + "os.kill(os.getpid(), signal.SIGKILL)", "1"],
        r"DeadKernelError: .* ended by SIGKILL .*; ProcessesLeft: 2 left and killed: pid \d+",
    ),
    "05_exits": Case(["sys.exit(0)", "print('never')"], "SystemExit: 0"),
    "06_magic": Case(["%nosuchmagic", "print('never')"], "UsageError: .*nosuchmagic"),
    "07_shell": Case(["!false"], "code cell 3: !false: the exit status .* is lost", ran=0),
    "08_lines": Case(["for i in range(200_000): print('line', i)", "print('after')"], ran=5),
    "09_long_line": Case(["print('x' * 5_000_000)", "'y' * 5_000_000"], ran=5),
    "10_import": Case(["import nosuchmodule"], "ModuleNotFoundError: .*nosuchmodule"),
    "11_no_json": Case([], "11_no_json.ipynb is no notebook: NotJSONError", ran=0),
    "12_no_parameters": Case(["1"], "no cell is tagged 'parameters'", ran=0, parameters=False),
    "13_other_kernel": Case(
        ["print('ours')"],
        ran=4,
        metadata={"kernelspec": {"name": "gone", "display_name": "Gone", "language": "julia"}},
    ),
    "14_expected": Case([tagged("1 / 0", "raises-exception"), "1"], ran=5),
    "15_unexpected": Case(
        [tagged("1", "raises-exception"), "1"], "is tagged raises-exception and raised none", ran=5
    ),
    "16_deaf": Case(
        [tagged(DEAF, "timeout=1"), "1"], "CellTimeoutError: the cell ran longer than its 1 s"
    ),
    "17_slow": Case(
        ["time.sleep(1.5)"] * 20,
        "CellTimeoutError: the notebook's 3 s are over",
        ran=None,
        metadata={"labkit": {"timeout_s": 3}},
    ),
    "18_hidden": Case(
        ["import ipywidgets\nout = ipywidgets.Output()\nwith out:\n    1 / 0\nout"],
        "inside an Output widget: ZeroDivisionError",
        ran=4,
    ),
    "19_leaves": Case(
        [DETACHED, "time.sleep(2.5)"], r"ProcessesLeft: 1 left and killed: pid \d+ .sleep", ran=5
    ),
    "20_kills_executor": Case(
        ["print('before')", "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"],
        "Interrupted: its process ended by SIGKILL",
        ran=4,
    ),
    "21_stops_executor": Case(
        ["os.kill(os.getppid(), signal.SIGSTOP); time.sleep(60)"],
        "Interrupted: its process did not end 10 s past the deadline",
        metadata={"labkit": {"timeout_s": 8}},
    ),
    "22_picture": Case(
        ["import matplotlib.pyplot as plt\nplt.plot([1, 2]);", "print(PRESET, DEVICES, RUN)"],
        ran=5,
    ),
    "23_flood": Case(
        [tagged("while True: print('x' * 10_000)", "timeout=2")],
        "CellTimeoutError: the cell ran longer than its 2 s",
    ),
}
pytestmark = pytest.mark.timeout(600)  # the run comes before the first test, in its time
FAILING = [name for name, case in CASES.items() if case.reason]
SAVED = [n for n in FAILING if n not in ("07_shell", "11_no_json", "12_no_parameters")]


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_series):
    series = make_series(tmp_path_factory.mktemp("verdicts"))
    for name, case in CASES.items():
        series.add(name, *case.cells, parameters=case.parameters, **case.metadata)
    (series.notebooks / "11_no_json.ipynb").write_text("no notebook at all")
    series.status, series.printed = series.execute(margin_s=10.0)
    return series


def verdict_line(run, name):
    return next(line for line in run.printed.splitlines() if line.startswith(name))


@pytest.mark.parametrize("name", CASES)
def test_each_notebook_gets_its_verdict_and_reason(run, name):
    case = CASES[name]
    verdict = "failed" if case.reason else "passed"
    assert verdict_line(run, name).split()[1] == verdict
    if case.reason:
        assert re.search(rf"(?m)^failed  {name}: .*{case.reason}", run.printed)


@pytest.mark.parametrize("name", CASES)
def test_the_table_counts_the_cells_that_ran_to_their_end(run, name):
    case = CASES[name]
    ran, cells = map(int, verdict_line(run, name).split()[2].split("/"))
    if case.ran is not None:
        assert ran == case.ran
    assert (ran == cells) == (case.reason is None or case.ran in (0, cells))


@pytest.mark.parametrize("name", CASES)
def test_each_verdict_comes_within_its_deadline_and_the_time_to_end_everything(run, name):
    """The limits of the cases are 8 s at most, then 5 s to be interrupted and 10 s of margin."""
    assert float(verdict_line(run, name).split()[-1]) < 45  # on a busy machine


def test_one_failed_notebook_makes_the_run_fail_and_does_not_stop_the_others(run):
    assert run.status == 1
    assert f"{len(CASES) - len(FAILING)} of {len(CASES)} notebooks passed" in run.printed


def test_no_process_is_left(run):
    assert run.processes() == []


@pytest.mark.parametrize("name", SAVED)
def test_the_saved_notebook_says_that_it_failed_and_marks_no_cell_completed_that_did_not(run, name):
    notebook = run.executed(name)
    assert notebook.metadata.papermill.exception is True or name in ("15_unexpected", "18_hidden")
    statuses = [
        (c.metadata.papermill.status, c.execution_count)
        for c in notebook.cells
        if c.cell_type == "code"
    ]
    stopped = [status for status, _ in statuses if status != "completed"]
    assert stopped[:1] in ([], ["failed"]) and set(stopped[1:]) <= {"pending"}
    assert all(count for status, count in statuses if status == "completed")
    if stopped:
        broken = notebook.cells[
            [c.metadata.get("papermill", {}).get("status") for c in notebook.cells].index("failed")
        ]
        assert any(output.output_type == "error" for output in broken.outputs)


def test_a_cell_that_was_interrupted_shows_where_it_was(run):
    names = [o.ename for c in run.executed("03_endless").cells for o in c.get("outputs", [])]
    assert names == ["KeyboardInterrupt", "CellTimeoutError"]


@pytest.mark.parametrize("name", ["08_lines", "09_long_line", "23_flood"])
def test_long_outputs_are_cut_and_say_how_much_is_missing(run, name):
    path = run.run_folder / f"{name}.ipynb"
    assert path.stat().st_size < 100_000
    assert "characters cut" in path.read_text()


def test_parameters_reach_the_notebook(run):
    text = run.executed("22_picture").cells[-1].outputs[0].text
    assert text.split() == ["tiny", "auto", str(run.run_folder)]


def test_pages_hold_their_pictures_and_exist_for_failed_notebooks_too(run):
    page = (run.run_folder / "22_picture.html").read_text()
    assert "data:image/png;base64" in page
    assert "ZeroDivisionError" in (run.run_folder / "02_raises.html").read_text()


def test_jupyter_trusts_the_executed_notebooks(run):
    notebook = nbformat.read(run.run_folder / "22_picture.ipynb", as_version=4)
    assert NotebookNotary().check_signature(notebook)


def test_an_expected_exception_leaves_no_marker_in_a_notebook_that_passed(run):
    assert all(c.cell_type == "code" for c in run.executed("14_expected").cells)


def test_a_notebook_runs_on_this_interpreter_whatever_kernel_it_names(run):
    notebook = run.executed("13_other_kernel")
    assert notebook.metadata.kernelspec.name == "python3"


def test_nothing_is_written_outside_the_build_folder(run):
    assert sorted(p.name for p in run.notebooks.iterdir()) == [f"{n}.ipynb" for n in sorted(CASES)]

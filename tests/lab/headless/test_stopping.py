"""The command is stopped from outside: nothing survives, and the same command goes on."""

import os
import signal
import time

import nbformat
import pytest

SLOW = "subprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('here')\ntime.sleep(600)"


@pytest.fixture
def two(series):
    """A quick notebook, then one that takes for ever and has a child of its own."""
    series.add("01_quick", "1")
    series.add("02_slow", SLOW)
    return series


@pytest.fixture
def slow(series):
    series.add("02_slow", SLOW)
    return series


def wait_for_slow_cell(series, process):
    """Until the second notebook's last cell runs."""
    end = time.monotonic() + 60
    path = series.run_folder / "02_slow.ipynb"
    while time.monotonic() < end and process.poll() is None:
        if path.is_file() and '"status": "running"' in path.read_text():
            running = [c for c in series.executed("02_slow").cells if "sleep(600)" in c.source]
            if running[0].metadata.papermill.status == "running":
                time.sleep(0.5)
                return
        time.sleep(0.1)
    raise AssertionError(f"the slow cell never ran: {process.stdout.read()}")


@pytest.mark.parametrize(
    "number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_ends_all_and_the_same_command_resumes(two, number, status):
    process = two.start()
    wait_for_slow_cell(two, process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    printed, _ = process.communicate(timeout=20)
    assert process.returncode == status
    assert two.processes() == []
    assert f"interrupted  02_slow: Interrupted: stopped by {number.name}" in printed
    failure = two.executed("02_slow").metadata.labkit.failure
    assert failure == f"Interrupted: stopped by {number.name}"

    two.add("02_slow", "print('quick now')")
    process = two.start()
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "passed (kept)" in printed and "[1/1] 02_slow: passed" in printed


def test_control_c_on_make_ends_all(slow, tmp_path):
    makefile = tmp_path / "Makefile"
    makefile.write_text("run:\n\t@exec $(COMMAND)\n")
    process = slow.start(command=["bash", "-c", f'exec make -f {makefile} COMMAND="$*"', "make"])
    wait_for_slow_cell(slow, process)
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=20)
    assert process.returncode != 0 and "stopped by SIGINT; the same command resumes" in printed
    assert slow.processes() == []


def test_when_the_command_is_killed_everything_ends_itself_and_the_notebook_says_so(slow):
    process = slow.start()
    wait_for_slow_cell(slow, process)
    process.kill()
    process.wait()
    process.stdout.close()
    assert slow.wait_until_gone(5) == []
    failure = slow.executed("02_slow").metadata.labkit.failure
    assert failure == "Interrupted: the command that ran the notebooks was killed"


def test_a_second_command_on_the_same_run_is_refused(slow):
    process = slow.start()
    wait_for_slow_cell(slow, process)
    second = slow.start()
    printed, _ = second.communicate(timeout=30)
    assert second.returncode == 2 and "another command runs in" in printed
    process.terminate()
    process.communicate(timeout=20)
    assert slow.processes() == []


def test_a_reader_that_goes_away_leaves_no_process(slow):
    process = slow.start()
    wait_for_slow_cell(slow, process)
    process.stdout.close()  # what is printed next raises BrokenPipeError
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) != 0
    assert slow.processes() == []


def test_a_cut_notebook_of_an_interrupted_run_is_replaced_by_the_source(slow):
    from labkit.lab.headless.truth import record_failure_in_file

    source = nbformat.read(slow.notebooks / "02_slow.ipynb", as_version=4)
    slow.run_folder.mkdir(parents=True)
    path = slow.run_folder / "02_slow.ipynb"
    path.write_text('{"cells": [{"cell_type": "co')
    record_failure_in_file(path, source, "Interrupted", "stopped")
    assert slow.executed("02_slow").metadata.labkit.failure == "Interrupted: stopped"

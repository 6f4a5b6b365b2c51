"""The command that shows, holds and restores settings of GPUs."""

from __future__ import annotations

import json

import pytest
from fake_nvml import FakeGPU

from labkit.lab import command_line


@pytest.fixture
def tune(tmp_path, capsys):
    def run(*options):
        status = command_line.main(["tune", *options, "--manifest", str(tmp_path / "kept.json")])
        return status, *capsys.readouterr()

    return run


def test_show_without_a_wish_gives_the_settings_and_the_drivers_bounds(gpus, tune):
    with gpus(FakeGPU(), FakeGPU(unsupported=("nvmlDeviceGetFanSpeed",))):
        status, out, _ = tune("show")
    assert status == 0 and "100 to 300 W" in out and "null: not supported" in out


def test_hold_changes_nothing_without_apply(gpus, tune):
    with gpus(FakeGPU(), root=True) as library:
        status, out, _ = tune("hold", "--power", "200")
        assert library.calls == []
    assert status == 0 and "limit 300 W" in out and "nothing was changed" in out


def test_what_clocks_are_put_back_to_is_said_before_they_are_changed(gpus, tune):
    with gpus(FakeGPU(locked=[300, 900])):
        status, out, _ = tune("hold", "--clocks", "210", "1200")
    assert status == 0 and "a lock set before cannot be read, and is gone" in out


def test_hold_with_apply_holds_for_its_seconds_and_restores(gpus, tune):
    with gpus(FakeGPU(), root=True) as library:
        status, *_ = tune("hold", "--power", "200", "--seconds", "0", "--apply")
        assert [value for _, _, value in library.calls] == [200_000, 300_000]
    assert status == 0


def test_a_value_outside_of_the_bounds_and_a_machine_without_gpu_are_status_2(gpus, tune):
    with gpus(FakeGPU()):
        status, _, error = tune("show", "--power", "500")
    assert status == 2 and "100 to 300 W" in error
    with gpus():
        status, _, error = tune("show", "--power", "200")
    assert status == 2 and "no GPU to tune" in error


def test_restore_says_what_it_did(gpus, tune, tmp_path):
    card = FakeGPU(limit_mw=200_000)
    with gpus(card, root=True):
        assert tune("restore")[:2] == (0, "nothing is left to put back\n")
        kept = {"uuid": card.uuid, "parts": ["power"], "power_limit_mw": 300_000, "fans": []}
        (tmp_path / "kept.json").write_text(json.dumps({"pid": 1, "gpus": [kept]}))
        assert tune("restore")[0] == 0
        assert card.limit_mw == 300_000
        kept["uuid"] = "GPU-gone"
        (tmp_path / "kept.json").write_text(json.dumps({"pid": 1, "gpus": [kept]}))
        status, out, _ = tune("restore")
    assert status == 1 and "GPU-gone: the GPU is not there" in out

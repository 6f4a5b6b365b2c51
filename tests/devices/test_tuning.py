"""Clocks, fans and power on scripted GPUs: bounds, dry runs, and restoring whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_nvml import FakeGPU, FakeNvml, Scenario, write_scenario

from labkit.devices.nvml import physical_gpus
from labkit.devices.tuning.tuning import tuned
from labkit.devices.tuning.tuning_manifest import restore
from labkit.devices.tuning.tuning_plan import LOCK_GONE, TuningError, Wish, plan

ROOT = Path(__file__).parents[2]
ALL = Wish(power_limit_w=200, clocks_mhz=(210, 1200), fan_percent=80)
UNTOUCHED = {"limit_mw": 300_000, "locked": None, "fan_manual": None}
HELD = {"limit_mw": 200_000, "locked": [210, 1200], "fan_manual": 80}


def settings(gpu):
    return {name: getattr(gpu, name) for name in UNTOUCHED}


@pytest.fixture
def manifest(tmp_path):
    return tmp_path / "state" / "gpu-settings.json"


def test_a_dry_run_says_what_would_change_and_changes_nothing(gpus, manifest):
    with gpus(FakeGPU(), FakeGPU(), root=True) as library:
        with tuned(ALL, manifest=manifest) as steps:
            pass
        assert library.calls == [] and not manifest.exists()
    assert [(s.gpu, s.now, s.then, s.after) for s in steps[:3]] == [
        ("GPU 0", "limit 300 W", "200 W", "300 W"),
        ("GPU 0", "clock 1410 MHz", "between 210 and 1200 MHz", LOCK_GONE),
        ("GPU 0", "fan 0 at 30 %", "held at 80 %", "follows the heat"),
    ]
    assert len(steps) == 6


def test_settings_hold_inside_the_block_and_are_restored_after_it(gpus, manifest):
    card = FakeGPU()
    with gpus(card, root=True):
        with tuned(ALL, apply=True, manifest=manifest):
            assert settings(card) == HELD and manifest.exists()
        assert settings(card) == UNTOUCHED and not manifest.exists()


def test_an_exception_restores_and_comes_through(gpus, manifest):
    card = FakeGPU()
    with gpus(card, root=True), pytest.raises(ZeroDivisionError):
        with tuned(ALL, apply=True, manifest=manifest):
            1 / 0  # noqa: B018
    assert settings(card) == UNTOUCHED


def test_what_was_not_changed_is_not_reset(gpus, manifest):
    card = FakeGPU(locked=[300, 900], fan_manual=70)
    with gpus(card, root=True):
        with tuned(Wish(power_limit_w=150), apply=True, manifest=manifest):
            assert card.limit_mw == 150_000
    assert settings(card) == {"limit_mw": 300_000, "locked": [300, 900], "fan_manual": 70}


def test_a_fan_that_was_held_by_hand_is_held_there_again(gpus, manifest):
    card = FakeGPU(fan_manual=60)
    with gpus(card, root=True):
        with tuned(Wish(fan_percent=90), apply=True, manifest=manifest) as steps:
            assert card.fan_manual == 90 and steps[0].after == "held at 60 %"
    assert card.fan_manual == 60


def test_a_lock_of_the_clocks_cannot_be_put_back_and_the_step_says_so(gpus, manifest):
    card = FakeGPU(locked=[300, 900])
    with gpus(card, root=True):
        with tuned(Wish(clocks_mhz=(210, 1200)), apply=True, manifest=manifest) as steps:
            assert "cannot be read, and is gone" in steps[0].after
    assert card.locked is None


@pytest.mark.parametrize(
    "wish, message",
    [
        (Wish(power_limit_w=50), "100 to 300 W"),
        (Wish(power_limit_w=301), "100 to 300 W"),
        (Wish(clocks_mhz=(210, 2500)), "above the card's 2100 MHz"),
        (Wish(fan_percent=40), "50 to 100 %"),
        (Wish(fan_percent=60), "65 to 100 %.*never slowed"),
    ],
)
def test_a_value_outside_of_the_bounds_changes_nothing(gpus, manifest, wish, message):
    fan = 65 if wish.fan_percent == 60 else 30
    with gpus(FakeGPU(fan=fan), root=True) as library:
        with pytest.raises(ValueError, match=message):
            with tuned(wish, apply=True, manifest=manifest):
                pass
        assert library.calls == [] and not manifest.exists()


def test_clocks_that_are_no_range_are_refused():
    with pytest.raises(ValueError, match="least, most"):
        Wish(clocks_mhz=(1500, 300))


def test_without_permission_nothing_changes_and_the_message_says_root(gpus, manifest):
    card = FakeGPU()
    with gpus(card, root=False), pytest.raises(TuningError, match="no permission.*takes root"):
        with tuned(Wish(power_limit_w=200), apply=True, manifest=manifest):
            pass
    assert settings(card) == UNTOUCHED
    assert not manifest.exists(), "an attempt that changed nothing must not block the next one"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_first_setting_changes_restores_it(gpus, manifest, monkeypatch, number):
    """What the driver was asked for is done, although the call never came back."""
    numbers, change = iter([number]), FakeNvml._change

    def interrupted(library, gpu, **changed):
        change(library, gpu, **changed)
        for once in numbers:
            os.kill(os.getpid(), once)

    monkeypatch.setattr(FakeNvml, "_change", interrupted)
    card = FakeGPU()
    with gpus(card, root=True), pytest.raises((KeyboardInterrupt, SystemExit)):
        with tuned(Wish(power_limit_w=200), apply=True, manifest=manifest):
            pass
    assert settings(card) == UNTOUCHED and not manifest.exists()


def test_a_card_that_tells_no_bounds_is_left_alone(gpus):
    with gpus(FakeGPU(unsupported=("nvmlDeviceGetPowerManagementLimitConstraints",))):
        with pytest.raises(TuningError, match="not supported.*nothing was changed"):
            plan(physical_gpus().devices, Wish(power_limit_w=200))


def test_a_machine_without_gpus_says_so(gpus):
    with gpus(), pytest.raises(TuningError, match="no GPU to tune"):
        with tuned(ALL):
            pass


def test_a_manifest_of_an_earlier_run_stops_the_next(gpus, manifest):
    manifest.parent.mkdir()
    manifest.write_text('{"pid": 1, "gpus": []}')
    with gpus(FakeGPU(), root=True) as library:
        with pytest.raises(TuningError, match="tune restore"):
            with tuned(ALL, apply=True, manifest=manifest):
                pass
        assert library.calls == []


def test_a_crash_is_restored_by_uuid_when_the_cards_have_changed_places(gpus, manifest):
    held = {**HELD, "uuid": "GPU-b0000000-0000-4000-8000-000000000000"}
    other, card = FakeGPU(), FakeGPU(**held)
    manifest.parent.mkdir()
    original = {"uuid": card.uuid, "parts": ["power", "clocks", "fans"]}
    original |= {"power_limit_mw": 250_000, "fans": [None]}
    manifest.write_text(json.dumps({"pid": 1, "gpus": [original]}))
    with gpus(other, card, root=True) as library:
        assert restore(manifest) == []
        assert {place for place, *_ in library.calls} == {1}
    assert settings(card) == UNTOUCHED | {"limit_mw": 250_000} and not manifest.exists()


def test_what_cannot_be_restored_is_said_and_the_manifest_stays(gpus, manifest):
    manifest.parent.mkdir()
    gone = {"uuid": "GPU-c", "parts": ["clocks"], "power_limit_mw": None, "fans": []}
    manifest.write_text(json.dumps({"pid": 1, "gpus": [gone]}))
    with gpus(FakeGPU(), root=True):
        assert restore(manifest) == ["GPU-c: the GPU is not there"]
    assert manifest.exists()


TUNES = """
import sys, time
from pathlib import Path
from labkit.devices.tuning.tuning import tuned
from labkit.devices.tuning.tuning_plan import Wish
with tuned(Wish(200, (210, 1200), 80), apply=True, manifest=Path(sys.argv[1])):
    print("tuned", flush=True)
    time.sleep(60)
"""


def state(folder):
    return json.loads((folder / "gpu-state.json").read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_process_leaves_the_settings_restored(tmp_path, manifest, number):
    variables = write_scenario(Scenario([FakeGPU(), FakeGPU()], root=True), tmp_path)
    variables["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    process = subprocess.Popen(
        [sys.executable, "-c", TUNES, str(manifest)],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        assert process.stdout.readline() == b"tuned\n"
        assert state(tmp_path) == [HELD, HELD]
        process.send_signal(number)
        process.wait(timeout=30)
    until = time.monotonic() + 30
    while manifest.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert state(tmp_path) == [UNTOUCHED, UNTOUCHED] and not manifest.exists()


INTERRUPTED = """
import sys
from pathlib import Path
import labkit.devices.tuning.tuning as tuning
from labkit.devices.tuning.tuning_plan import Wish
def interrupted(manifest):
    raise KeyboardInterrupt
tuning.restore = interrupted
try:
    with tuning.tuned(Wish(200, (210, 1200), 80), apply=True, manifest=Path(sys.argv[1])):
        pass
except KeyboardInterrupt:
    print("goes on", flush=True)
    sys.stdin.read()
"""


def test_an_interrupted_restore_is_left_to_the_watchdog_while_the_process_goes_on(
    tmp_path, manifest
):
    variables = write_scenario(Scenario([FakeGPU()], root=True), tmp_path)
    variables["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(manifest)],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout.readline() == b"goes on\n"
        assert state(tmp_path) == [UNTOUCHED] and not manifest.exists()

"""Sweeps: default and settings in turns, intervals, and what they say of the sentence."""

from __future__ import annotations

import time

import pytest
from fake_nvml import FakeGPU

from labkit.devices.inventory import choose_devices
from labkit.devices.nvml import physical_gpus
from labkit.devices.tuning.tuning_plan import Wish
from labkit.measure.telemetry.power_sweep import (
    Block,
    SweepPoint,
    measure_block,
    ratio_interval,
    sweep,
)
from labkit.measure.telemetry.published_power import PUBLISHED_MODELS, published_sweep
from labkit.measure.telemetry.tuning_verdict import verdict


def card_that_slows_below(card, watts):
    """A measurement: 10 ms a step, twice that below ``watts``, and its power times that time."""
    noise = iter([1.0, 1.01, 0.99, 1.0, 1.02, 0.98] * 20)

    def measure():
        limit_w = card.limit_mw / 1000
        seconds = 0.010 * (2 if limit_w < watts else 1) * next(noise)
        return Block(seconds, limit_w * seconds, 70.0)

    return measure


def run(gpus, tmp_path, wishes, apply=True):
    card = FakeGPU()
    with gpus(card, root=True) as library:
        points = sweep(
            card_that_slows_below(card, 150),
            100,
            wishes,
            physical_gpus().devices,
            apply=apply,
            rounds=4,
            manifest=tmp_path / "manifest.json",
        )
    assert card.limit_mw == 300_000
    return points, library.calls


def test_every_setting_is_measured_against_the_default_and_put_back(gpus, tmp_path):
    points, calls = run(gpus, tmp_path, [Wish(power_limit_w=200), Wish(power_limit_w=100)])
    assert [point.setting for point in points] == ["default", "200 W", "100 W"]
    assert points[0].relative_time == 1 and points[0].joules_per_token == pytest.approx(0.03, 0.05)
    assert points[1].relative_energy == pytest.approx(2 / 3, rel=0.05)
    low, high = points[1].energy_interval
    assert 0.6 < low < points[1].relative_energy < high < 0.72
    assert points[2].relative_time == pytest.approx(2, rel=0.05)
    assert points[2].interval[0] > 1.9 and points[1].interval[0] < 1.01
    assert len(calls) == 2 * 2 * 4  # two settings, set and restored, four rounds
    assert points[1].tokens_per_s == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize("missing", [None, 0.0])
def test_a_round_whose_energy_was_not_counted_leaves_no_energy_and_keeps_the_time(missing):
    blocks = iter([Block(1.0, 5.0), Block(1.0, missing), Block(1.0, 5.0)])
    (found,) = sweep(lambda: next(blocks), 1, [], [], rounds=3)
    assert found.relative_energy is None and found.energy_interval is None
    assert found.joules_per_token is None and found.interval == (1, 1)


def test_a_block_on_the_cpu_has_a_time_and_no_energy():
    calls = []
    block = measure_block(lambda: calls.append(time.sleep(0.02)), choose_devices("cpu"), 0.1)
    assert block.seconds == pytest.approx(0.02, rel=0.5) and len(calls) >= 3
    assert block.energy_j is None and block.temperature_c is None and not block.throttled


def test_without_apply_only_the_default_is_measured_and_nothing_changes(gpus, tmp_path):
    points, calls = run(gpus, tmp_path, [Wish(power_limit_w=200)], apply=False)
    assert [point.setting for point in points] == ["default"] and calls == []
    assert verdict(points).holds is None and "root" in verdict(points).reason


def test_too_few_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds=2 must be at least 3"):
        sweep(lambda: Block(1.0), 1, [], [], rounds=2)


def test_equal_pairs_give_an_interval_without_width():
    assert ratio_interval([2.0] * 5, [1.0] * 5) == (2, 2)


def test_pairs_that_drift_together_keep_a_narrow_interval_and_noise_a_wide_one():
    low, high = ratio_interval([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert low == pytest.approx(2) and high == pytest.approx(2)
    low, high = ratio_interval([1.9, 2.0, 2.1], [1.0, 1.0, 1.0])
    # by hand: mean of ln 0.6923, deviation 0.0500, t 4.303: 0.1243 to both sides
    assert (low, high) == pytest.approx((1.764, 2.262), abs=0.003)


def test_two_pairs_give_no_interval():
    with pytest.raises(ValueError, match="at least 3"):
        ratio_interval([1.0, 1.0], [1.0, 1.0])


def point(setting, time, interval, energy=1.0, throttled=()):
    return SweepPoint(setting, time, interval, energy, "measured:cuda", throttled=throttled)


DEFAULT = point("default", 1.0, (0.99, 1.01))
HOT = point("default", 1.0, (0.99, 1.01), throttled=("hardware thermal",))


def test_a_hot_card_that_more_fan_makes_faster_confirms_the_sentence():
    found = verdict([HOT, point("fans 90 %", 0.93, (0.91, 0.95))])
    assert found.holds and "fans 90 %" in found.reason and "hardware thermal" in found.reason


def test_a_cool_card_gains_nothing_and_the_verdict_says_what_can_be_saved():
    found = verdict([DEFAULT, point("250 W", 1.01, (0.99, 1.03), 0.9)])
    assert found.holds is False
    assert "nothing held the clocks back" in found.reason and "0.900 of the energy" in found.reason


def test_a_gain_within_the_noise_is_no_gain():
    assert verdict([HOT, point("fans 90 %", 0.98, (0.95, 1.01))]).holds is False


def test_the_published_curve_is_labelled_so_and_cannot_decide():
    for model in PUBLISHED_MODELS:
        points = published_sweep(model)
        assert points[0].setting == "default" and points[0].relative_time == 1
        assert all(p.provenance.startswith("published") for p in points)
        assert verdict(points).holds is None and "single runs" in verdict(points).reason
    assert published_sweep("BERT")[-1].relative_time == 4.28
    with pytest.raises(ValueError, match="no published curve"):
        published_sweep("GPT-5")

"""The ranking of ways to generate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.devices.machines import LAB_WIDTH, machine
from labkit.devices.profiles import Machine
from labkit.models.config import ModelConfig
from labkit.parallel.generation.planning import plan_generation

CONFIG = ModelConfig(layers=4, width=32, heads=2, context=32)
SIZES = {"rows": 4, "prompt": 8, "new_tokens": 4, "decode_width": LAB_WIDTH}


def test_ways_are_ranked_by_the_goal_and_the_others_have_their_reasons():
    found = plan_generation(CONFIG, machine("lab", 4), **SIZES)
    rates = [way.predicted.tokens_per_s for way in found.ranked]
    assert rates == sorted(rates, reverse=True) and found.best.predicted.tokens_per_s == rates[0]
    assert {str(way) for way in found.ranked} >= {"one device", "layers over 2", "tensor 2"}
    assert any("heads=2" in r.reason for r in found.rejected if r.what == "tensor 4")
    assert str(found.best) in str(found) and str(found.best) in found._repr_html_()
    roomiest = found.ranked_by("largest batch")
    room = [way.predicted.largest_batch for way in roomiest.ranked]
    assert room == sorted(room, reverse=True)


def test_a_goal_given_first_or_later_ranks_alike():
    found = plan_generation(CONFIG, machine("lab", 2), **SIZES)
    asked = plan_generation(CONFIG, machine("lab", 2), goal="largest batch", **SIZES)
    assert found.ranked_by("largest batch") == asked != found


def test_what_does_not_fit_is_rejected_with_what_does():
    its = machine("lab", 1)
    tight = Machine(its.name, (replace(its.profiles[0], memory_bytes=300_000),), its.links)
    found = plan_generation(CONFIG, tight, **SIZES)
    assert found.ranked == () and "at most" in found.rejected[0].reason
    with pytest.raises(ValueError, match="nothing fits: 4 sequences"):
        _ = found.best


def test_an_unknown_goal_is_refused():
    with pytest.raises(ValueError, match="choose one of tokens per second, first token"):
        plan_generation(CONFIG, machine("lab", 1), goal="speed", **SIZES)

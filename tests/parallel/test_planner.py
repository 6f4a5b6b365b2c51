"""The planner's ranking, its reasons, and that it proposes nothing that then fails."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from spawned import run_ranks

from labkit.devices.inventory import choose_devices, virtual_devices
from labkit.devices.machines import machine
from labkit.devices.profiles import Machine
from labkit.measure.virtual.virtual_step import record_step
from labkit.models.config import ModelConfig
from labkit.parallel.planning.levers import Levers
from labkit.parallel.planning.plan_training import train_choice
from labkit.parallel.planning.planner import MARGIN, plan

CONFIG = ModelConfig(layers=4, width=32, heads=4, context=32)


def with_memory(name, count, num_bytes):
    """A named machine whose devices hold so much."""
    its = machine(name, count)
    return Machine(
        its.name, tuple(replace(p, memory_bytes=num_bytes) for p in its.profiles), its.links
    )


def test_layouts_are_ranked_by_time_and_every_other_one_has_its_reason():
    found = plan(CONFIG, virtual_devices("lab", 4), batch=8)
    times = [p.step_time_s for p in found.ranked]
    assert times == sorted(times) and found.best.step_time_s == times[0]
    assert {p.choice.layout.ranks for p in found.ranked} == {1, 2, 4}
    assert all(rejected.reason for rejected in found.rejected)
    assert found.best.provenance == "predicted:lab-4x-a6000-pcie-narrow32"
    assert found.fastest_on(1).choice.layout.ranks == 1


def test_the_goal_decides_what_comes_first():
    leanest, fewest = (
        plan(CONFIG, machine("lab", 2), goal=goal, batch=8)
        for goal in ("leanest", "fewest devices")
    )
    assert leanest.best.peak_bytes == min(p.peak_bytes for p in leanest.ranked)
    assert fewest.best.choice.layout.ranks == 1
    with pytest.raises(ValueError, match="goal='best' is unknown; choose one of fastest, leanest"):
        plan(CONFIG, machine("lab", 2), goal="best", batch=8)


def test_a_plan_shows_itself_as_text_and_html():
    found = plan(CONFIG, virtual_devices("lab", 2), batch=8)
    assert str(found.best.choice) in str(found)
    assert "<table>" in found._repr_html_() and "rejected" in found._repr_html_()


def test_what_does_not_fit_on_one_fits_on_two_or_with_checkpointing():
    roomy = plan(CONFIG, machine("lab", 2), batch=8)
    one = roomy.fastest_on(1).peak_bytes
    tight = with_memory("lab", 2, int(0.7 * one))
    found = plan(CONFIG, tight, batch=8, levers=[Levers()])
    assert found.fastest_on(1).choice.layout.microbatches > 1  # in smaller pieces
    assert found.best.choice.layout.ranks == 2
    assert found.best.peak_bytes <= (1 - MARGIN) * 0.7 * one


def test_a_model_that_fits_nowhere_says_what_it_needs():
    found = plan(CONFIG, with_memory("lab", 2, 100_000), batch=8)
    assert found.ranked == ()
    with pytest.raises(
        ValueError, match="fits nowhere.*nearest is .* needs .* times what there is"
    ):
        _ = found.best
    assert "nearest is" in str(found)


def test_heads_that_do_not_divide_are_a_reason():
    found = plan(CONFIG.with_(width=30, heads=3), machine("lab", 2), batch=8)
    assert any("heads=3" in r.reason for r in found.rejected if "tensor 2" in r.what)


def test_real_devices_need_a_calibration():
    with pytest.raises(ValueError, match="calibrate"):
        plan(CONFIG, choose_devices("cpu", 2), batch=8)


def test_more_devices_than_the_range_are_refused():
    with pytest.raises(ValueError, match="65 devices are more than 64"):
        plan(CONFIG, machine("lab", 65), batch=8)


def test_eight_cards_that_nobody_here_owns_are_planned_for_as_predicted():
    found = plan(CONFIG, machine("a100-80-nvlink", 8), batch=16)
    assert found.best.provenance == "predicted:a100-80-nvlink-8x"
    assert found.best.choice.layout.ranks <= 8


def _run(rank, cases):
    for config, choice, batch, capacity in cases:
        ids = torch.randint(config.vocabulary, (batch, config.context))
        training = train_choice(config, choice, torch.device("cpu"))
        step = partial(training.step, ids, ids)
        step()
        held = [training.model, training.optimizer]
        record_step(step, hold=held, capacity_bytes=capacity)
    return len(cases)


def random_cases(seed):
    """What is proposed for random small models on devices that are about too small for them."""
    draw = random.Random(seed)
    for _ in range(8):
        heads = draw.randint(1, 3)
        config = ModelConfig(draw.randint(1, 5), 8 * heads, heads, context=16, vocabulary=64)
        batch = draw.choice([2, 4, 6, 8])
        one = plan(config, machine("lab", 1), batch=batch).best.peak_bytes
        capacity = int(draw.uniform(0.3, 1.2) * one)
        found = plan(config, with_memory("lab", 2, capacity), batch=batch)
        drawn = draw.sample(found.ranked, min(3, len(found.ranked)))
        kinds = {kind_of(prediction.choice): prediction for prediction in reversed(found.ranked)}
        for choice in dict.fromkeys(p.choice for p in [*found.ranked[:1], *drawn, *kinds.values()]):
            yield config, choice, batch, capacity


def kind_of(choice):
    """What the engine runs by other code."""
    layout = choice.layout
    return choice.schedule, layout.style, layout.sequence, choice.is_sharded, choice.levers


def test_what_is_proposed_for_random_models_and_devices_runs_and_fits():
    cases = list(random_cases(seed=0))
    kinds = {kind_of(choice) for _, choice, _, _ in cases}
    schedules, styles, sequences, sharded, levers = map(set, zip(*kinds, strict=True))
    assert {"1F1B", "interleaved", "zero bubble", "zero bubble V"} <= schedules
    assert {"hand", "dtensor"} <= styles and True in sequences and True in sharded
    assert {Levers(), Levers(checkpointing=True)} <= levers
    for ranks in (1, 2):
        proposed = [case for case in cases if case[1].layout.ranks == ranks]
        assert len(proposed) > 2
        assert run_ranks(_run, ranks, proposed) == [len(proposed)] * ranks

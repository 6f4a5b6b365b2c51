"""A plan held against what ran on virtual GPUs."""

from __future__ import annotations

import pytest
import torch
from spawned import run_ranks

from labkit.devices.inventory import virtual_devices
from labkit.measure.step_trace import read_traces
from labkit.models.config import ModelConfig
from labkit.parallel.planning.back_test import back_test
from labkit.parallel.planning.plan_training import trace_choice
from labkit.parallel.planning.planner import plan

CONFIG = ModelConfig(layers=4, width=32, heads=4, context=32)
DEVICES = virtual_devices("lab", 2)


def _traces(rank, choices):
    ids = torch.randint(256, (8, CONFIG.context), generator=torch.Generator().manual_seed(0))
    return [trace_choice(CONFIG, choice, ids, ids, devices=DEVICES) for choice in choices]


def test_the_plan_is_within_five_percent_and_its_first_choice_among_the_best():
    found = plan(CONFIG, DEVICES, batch=8)
    choices = [
        p.choice for p in found.ranked if p.choice.layout.ranks == 2 and not p.choice.is_sharded
    ]
    by_rank = run_ranks(_traces, 2, choices)
    readings = {
        choice: read_traces({rank: traces[i] for rank, traces in enumerate(by_rank)}, DEVICES)
        for i, choice in enumerate(choices)
    }
    tested = back_test(found, readings)
    assert len(tested.rows) == len(choices) > 4
    assert tested.worst_time_error < 0.05 and tested.worst_memory_error < 0.05
    assert 0 <= tested.first_choice_loss < 0.05
    assert len(tested.cells) == len(choices)


def test_what_the_plan_did_not_rank_is_refused():
    found = plan(CONFIG, DEVICES, batch=8)
    with pytest.raises(ValueError, match="ran nothing"):
        back_test(found, {})

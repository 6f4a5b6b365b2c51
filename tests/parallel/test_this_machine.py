"""The CPU at hand, learnt and timed: layouts over two ranks predicted from one rank's steps."""

from __future__ import annotations

import pytest
import torch
from spawned import run_ranks

from labkit.models.config import ModelConfig
from labkit.parallel.planning.back_test import back_test
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.planner import plan
from labkit.parallel.planning.this_machine import (
    CpuStep,
    learn_this_machine,
    least_disturbed,
    time_in_turn,
)
from labkit.parallel.sharding.layouts import Layout

CONFIG = ModelConfig(layers=2, width=64, heads=2, context=32)
ONE = Choice(Layout(microbatches=1, data_style="copies"))
TWO = Choice(Layout(pipeline=2, microbatches=4, data_style="copies"))


def batch():
    ids = torch.randint(256, (16, 32), generator=torch.Generator().manual_seed(0))
    return ids, ids


def _on_cores(rank):
    learnt = learn_this_machine(CONFIG, *batch(), microbatches=(1, 4))
    return *learnt, time_in_turn(CONFIG, [ONE, TWO], *batch(), enough=2, most_rounds=3)


def test_a_machine_is_learnt_from_single_ranks_and_predicts_layouts_over_two():
    by_rank = run_ranks(_on_cores, 2)
    here, rates, _ = by_rank[0]
    assert here.count == 2 and rates.lines["aten::addmm"][1] > 0
    counts = [len(steps[choice]) for _, _, steps in by_rank for choice in (ONE, TWO)]
    assert counts[:2] == counts[2:] and all(2 <= count <= 3 for count in counts)
    found = plan(CONFIG, here, batch=16, cost=rates.cost)
    quietest = least_disturbed({rank: steps for rank, (_, _, steps) in enumerate(by_rank)})
    tested = back_test(found, quietest.readings)
    assert {row.predicted.choice for row in tested.rows} == {ONE, TWO}
    # how close they come is claimed in notebook 31 where the cores are quiet; here only that both
    # are times of the same step
    assert all(0.1 < 1 + row.time_error < 4 for row in tested.rows)
    assert tested.worst_memory_error is None and "?" in tested.cells[0]


def test_the_fastest_step_counts_by_its_slowest_rank_and_tells_how_it_was_disturbed():
    first = {TWO: (CpuStep(1.0, 0.0), CpuStep(0.5, 0.05))}
    second = {TWO: (CpuStep(0.4, 0.0), CpuStep(0.8, 0.2))}
    joined = least_disturbed({0: first, 1: second})
    assert joined.readings[TWO].step_time_s == 0.8
    assert joined.waited == pytest.approx(0.05)  # the middle of 0, 0, 0.1 and 0.25
    unknown = {TWO: (CpuStep(1.0, None),)}
    assert least_disturbed({0: unknown, 1: unknown}).waited is None

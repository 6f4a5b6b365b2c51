"""Every schedule on real ranks against one device: loss, gradients, updated weights, buffers."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from spawned import run_ranks

from labkit.models.config import ModelConfig
from labkit.models.text import load_text
from labkit.models.transformer import Transformer, next_token_loss
from labkit.parallel.parity import compare, joined, training_snapshot
from labkit.parallel.pipelining.pipeline import Pipeline
from labkit.parallel.pipelining.stages import cut, even_block_ranges
from labkit.parallel.pipelining.torch_runtime import torch_runtime
from labkit.parallel.scheduling.schedules import gpipe, interleaved_one_f_one_b, naive, one_f_one_b
from labkit.parallel.scheduling.zero_bubble import zero_bubble, zero_bubble_v

CONFIG = ModelConfig(layers=8, width=8, heads=2, context=8)
M = 4


def schedules(p):
    """Every schedule, by a name of its own."""
    return {
        "naive": naive(p),
        "GPipe": gpipe(p, M),
        "1F1B": one_f_one_b(p, M),
        "1F1B, m < p": one_f_one_b(p, 2),
        "interleaved": interleaved_one_f_one_b(p, M, chunks=2),
        "zero bubble": zero_bubble(p, M),
        "zero bubble interleaved": zero_bubble(p, M, chunks=2),
        "zero bubble V": zero_bubble_v(p, M),
    }


NAMES = list(schedules(2))
COMPARED_WITH_TORCH = ["1F1B", "zero bubble interleaved", "zero bubble V"]


def stages_for(schedule, rank):
    ranges = even_block_ranges(CONFIG, schedule.num_stages)
    return cut(CONFIG, ranges, held=schedule.stages_of_rank(rank))


def batch():
    return load_text().batch(8, CONFIG.context, step=0)


def on_one_device():
    inputs, targets = batch()
    whole = Transformer(CONFIG)

    def loss_and_backward():
        loss = next_token_loss(whole(inputs), targets)
        loss.backward()
        return loss

    return training_snapshot([whole], loss_and_backward)


def _snapshots(rank, p):
    """Per schedule, this rank's snapshot; and with torch's runtime for some."""
    inputs, targets = batch()
    found = {}
    for name, schedule in schedules(p).items():
        pipe = Pipeline(stages_for(schedule, rank), schedule)
        modules = list(pipe.stages.values())
        found[name] = training_snapshot(modules, lambda pipe=pipe: pipe.step(inputs, targets))
    for name in COMPARED_WITH_TORCH if p == 2 else ():
        found[f"torch {name}"] = _torch_snapshot(rank, schedules(p)[name], inputs, targets)
    return found


def _torch_snapshot(rank, schedule, inputs, targets):
    stages = stages_for(schedule, rank)
    runtime = torch_runtime(
        stages, schedule, num_targets=targets.numel(), device=torch.device("cpu")
    )

    def loss_and_backward():
        losses = []
        last = {"target": targets, "losses": losses} if schedule.num_stages - 1 in stages else {}
        runtime.step(*((inputs,) if 0 in stages else ()), **last)
        return sum(losses) if losses else 0.0

    snapshot = training_snapshot(stages.values(), loss_and_backward)
    if schedule.num_stages - 1 not in stages:
        del snapshot["loss"]
    return snapshot


@cache
def reference():
    return on_one_device()


@cache
def snapshots(p):
    """By name, the snapshot of each of p ranks; started once per p."""
    by_rank = run_ranks(_snapshots, p, p)
    return {n: {r: found[n] for r, found in enumerate(by_rank)} for n in by_rank[0]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_pipeline_trains_as_one_device_does(p, name):
    parity = compare(reference(), joined(snapshots(p)[name]))
    assert parity.max_rel_error < 1e-5, str(parity)
    assert parity.compared == len(reference())


@pytest.mark.parametrize("name", COMPARED_WITH_TORCH)
def test_torchs_own_runtime_computes_the_same_from_the_same_actions(name):
    ours, theirs = joined(snapshots(2)[name]), joined(snapshots(2)[f"torch {name}"])
    assert compare(theirs, ours).max_rel_error < 1e-5

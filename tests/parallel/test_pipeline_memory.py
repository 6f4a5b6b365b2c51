"""Bytes of live tensors in a step: at most what torch's own schedules hold, on every rank."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from spawned import run_ranks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from labkit.measure.virtual.recorder import Recorder
from labkit.models.config import ModelConfig
from labkit.models.text import load_text
from labkit.models.transformer import next_token_loss
from labkit.parallel.pipelining.pipeline import Pipeline
from labkit.parallel.pipelining.stages import cut, even_block_ranges
from labkit.parallel.scheduling.schedules import gpipe, one_f_one_b

CONFIG = ModelConfig(layers=2, width=32, heads=2, context=32)
THEIRS = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
OURS = {"1F1B": one_f_one_b, "GPipe": gpipe}


def peak_bytes(step, stage):
    """Of a second step, with weights and without the first one's gradients."""
    step()
    stage.zero_grad()
    recorder = Recorder()
    recorder.hold(stage)
    with recorder:
        step()
    return recorder.take().peak_bytes


def _peaks(rank):
    found = {}
    for m in (4, 16):
        inputs, targets = load_text().batch(2 * m, CONFIG.context, step=0)
        for name in OURS:
            stage = cut(CONFIG, even_block_ranges(CONFIG, 2), held=[rank])[rank]
            pipe = Pipeline(stage, OURS[name](2, m))
            found["ours", name, m] = peak_bytes(
                lambda pipe=pipe, i=inputs, t=targets: pipe.step(i, t), stage
            )
            found["torch", name, m] = _torchs(rank, name, m, inputs, targets)
    return found


def _torchs(rank, name, m, inputs, targets):
    stage = cut(CONFIG, even_block_ranges(CONFIG, 2), held=[rank])[rank]
    built = PipelineStage(stage, rank, 2, torch.device("cpu"))
    schedule = THEIRS[name](built, m, loss_fn=next_token_loss)

    def step():
        mine = ((inputs,), {}) if rank == 0 else ((), {"target": targets, "losses": []})
        schedule.step(*mine[0], return_outputs=False, **mine[1])

    return peak_bytes(step, stage)


@cache
def peaks():
    return run_ranks(_peaks, 2)


@pytest.mark.parametrize("name", list(OURS))
def test_a_step_holds_at_most_what_torchs_own_schedule_holds(name):
    for found in peaks():
        for m in (4, 16):
            assert found["ours", name, m] <= found["torch", name, m]


def test_one_f_one_b_holds_no_more_for_four_times_the_microbatches():
    for found in peaks():
        # 24 more rows of ids are 6 KiB of inputs and 6 KiB of targets; an activation is 8 KiB
        assert found["ours", "1F1B", 16] - found["ours", "1F1B", 4] <= 12 * 1024

"""Predicted step time and memory of layouts, against the same layouts run on virtual GPUs."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from spawned import run_ranks

from labkit.devices.machines import machine
from labkit.measure.virtual.virtual_clock import play
from labkit.measure.virtual.virtual_step import record_step
from labkit.models.config import ModelConfig
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.layer_chains import LabChain
from labkit.parallel.planning.levers import Levers
from labkit.parallel.planning.plan_training import train_choice
from labkit.parallel.planning.predictor import predict_training
from labkit.parallel.sharding.layouts import Layout

CONFIG = ModelConfig(layers=4, width=32, heads=4, context=32)
BATCH = 8
CPU = torch.device("cpu")
BOTH = Levers(checkpointing=True, autocast=True)
Copies = partial(Layout, data_style="copies")
CHOICES = {
    1: [
        Choice(Layout(microbatches=1)),
        Choice(Layout(microbatches=1), levers=BOTH),
        Choice(Layout(microbatches=4)),
    ],
    2: [
        Choice(Layout(pipeline=2, microbatches=4)),
        Choice(Layout(pipeline=2, microbatches=4), "GPipe"),
        Choice(Layout(pipeline=2, microbatches=4), "interleaved 1F1B"),
        Choice(Layout(pipeline=2, microbatches=4), levers=Levers(checkpointing=True)),
        Choice(Copies(data=2, microbatches=1)),
        Choice(Layout(tensor=2, microbatches=1)),
        Choice(Layout(data=2, microbatches=1)),
    ],
    4: [
        Choice(Layout(pipeline=4, microbatches=8)),
        Choice(Copies(pipeline=2, data=2, microbatches=2)),
        Choice(Layout(pipeline=2, tensor=2, microbatches=2), levers=BOTH),
        Choice(Copies(data=2, tensor=2, microbatches=1)),
        Choice(Layout(pipeline=2, data=2, microbatches=2)),
    ],
}


def _recordings(rank, count):
    ids = torch.randint(256, (BATCH, CONFIG.context), generator=torch.Generator().manual_seed(0))
    found = []
    for choice in CHOICES[count]:
        training = train_choice(CONFIG, choice, CPU)
        step = partial(training.step, ids, ids.roll(1, 1))
        step()  # the optimizer's state is there from now on
        found.append(record_step(step, hold=[training.model, training.optimizer]))
    return found


@cache
def recordings(count):
    by_rank = run_ranks(_recordings, count, count)
    return dict(zip(CHOICES[count], zip(*by_rank, strict=True), strict=True))


CASES = [choice for count in CHOICES for choice in CHOICES[count]]


@pytest.mark.parametrize("choice", CASES, ids=str)
def test_a_predicted_step_takes_and_holds_what_the_same_step_does_on_virtual_gpus(choice):
    count = choice.layout.ranks
    ran, its_machine = recordings(count)[choice], machine("lab", count)
    predicted = predict_training(LabChain(CONFIG), choice, its_machine, BATCH)
    timeline = play(ran, its_machine)
    sharded = choice.is_sharded  # whose time has a formula of its own, tested in its own place
    rel = 0.15 if sharded else 0.05
    assert predicted.step_time_s == pytest.approx(timeline.step_time_s, rel=rel)
    if not sharded:
        assert predicted.bubble == pytest.approx(timeline.bubble, abs=0.05)
    for rank, recording in enumerate(ran):
        assert predicted.memory_of(rank).peak_bytes == pytest.approx(recording.peak_bytes, rel=0.05)


def test_parameters_and_optimizer_state_are_exact():
    choice = Choice(Layout(pipeline=2, microbatches=4))
    predicted = predict_training(LabChain(CONFIG), choice, machine("lab", 2), BATCH)
    values = sum(memory.parameters for memory in predicted.memory) // 4
    assert values == CONFIG.num_parameters
    tensors = 2 + 16 * CONFIG.layers + 3
    assert sum(m.optimizer for m in predicted.memory) == 8 * values + 4 * tensors


@pytest.mark.parametrize(
    "choice, batch, message",
    [
        (Choice(Layout(data=2, microbatches=1), levers=BOTH), 8, "FSDP2 with checkpointing, bf16"),
        (Choice(Layout(pipeline=4, microbatches=4)), 8, "needs 4 devices, 'lab-2x.* has 2"),
        (Choice(Layout(pipeline=2, microbatches=4)), 6, "batch=6 rows must be divisible"),
        (Choice(Layout(tensor=2, tensor_style="dtensor", microbatches=1)), 8, "by hand"),
        (Choice(Layout(pipeline=2, microbatches=2), "interleaved 1F1B"), 3, "batch=3 rows"),
    ],
)
def test_what_is_out_of_range_is_refused_with_the_reason(choice, batch, message):
    with pytest.raises(ValueError, match=message):
        predict_training(LabChain(CONFIG), choice, machine("lab", 2), batch)


def test_a_choice_that_no_engine_runs_is_refused():
    with pytest.raises(ValueError, match="schedule='ZB' is unknown"):
        Choice(Layout(pipeline=2), "ZB")
    with pytest.raises(ValueError, match="whose stages are divided runs 1F1B"):
        Choice(Layout(pipeline=2, tensor=2), "GPipe")
    with pytest.raises(ValueError, match="takes its batch in one piece"):
        Choice(Layout(tensor=2, microbatches=4))

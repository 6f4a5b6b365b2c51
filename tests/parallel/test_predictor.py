"""Predicted step time and memory of layouts, against the same layouts run on virtual GPUs."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from spawned import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.devices.machines import machine
from labkit.measure.memory import held_bytes
from labkit.measure.virtual.virtual_clock import play
from labkit.measure.virtual.virtual_step import record_step
from labkit.models.config import ModelConfig, preset
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.gathered_memory import GatheredMemory
from labkit.parallel.planning.layer_chains import LabChain
from labkit.parallel.planning.levers import Levers
from labkit.parallel.planning.plan_training import train_choice
from labkit.parallel.planning.predictor import predict_training
from labkit.parallel.planning.rank_groups import rank_grid
from labkit.parallel.sharding.layouts import AXES, Layout

CONFIG = ModelConfig(layers=4, width=32, heads=4, context=32)
BATCH = 8
CPU = torch.device("cpu")
BOTH = Levers(checkpointing=True, autocast=True)
CHAIN = LabChain(CONFIG)
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
        Choice(Layout(pipeline=2, microbatches=4), "interleaved"),
        Choice(Layout(pipeline=2, microbatches=4), levers=Levers(checkpointing=True)),
        Choice(Layout(pipeline=2, microbatches=4), "zero bubble", Levers(autocast=True)),
        Choice(Layout(pipeline=2, microbatches=4), "zero bubble V"),
        Choice(Copies(data=2, microbatches=1)),
        Choice(Layout(tensor=2, microbatches=1)),
        Choice(Layout(tensor=2, microbatches=1, tensor_style="dtensor"), levers=BOTH),
        Choice(Layout(tensor=2, microbatches=1, sequence=True)),
        Choice(Layout(data=2, microbatches=1)),
        Choice(Layout(data=2, microbatches=1), levers=BOTH),
    ],
    4: [
        Choice(Layout(pipeline=4, microbatches=8)),
        Choice(Layout(pipeline=4, microbatches=8), "zero bubble"),
        Choice(Copies(pipeline=2, data=2, microbatches=2)),
        Choice(Copies(pipeline=2, data=2, microbatches=4), "zero bubble V"),
        Choice(Layout(pipeline=2, tensor=2, microbatches=2), levers=BOTH),
        Choice(Copies(data=2, tensor=2, microbatches=1)),
        Choice(Copies(data=2, tensor=2, microbatches=1, order=("tensor", "pipeline", "data"))),
        Choice(Layout(pipeline=2, tensor=2, tensor_style="dtensor", microbatches=2)),
        Choice(Layout(data=2, tensor=2, microbatches=1)),
        Choice(Layout(data=2, tensor=2, sequence=True, microbatches=1)),
        Choice(Layout(data=4, microbatches=1)),
        Choice(Layout(pipeline=2, data=2, microbatches=2)),
        Choice(Layout(pipeline=2, data=2, microbatches=4), levers=Levers(checkpointing=True)),
    ],
}


def _recordings(rank, count):
    ids = torch.randint(256, (BATCH, CONFIG.context), generator=torch.Generator().manual_seed(0))
    found, state = [], []
    for choice in CHOICES[count]:
        training = train_choice(CONFIG, choice, CPU)
        step = partial(training.step, ids, ids.roll(1, 1))
        step()  # the optimizer's state is there from now on
        found.append(record_step(step, hold=[training.model, training.optimizer]))
        held = held_bytes(training.model, training.optimizer)
        state.append((held.parameters, held.optimizer))
    return found, state


@cache
def ran_on(count):
    return run_ranks(_recordings, count, count)


def recordings(count):
    by_rank = [found for found, _ in ran_on(count)]
    return dict(zip(CHOICES[count], zip(*by_rank, strict=True), strict=True))


def state(count):
    by_rank = [held for _, held in ran_on(count)]
    return dict(zip(CHOICES[count], zip(*by_rank, strict=True), strict=True))


CASES = [choice for count in CHOICES for choice in CHOICES[count]]


def named(choice):
    layout = choice.layout
    style = f" {layout.style}" if layout.tensor > 1 else ""
    return f"{choice}{style}{'' if layout.order == AXES else ' far'}"


@pytest.mark.parametrize("choice", CASES, ids=named)
def test_a_predicted_step_takes_and_holds_what_the_same_step_does_on_virtual_gpus(choice):
    count = choice.layout.ranks
    ran = recordings(count)[choice]
    for its_machine in (machine("lab", count), machine("a6000-nvlink", count).scaled(8)):
        predicted = predict_training(CHAIN, choice, its_machine, BATCH)
        timeline = play(ran, its_machine)
        assert predicted.step_time_s == pytest.approx(timeline.step_time_s, rel=0.05)
        assert predicted.bubble == pytest.approx(timeline.bubble, abs=0.05)
    for rank, recording in enumerate(ran):
        assert predicted.memory_of(rank).peak_bytes == pytest.approx(recording.peak_bytes, rel=0.05)


def test_the_slow_axis_on_the_slow_link_costs_and_the_order_decides_which_it_is():
    bridged = machine("a6000-nvlink", 4).scaled(8)
    near = Layout(data=2, tensor=2, microbatches=1)
    far = near.with_(order=("tensor", "pipeline", "data"))
    assert rank_grid(near) == (((0, 1), (2, 3)),)
    assert rank_grid(far) == (((0, 2), (1, 3)),)
    chain = LabChain(preset("tiny").model)
    times = [predict_training(chain, Choice(x), bridged, 16).step_time_s for x in (near, far)]
    assert times[0] < 0.97 * times[1]


def test_tensor_parallelism_loses_over_pcie_and_wins_over_nvlink():
    """The same card, and the lab's model standing for one of width 512."""
    chain = LabChain(preset("tiny").model)

    def speedup(name):
        pair = machine(name, 2).scaled(4)
        choices = [Choice(Layout(microbatches=1)), Choice(Layout(tensor=2, microbatches=1))]
        alone_s, two_s = (predict_training(chain, c, pair, 16).step_time_s for c in choices)
        return alone_s / two_s

    assert speedup("a6000-pcie") < 0.99 and speedup("a6000-nvlink") > 1.01
    assert speedup("a100-80-nvlink") > 1.2


@pytest.mark.parametrize(
    "choice",
    [
        Choice(Layout(tensor=2, microbatches=1)),
        Choice(Layout(tensor=2, sequence=True, microbatches=1)),
    ],
    ids=named,
)
def test_the_links_are_used_as_long_as_predicted(choice):
    its_machine = machine("a6000-nvlink", 2).scaled(8)
    spans = play(recordings(2)[choice], its_machine).spans
    ran_s = sum(s.duration_s for s in spans if s.rank == 0 and s.stream.startswith("ring"))
    predicted = predict_training(CHAIN, choice, its_machine, BATCH)
    joining_s = 8 * CONFIG.layers * its_machine.profiles[0].message_overhead_s  # at most
    assert 0.99 * ran_s < predicted.collective_s[0] < 1.01 * ran_s + joining_s


def test_what_fsdp_holds_is_the_sum_done_by_hand():
    alone = GatheredMemory((3, 10, 10, 5), (True, False, False, True), shards=2, kept=False)
    forward = [alone.forward(place, gathered=False) for place in range(4)]
    assert forward == [8 + 8, 8 + 10 + 10, 8 + 10 + 10, 8]  # with the flat buffers they came in
    backward = [alone.backward(place, gathered=False) for place in (3, 2, 1, 0)]
    # the next block on its way; the block; gradients of the last one that leave
    assert backward == [8, 8 + 10 + 10, 8 + 10 + 10, 8 + 10]
    assert alone.scatter(2, gathered=False) == 8 + 10 + 2 * 10 + 5
    assert alone.scatter_of_rest() == 8 + 4
    stage = GatheredMemory((3, 10, 10), (True, False, False), shards=2, kept=True)
    assert [stage.forward(i, gathered=False) for i in range(3)] == [3 + 3, 3 + 20, 3 + 30]
    assert stage.forward(0, gathered=True) == stage.backward(2, gathered=True) == 3 + 20


def test_most_of_what_fsdp_gathers_hides_behind_computing():
    choice = Choice(Layout(data=2, microbatches=1))
    step = predict_training(CHAIN, choice, machine("a6000-pcie", 2).scaled(8), BATCH)
    shown_s = step.step_time_s - step.timeline.busy_s(0)
    assert 0.1 * step.collective_s[0] < shown_s < 0.7 * step.collective_s[0]


def test_a_rank_predicts_no_divided_layer():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ValueError, match="predict before init_process_group"):
            choice = Choice(Layout(tensor=2, microbatches=1))
            predict_training(LabChain(CONFIG), choice, machine("lab", 2), BATCH)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("choice", CASES, ids=named)
def test_weights_and_optimizer_state_are_exact(choice):
    held = state(choice.layout.ranks)[choice]
    predicted = predict_training(CHAIN, choice, machine("lab", choice.layout.ranks), BATCH)
    for rank, (parameters, optimizer) in enumerate(held):
        memory = predicted.memory_of(rank)
        assert (memory.parameters, memory.optimizer) == (parameters, optimizer)


@pytest.mark.parametrize(
    "choice, batch, message",
    [
        (Choice(Layout(pipeline=4, microbatches=4)), 8, "needs 4 devices, 'lab-2x.* has 2"),
        (Choice(Layout(pipeline=2, microbatches=4)), 6, "batch=6 rows must be divisible"),
        (Choice(Layout(tensor=3, microbatches=1)), 8, "heads=4 .* must be divisible by t=3"),
        (Choice(Layout(pipeline=2, microbatches=2), "interleaved"), 3, "batch=3 rows"),
    ],
)
def test_what_is_out_of_range_is_refused_with_the_reason(choice, batch, message):
    with pytest.raises(ValueError, match=message):
        predict_training(LabChain(CONFIG), choice, machine("lab", 2), batch)


def test_a_choice_that_no_engine_runs_is_refused():
    with pytest.raises(ValueError, match="schedule='ZB' is unknown"):
        Choice(Layout(pipeline=2), "ZB")
    with pytest.raises(ValueError, match="W would run a layer's forward again"):
        Choice(Layout(pipeline=2), "zero bubble", Levers(checkpointing=True))
    with pytest.raises(ValueError, match="whose stages are divided runs 1F1B"):
        Choice(Layout(pipeline=2, tensor=2), "GPipe")
    with pytest.raises(ValueError, match="takes its batch in one piece"):
        Choice(Layout(tensor=2, microbatches=4))

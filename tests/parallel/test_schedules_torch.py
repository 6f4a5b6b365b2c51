"""Our orders against PyTorch's own, built for any p in one process on the "fake" backend."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.parallel.scheduling.schedules import Action, gpipe, interleaved_one_f_one_b, one_f_one_b
from labkit.parallel.scheduling.zero_bubble import zero_bubble, zero_bubble_v

SIZES = [(1, 2), (2, 2), (2, 4), (2, 6), (3, 3), (4, 4), (4, 8), (4, 10)]


@contextmanager
def fake_group(rank, world_size):
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_stage(index, num_stages):
    return PipelineStage(nn.Linear(2, 2), index, num_stages, torch.device("cpu"))


def planned_order(schedule_class, p, m, stages_of_rank_0, num_stages):
    """All ranks' compute actions, as PyTorch's multi-stage schedules plan them."""
    with fake_group(0, p):
        stages = [make_stage(s, num_stages) for s in stages_of_rank_0]
        plan = schedule_class(stages, m, loss_fn=nn.MSELoss()).pipeline_order
    return [[str(a) for a in plan[rank] if a is not None] for rank in range(p)]


def run_order(schedule_class, rank, p, m):
    """The chunks that PyTorch's single-stage schedule really computes on `rank`, in order."""
    calls = []
    with fake_group(rank, p):
        stage = make_stage(rank, p)
        schedule = schedule_class(stage, m, loss_fn=nn.MSELoss())
        with (
            patch.object(schedule, "_initialize_stage"),
            patch.object(schedule, "_maybe_compute_loss"),
            patch.object(schedule, "_maybe_get_loss"),
            patch.object(schedule, "_update_losses"),
            patch.multiple(
                stage,
                get_fwd_recv_ops=lambda i: [],
                get_fwd_send_ops=lambda i: [],
                get_bwd_recv_ops=lambda i: [],
                get_bwd_send_ops=lambda i: [],
                perform_reduce_grad=lambda scale: None,
                forward_one_chunk=lambda i, *_, **__: calls.append(f"{rank}F{i}"),
                backward_one_chunk=lambda i, **__: calls.append(f"{rank}B{i}"),
            ),
        ):
            schedule._step_microbatches([()] * m, [{}] * m, [None] * m)
    return calls


def orders(schedule):
    return [[str(action) for action in order] for order in schedule.actions]


@pytest.mark.parametrize("p, m", SIZES)
def test_gpipe_and_one_f_one_b_compute_in_the_order_that_torch_runs(p, m):
    for ours, theirs in [(gpipe, ScheduleGPipe), (one_f_one_b, Schedule1F1B)]:
        assert orders(ours(p, m)) == [run_order(theirs, rank, p, m) for rank in range(p)]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("p, m", SIZES)
def test_interleaved_schedules_are_torchs_plan(p, m, chunks):
    pairs = [
        (interleaved_one_f_one_b, ScheduleInterleaved1F1B),
        (zero_bubble, ScheduleInterleavedZeroBubble),
    ]
    for ours, theirs in pairs:
        local = [chunk * p for chunk in range(chunks)]
        plan = planned_order(theirs, p, m, local, p * chunks)
        assert orders(ours(p, m, chunks=chunks)) == plan


@pytest.mark.parametrize("p, m", SIZES)
def test_zero_bubble_v_is_torchs_plan(p, m):
    plan = planned_order(ScheduleZBVZeroBubble, p, m, [0, 2 * p - 1], 2 * p)
    assert orders(zero_bubble_v(p, m)) == plan


@pytest.mark.parametrize("p, m", [*SIZES, (4, 1), (4, 3), (3, 7)])
@pytest.mark.parametrize("build", [gpipe, one_f_one_b, zero_bubble, zero_bubble_v])
def test_torchs_runtime_finds_a_place_for_every_message_of_our_schedules(build, p, m):
    schedule = build(p, m)
    with fake_group(0, p):
        stages = [make_stage(s, schedule.num_stages) for s in schedule.stages_of_rank(0)]
        runtime = _PipelineScheduleRuntime(stages, m, loss_fn=nn.MSELoss())
        order = {r: [_Action.from_str(str(a)) for a in o] for r, o in enumerate(schedule.actions)}
        runtime._prepare_schedule_with_comms(order)
        lowered = runtime.pipeline_order_with_comms
    computed = [[str(a) for a in lowered[r] if a.is_compute_op] for r in range(p)]
    assert computed == orders(schedule)


def test_torch_reads_our_spelling_of_an_action():
    for kind in "FBIW":
        parsed = _Action.from_str(str(Action(12, kind, 3)))
        assert (parsed.stage_index, parsed.computation_type.value, parsed.microbatch_index) == (
            12,
            kind,
            3,
        )

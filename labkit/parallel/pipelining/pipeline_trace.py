"""Build a pipeline of the lab's transformer on the ranks, run its step, and trace it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from labkit.devices.backends import backend
from labkit.devices.inventory import DeviceSet
from labkit.measure.step_trace import StepTrace, trace_step
from labkit.models.config import ModelConfig
from labkit.parallel.parity import gradients, joined
from labkit.parallel.pipelining.pipeline import Pipeline
from labkit.parallel.pipelining.stages import cut, even_block_ranges
from labkit.parallel.scheduling.schedules import Schedule


def lab_pipeline(
    config: ModelConfig,
    schedule: Schedule,
    *,
    devices: DeviceSet,
    ranges: Sequence[range] | None = None,
) -> Pipeline:
    """This rank's part of the lab's transformer, on its device; all ranks call it together.

    Args:
        schedule: for as many ranks as there are.
        ranges: layer numbers of each stage, the embedding 0; None shares the blocks out evenly.
    """
    ranges = ranges or even_block_ranges(config, schedule.num_stages)
    held = schedule.stages_of_rank(dist.get_rank())
    device = backend(devices.kind).current_device()
    stages = cut(config, ranges, held=held)
    return Pipeline({number: stage.to(device) for number, stage in stages.items()}, schedule)


def step_once(pipe: Pipeline, inputs: Tensor, targets: Tensor) -> float:
    """One step of a batch that every rank has; each end of the pipeline takes what it needs."""
    rank, ends = dist.get_rank(), pipe.schedule.rank_of_stage
    return pipe.step(
        inputs.to(pipe.device) if rank == ends[0] else None,
        targets.to(pipe.device) if rank == ends[-1] else None,
    )


def trace_pipeline(
    config: ModelConfig,
    schedule: Schedule,
    inputs: Tensor,
    targets: Tensor,
    *,
    devices: DeviceSet,
    ranges: Sequence[range] | None = None,
    steps: int = 5,
) -> StepTrace:
    """Build the pipeline and trace one step of it; the arguments are those of the two above.

    Args:
        inputs, targets: the batch, (B, T) each.
        steps: timed calls on real devices.
    """
    pipe = lab_pipeline(config, schedule, devices=devices, ranges=ranges)
    inputs, targets = inputs.to(pipe.device), targets.to(pipe.device)
    return trace_step(
        partial(step_once, pipe, inputs, targets),
        devices=devices,
        hold=list(pipe.stages.values()),
        steps=steps,
        group=dist.group.WORLD,
    )


def pipeline_gradients(pipe: Pipeline) -> dict[str, Tensor]:
    """The gradients of all stages of this rank by full name."""
    return joined({number: gradients(stage) for number, stage in pipe.stages.items()})

"""The same schedule on PyTorch's own runtime, to compare `Pipeline` with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from labkit.parallel.pipelining.losses import LossFunction, token_losses
from labkit.parallel.scheduling.schedules import Schedule


def torch_runtime(
    stages: Mapping[int, nn.Module],
    schedule: Schedule,
    *,
    num_targets: int,
    device: torch.device,
    loss_fn: LossFunction = token_losses,
    group: dist.ProcessGroup | None = None,
) -> _PipelineScheduleRuntime:
    """PyTorch's schedule runtime, fed with our actions; it adds sends and receives itself.

    Call `runtime.step(inputs)` on the rank of the first stage and `runtime.step(target=targets,
    losses=[])` on that of the last; the losses then sum to the mean over the batch.

    Args:
        stages: those of this rank, by number.
        num_targets: of the whole batch. The sum of losses is divided by it once; torch's own
            scaling is off, since it divides accumulated gradients again at every step.
        loss_fn: one loss per target.
    """
    built = [
        PipelineStage(stages[stage], stage, schedule.num_stages, device, group=group)
        for stage in sorted(stages)
    ]

    def share_of_mean(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(outputs, targets).sum() / num_targets

    runtime = _PipelineScheduleRuntime(
        built, schedule.num_microbatches, loss_fn=share_of_mean, scale_grads=False
    )
    runtime._prepare_schedule_with_comms(
        {r: [_Action.from_str(str(a)) for a in o] for r, o in enumerate(schedule.actions)}
    )
    return runtime

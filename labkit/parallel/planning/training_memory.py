"""The memory of one rank in a predicted step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from labkit.parallel.planning.memory_plan import DeviceMemory, pipeline_memory, step_memory
from labkit.parallel.scheduling.rank_program import rank_program

if TYPE_CHECKING:
    from labkit.parallel.planning.training_step import TrainingStep


def rank_memory(step: TrainingStep, rank: int) -> DeviceMemory:
    """Of a rank of the pipeline, and of all that share its layers."""
    held = {s: step.stages[s] for s in step.schedule.stages_of_rank(rank)}
    sizes = step.sizes(rank)
    # a weight that two layers share is held once where one rank has both
    twice = step.chain.tied_bytes if step.schedule.num_ranks == 1 else 0
    # views of the whole batch keep all of it alive, also where a rank trains on a part
    inputs, targets = step.chain.batch_bytes(step.batch)
    running = pipeline_memory(
        rank_program(step.schedule, rank),
        held,
        batch_bytes=targets + (inputs if 0 in held else 0),
        optimizer_bytes=step.optimizer.state_of(sizes) - 2 * twice,
    )
    return step_memory(
        replace(running, parameters=running.parameters - twice),
        gradient_bytes=sum(stage.gradient_bytes for stage in held.values()) - twice,
        optimizer_temporary=step.optimizer.temporary_of(sizes),
        summed=step.layout.data > 1 and not step.choice.is_sharded,
    )

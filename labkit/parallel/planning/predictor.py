"""Step time, bubble, communication and memory of any layout, before anything runs.

Each layer's operators are known from a rehearsal, what each takes from the device's profile or from
rates learnt on this machine. They are summed into the actions of a schedule, and the schedule is
replayed with the machine's links; with FSDP2, which gathers while it computes, the ranks' programs
are played on the virtual clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.devices.profiles import Machine
from labkit.measure.timeline import Timeline
from labkit.measure.virtual.virtual_clock import modelled_cost
from labkit.measure.virtual.virtual_program import OperatorCost
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.layer_chains import LabChain, LayerChain
from labkit.parallel.planning.memory_plan import DeviceMemory
from labkit.parallel.planning.optimizer_rehearsal import MakeOptimizer, adamw
from labkit.parallel.planning.rank_groups import all_ranks, rank_grid
from labkit.parallel.planning.sharded_step import play_sharded
from labkit.parallel.planning.training_step import TrainingStep
from labkit.parallel.scheduling.replay import replay
from labkit.parallel.scheduling.schedules import Schedule


@dataclass(frozen=True)
class Prediction:
    """A training step of one choice.

    Attributes:
        choice, batch: what was predicted, for so many rows.
        timeline: of one step; one row for each rank of the pipeline, which stands for all that
            share its layers.
        collective_s, message_s: by rank of the pipeline, time of its collectives and of its
            messages on their links. Messages, and FSDP2's collectives, may overlap with computing.
        waited_s: by rank, the part of ``collective_s`` that the timeline's actions contain.
        memory: by rank of the pipeline.
        provenance: always begins with ``predicted``.
    """

    choice: Choice
    batch: int
    timeline: Timeline
    collective_s: tuple[float, ...]
    message_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    memory: tuple[DeviceMemory, ...]
    provenance: str

    @property
    def step_time_s(self) -> float:
        return self.timeline.step_time_s

    @property
    def bubble(self) -> float:
        """Share of all rank time in which nothing is computed, collectives counted."""
        waited = sum(self.waited_s) / len(self.waited_s) / self.step_time_s
        return self.timeline.bubble + waited

    @property
    def communication_s(self) -> tuple[float, ...]:
        """By rank of the pipeline, collectives and messages together."""
        return tuple(map(sum, zip(self.collective_s, self.message_s, strict=True)))

    @property
    def peak_bytes(self) -> int:
        """Of the device that holds most."""
        return max(memory.peak_bytes for memory in self.memory)

    def memory_of(self, rank: int) -> DeviceMemory:
        """Of a rank of the whole layout, by its number in the mesh."""
        grid = rank_grid(self.choice.layout)
        return next(m for m, held in zip(self.memory, grid, strict=True) if rank in all_ranks(held))


def predict_training(
    chain: LayerChain,
    choice: Choice,
    machine: Machine,
    batch: int,
    *,
    cost: OperatorCost = modelled_cost,
    make_optimizer: MakeOptimizer = adamw,
) -> Prediction:
    """Predict a step of AdamW, or of another element-wise optimizer.

    Args:
        machine: its first devices run the ranks.
        batch: rows of the whole batch.
        cost: seconds of an operator; ``OperatorRates.cost`` for the machine at hand.

    Raises:
        ValueError: the choice is none that the engine runs, or none that is predicted.
    """
    check_choice(chain, choice, batch)
    if choice.layout.ranks > machine.count:
        raise ValueError(
            f"{choice.layout} needs {choice.layout.ranks} devices, {machine.name!r} has "
            f"{machine.count}"
        )
    return predicted(TrainingStep(chain, choice, machine, batch, cost, make_optimizer))


def predicted(step: TrainingStep) -> Prediction:
    """Time a step."""
    label = f"predicted:{step.machine.name}"
    waited_s = collective_s = step.waited_s
    if step.choice.is_sharded:
        timeline, beside_s = play_sharded(step, label)
        collective_s = tuple(map(sum, zip(waited_s, beside_s, strict=True)))
    else:
        timeline = replay(step.schedule, step.costs(), provenance=label).timeline
    return Prediction(
        step.choice,
        step.batch,
        timeline,
        collective_s,
        step.message_s,
        waited_s,
        step.memory,
        label,
    )


def check_choice(chain: LayerChain, choice: Choice, batch: int) -> None:
    """Refuse what the engine would refuse, and what is outside the predictor's range.

    Raises:
        ValueError: the reason, in words.
    """
    layout = choice.layout
    if isinstance(chain, LabChain):
        layout.check(chain.config, batch)
    if layout.tensor > 1 and chain.cannot_divide:
        raise ValueError(f"tensor={layout.tensor}: {chain.cannot_divide}")
    if chain.batch_dependent and layout.data * layout.microbatches > 1:
        raise ValueError(
            f"{chain.batch_dependent[0]} takes its statistics from the rows it sees, so "
            f"data={layout.data} and microbatches={layout.microbatches} would change results; use "
            "LayerNorm or GroupNorm, or freeze it with eval()"
        )
    if chain.batch_dependent and choice.levers.checkpointing:
        raise ValueError(
            f"{chain.batch_dependent[0]} updates its running statistics in each forward, and "
            "checkpointing runs it twice; leave checkpointing out, or freeze it with eval()"
        )
    if choice.is_sharded and not isinstance(chain, LabChain):
        raise ValueError("FSDP2 divides the lab's transformer; for your own blocks use copies")
    schedule = choice.built_schedule()
    stages = schedule.num_stages
    most = chain.config.layers if isinstance(chain, LabChain) else len(chain.names)
    if stages > most:
        raise ValueError(f"{stages} stages need a layer each, there are {most}")
    _check_everyone_trains(chain, schedule)
    pieces = layout.data * layout.microbatches
    if batch % pieces:
        raise ValueError(
            f"batch={batch} rows must be divisible by data={layout.data} times "
            f"microbatches={layout.microbatches}; try batch={batch - batch % pieces or pieces}"
        )


def _check_everyone_trains(chain: LayerChain, schedule: Schedule) -> None:
    """Refuse a rank whose layers have no weights to train: an optimizer takes no empty list."""
    ranges = chain.stage_ranges(schedule.num_stages)
    for rank in range(schedule.num_ranks):
        held = [layer for stage in schedule.stages_of_rank(rank) for layer in ranges[stage]]
        if chain.untrained.issuperset(held):
            listed = ", ".join(chain.names[layer] for layer in held)
            raise ValueError(
                f"rank {rank} of the pipeline would hold {listed} and nothing to train; put layers "
                "without weights into one block with one that has some"
            )

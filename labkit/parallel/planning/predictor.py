"""Step time, bubble, communication and memory of any layout, before anything runs.

Each layer's operators are known from a rehearsal, what each takes from the device's profile or from
rates learnt on this machine. They are summed into the actions of a schedule, and the schedule is
replayed with the machine's links.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.devices.profiles import Machine
from labkit.measure.timeline import Span, Timeline
from labkit.measure.virtual.virtual_clock import modelled_cost
from labkit.measure.virtual.virtual_program import OperatorCost
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.layer_chains import LabChain, LayerChain
from labkit.parallel.planning.memory_plan import DeviceMemory
from labkit.parallel.planning.optimizer_rehearsal import MakeOptimizer, adamw
from labkit.parallel.planning.step_prediction import predict_step_s
from labkit.parallel.planning.training_step import TrainingStep
from labkit.parallel.scheduling.replay import replay


@dataclass(frozen=True)
class Prediction:
    """A training step of one choice.

    Attributes:
        choice, batch: what was predicted, for so many rows.
        timeline: of one step; one row for each rank of the pipeline, which stands for all that
            share its layers.
        collective_s, message_s: by rank of the pipeline, time that it waits in collectives, and
            time of its messages on their links, much of which overlaps with computing. The first is
            None for FSDP2, whose gathering and computing are not told apart: then neither
            ``bubble`` nor ``communication_s`` is known, and the timeline is one span.
        memory: by rank of the pipeline.
        provenance: always begins with ``predicted``.
    """

    choice: Choice
    batch: int
    timeline: Timeline
    collective_s: tuple[float, ...] | None
    message_s: tuple[float, ...]
    memory: tuple[DeviceMemory, ...]
    provenance: str

    @property
    def step_time_s(self) -> float:
        return self.timeline.step_time_s

    @property
    def bubble(self) -> float | None:
        """Share of all rank time in which nothing is computed, collectives counted."""
        if self.collective_s is None:
            return None
        waited = sum(self.collective_s) / len(self.collective_s) / self.step_time_s
        return self.timeline.bubble + waited

    @property
    def communication_s(self) -> tuple[float, ...] | None:
        """By rank of the pipeline, collectives and messages together."""
        if self.collective_s is None:
            return None
        return tuple(map(sum, zip(self.collective_s, self.message_s, strict=True)))

    @property
    def peak_bytes(self) -> int:
        """Of the device that holds most."""
        return max(memory.peak_bytes for memory in self.memory)

    def memory_of(self, rank: int) -> DeviceMemory:
        """Of a rank of the whole layout, by its number in the mesh."""
        layout = self.choice.layout
        return self.memory[rank // (layout.data * layout.tensor)]


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
    """Replay a step."""
    label = f"predicted:{step.machine.name}"
    if step.choice.is_sharded:
        return _predicted_sharded(step, label)
    timeline = replay(step.schedule, step.costs(), provenance=label).timeline
    return Prediction(
        step.choice, step.batch, timeline, step.collective_s, step.message_s, step.memory, label
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
    if choice.is_sharded and not isinstance(chain, LabChain):
        raise ValueError("FSDP2 divides the lab's transformer; for your own blocks use copies")
    if choice.is_sharded and str(choice.levers):
        raise ValueError(f"FSDP2 with {choice.levers} is not predicted; use copies, or no lever")
    as_dtensors = layout.tensor > 1 and layout.style == "dtensor"
    if layout.sequence or (as_dtensors and not choice.is_sharded):
        raise ValueError(
            "DTensors run other operators than layers by hand, which are not predicted; use "
            "tensor_style='hand'"
        )
    stages = choice.built_schedule().num_stages
    most = chain.config.layers if isinstance(chain, LabChain) else len(chain.names)
    if stages > most:
        raise ValueError(f"{stages} stages need a layer each, there are {most}")
    pieces = layout.data * layout.microbatches
    if batch % pieces:
        raise ValueError(
            f"batch={batch} rows must be divisible by data={layout.data} times "
            f"microbatches={layout.microbatches}; try batch={batch - batch % pieces or pieces}"
        )


def _predicted_sharded(step: TrainingStep, label: str) -> Prediction:
    """FSDP2 gathers while it computes, which a replay of actions does not show: one span."""
    step_s = predict_step_s(step.chain.config, step.layout, step.machine, step.batch)
    ranks = range(step.schedule.num_ranks)
    spans = tuple(Span(rank, 0.0, step_s, "step", "compute") for rank in ranks)
    timeline = Timeline(spans, len(ranks), label)
    return Prediction(step.choice, step.batch, timeline, None, step.message_s, step.memory, label)

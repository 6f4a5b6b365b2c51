"""One training step of a choice on a machine: what each action takes and what each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from labkit.devices.profiles import Machine, Profile
from labkit.measure.virtual.collective_costs import collective_s
from labkit.measure.virtual.recording import Event
from labkit.measure.virtual.virtual_program import OperatorCost
from labkit.parallel.pipelining.stages import even_block_ranges, even_ranges
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.layer_chains import LabChain, LayerChain
from labkit.parallel.planning.memory_plan import DeviceMemory, pipeline_memory, step_memory
from labkit.parallel.planning.optimizer_rehearsal import MakeOptimizer, rehearse_optimizer
from labkit.parallel.planning.stage_memory import StageMemory
from labkit.parallel.scheduling.messages import needed_by
from labkit.parallel.scheduling.rank_program import rank_program
from labkit.parallel.scheduling.replay import StepCosts, receiving_rank
from labkit.parallel.scheduling.schedules import Action, Schedule

VALUE_BYTES = 4


class TrainingStep:
    """The parts of one prediction; the arguments, which are checked, are `predict_training`'s."""

    def __init__(
        self,
        chain: LayerChain,
        choice: Choice,
        machine: Machine,
        batch: int,
        cost: OperatorCost,
        make_optimizer: MakeOptimizer,
    ) -> None:
        self.chain, self.choice, self.machine, self.batch = chain, choice, machine, batch
        self.cost, self.layout = cost, choice.layout
        self.optimizer = rehearse_optimizer(make_optimizer)
        self.schedule = choice.built_schedule()
        self._first_backwards = _first_backwards(self.schedule)
        self._known_s: dict[tuple, float] = {}
        self._known_events_s: dict[tuple, float] = {}
        self.rows = batch // (self.layout.data * self.layout.microbatches)
        self.ranges = stage_ranges(chain, self.schedule.num_stages)
        whole, shards = choice.in_one_piece, self.layout.data if choice.is_sharded else 1
        self.stages = [
            StageMemory(
                tuple(
                    chain.profile(i, self.rows, choice.levers, self.layout.tensor, whole)
                    for i in held
                ),
                shards,
            )
            for held in self.ranges
        ]

    @property
    def collective_s(self) -> tuple[float, ...]:
        """By rank of the pipeline: collectives of tensor ranks, and summing copies' gradients."""
        return tuple(
            sum(map(self._tensor_sums_s, order)) + self._data_sum_s(rank)
            for rank, order in enumerate(self.schedule.actions)
        )

    @property
    def message_s(self) -> tuple[float, ...]:
        """By rank of the pipeline, time of its messages on their links."""
        return tuple(
            sum(self._transfer_s(a) for a in order if receiving_rank(a, self.schedule) is not None)
            for order in self.schedule.actions
        )

    @cached_property
    def memory(self) -> tuple[DeviceMemory, ...]:
        """By rank of the pipeline; cheap beside a replay."""
        return tuple(self._memory(rank) for rank in range(self.schedule.num_ranks))

    # -- time

    def costs(self) -> StepCosts:
        """For `replay`."""
        ends = tuple(self._end_s(rank) for rank in range(self.schedule.num_ranks))
        return StepCosts(
            self._action_s,
            self._transfer_s,
            overhead_per_step_s=self._agreement_s(),
            optimizer_s=ends,
        )

    def _action_s(self, action: Action) -> float:
        key = action.stage, action.kind, self._is_first_backward(action)
        if key not in self._known_s:  # alike for all other microbatches
            self._known_s[key] = self._work_s(*key) + self._tensor_sums_s(action)
            overhead_s = self._profile(action.stage).message_overhead_s
            self._known_s[key] += self._num_messages(action) * overhead_s
        return self._known_s[key]

    def _work_s(self, stage: int, kind: str, first: bool) -> float:
        """Seconds of the operators of an action."""
        layers = self.stages[stage].layers
        if kind == "F":
            passes = [layer.forward for layer in layers]
        else:
            passes = [layer.first_backward if first else layer.backward for layer in layers]
        profile = self._profile(stage)
        return sum(self._events_s(one.events, profile) for one in passes)

    def _is_first_backward(self, action: Action) -> bool:
        return action in self._first_backwards

    def _events_s(self, events: Sequence[Event], profile: Profile) -> float:
        key = id(events), id(profile)  # both outlive this step
        if key not in self._known_events_s:
            self._known_events_s[key] = sum(self.cost(event, profile) for event in events)
        return self._known_events_s[key]

    def _tensor_sums_s(self, action: Action) -> float:
        """All-reduces of the tensor-parallel ranks: two a block in each direction.

        Those of a forward are of products, which autocast makes half as large; those of a backward
        are of gradients in float32. A checkpointed block's second forward ends with the last tensor
        that the backward needs, before the all-reduce behind its MLP.
        """
        if self.layout.tensor == 1:
            return 0.0
        blocks = [
            profile.input_bytes
            for i, profile in zip(
                self.ranges[action.stage], self.stages[action.stage].layers, strict=True
            )
            if not self.chain.is_end[i]
        ]
        levers = self.choice.levers
        forwards = 2 if action.kind == "F" else int(levers.checkpointing)
        one_s = self._tensor_sum_s(action.stage, blocks[0] // (2 if levers.autocast else 1))
        back_s = self._tensor_sum_s(action.stage, blocks[0])
        return len(blocks) * (forwards * one_s + (2 * back_s if action.kind == "B" else 0.0))

    def _tensor_sum_s(self, stage: int, num_bytes: int) -> float:
        groups = [self._members(stage, data=d) for d in range(self.layout.data)]
        return self._profile(stage).message_overhead_s + max(
            collective_s("all_reduce", num_bytes, group, self.machine) for group in groups
        )

    def _num_messages(self, action: Action) -> int:
        """Those that a rank sends and receives for an action."""
        rank_of, needs = self.schedule.rank_of_stage, needed_by(action, self.schedule)
        received = needs is not None and rank_of[needs.stage] != rank_of[action.stage]
        return int(received) + (receiving_rank(action, self.schedule) is not None)

    def _transfer_s(self, action: Action) -> float:
        source = self.schedule.rank_of_stage[action.stage]
        target = receiving_rank(action, self.schedule)
        stage = self.stages[action.stage]
        num_bytes = stage.message_bytes if action.kind == "F" else stage.input_bytes
        share = self.layout.data * self.layout.tensor
        return max(
            self.machine.link(source * share + i, target * share + i).transfer_s(num_bytes)
            for i in range(share)
        )

    def _agreement_s(self) -> float:
        """Before a step the ranks of a pipeline compare what they were given: 8 bytes each."""
        p = self.layout.pipeline
        if p == 1:
            return 0.0
        members = tuple(range(0, self.layout.ranks, self.layout.ranks // p))
        return self.machine.profiles[0].message_overhead_s + collective_s(
            "all_gather", 8 * p, members, self.machine
        )

    def _end_s(self, rank: int) -> float:
        """Behind a rank's last action: gradients of copies summed, and the optimizer."""
        profile = self.machine.profiles[rank * self.layout.data * self.layout.tensor]
        sizes = self._sizes(rank)
        return self._data_sum_s(rank) + self.optimizer.step_s(sizes, profile, self.cost)

    def _data_sum_s(self, rank: int) -> float:
        if self.layout.data == 1:
            return 0.0
        profile, sizes = self.machine.profiles[0], self._sizes(rank)
        flat = sum(sizes) * VALUE_BYTES
        copies = [Event("compute", "aten::cat", num_bytes=2 * flat)]
        copies.append(Event("compute", "aten::div_", num_bytes=2 * flat))
        copies += [Event("compute", "aten::copy_", num_bytes=2 * n * VALUE_BYTES) for n in sizes]
        overheads_s = 2 * profile.message_overhead_s
        copied_s = sum(self.cost(event, profile) for event in copies)
        return copied_s + overheads_s + self._data_collectives_s(rank)

    def _data_collectives_s(self, rank: int) -> float:
        """The gradients in one piece, and the loss."""
        if self.layout.data == 1:
            return 0.0
        flat = sum(self._sizes(rank)) * VALUE_BYTES
        return sum(self._data_collective_s(rank, num_bytes) for num_bytes in (flat, VALUE_BYTES))

    def _data_collective_s(self, rank: int, num_bytes: int) -> float:
        d, t = self.layout.data, self.layout.tensor
        groups = [tuple((rank * d + i) * t + j for i in range(d)) for j in range(t)]
        return max(collective_s("all_reduce", num_bytes, g, self.machine) for g in groups)

    def _profile(self, stage: int) -> Profile:
        rank = self.schedule.rank_of_stage[stage]
        return self.machine.profiles[rank * self.layout.data * self.layout.tensor]

    def _members(self, stage: int, data: int) -> tuple[int, ...]:
        """Ranks that share the matrices of a stage, of one replica."""
        first = self.schedule.rank_of_stage[stage] * self.layout.data + data
        return tuple(range(first * self.layout.tensor, (first + 1) * self.layout.tensor))

    def _sizes(self, rank: int) -> tuple[int, ...]:
        held = self.schedule.stages_of_rank(rank)
        return sum((self.stages[stage].trained_sizes for stage in held), ())

    # -- memory

    def _memory(self, rank: int) -> DeviceMemory:
        held = {s: self.stages[s] for s in self.schedule.stages_of_rank(rank)}
        sizes = self._sizes(rank)
        # a weight that two layers share is held once where one rank has both
        twice = self.chain.tied_bytes if self.schedule.num_ranks == 1 else 0
        running = pipeline_memory(
            rank_program(self.schedule, rank),
            held,
            batch_bytes=self._batch_bytes(held),
            optimizer_bytes=self.optimizer.state_of(sizes) - 2 * twice,
        )
        gathered = sum(
            stage.gathered_bytes(
                [self.chain.is_end[i] for i in self.ranges[s]], kept=self.layout.pipeline > 1
            )
            for s, stage in held.items()
        )
        running = replace(running, messages=running.messages + gathered)
        return step_memory(
            replace(running, parameters=running.parameters - twice),
            gradient_bytes=sum(stage.gradient_bytes for stage in held.values()) - twice,
            optimizer_temporary=self.optimizer.temporary_of(sizes),
            summed=self.layout.data > 1 and not self.choice.is_sharded,
        )

    def _batch_bytes(self, held: dict[int, StageMemory]) -> int:
        """Views of the whole batch keep all of it alive, also where a rank trains on a part."""
        inputs, targets = self.chain.batch_bytes(self.batch)
        return (inputs if 0 in held else 0) + targets


def _first_backwards(schedule: Schedule) -> set[Action]:
    """Of each stage the backward that makes its gradients."""
    first: dict[int, Action] = {}
    for action in schedule:
        if action.kind == "B":
            first.setdefault(action.stage, action)
    return set(first.values())


def stage_ranges(chain: LayerChain, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage, as the engine cuts them."""
    if isinstance(chain, LabChain):
        return even_block_ranges(chain.config, num_stages)
    return even_ranges(len(chain.names), num_stages)

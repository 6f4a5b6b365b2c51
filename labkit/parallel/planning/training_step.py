"""One training step of a choice on a machine: what each action takes and what each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from labkit.devices.profiles import Machine, Profile
from labkit.measure.virtual.collective_costs import collective_s
from labkit.measure.virtual.recording import Event
from labkit.measure.virtual.virtual_program import OperatorCost
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.gathered_memory import GatheredMemory
from labkit.parallel.planning.layer_chains import Division, LayerChain
from labkit.parallel.planning.memory_plan import DeviceMemory
from labkit.parallel.planning.optimizer_rehearsal import MakeOptimizer, rehearse_optimizer
from labkit.parallel.planning.rank_groups import all_ranks, rank_grid
from labkit.parallel.planning.split_rehearsal import SplitBackward
from labkit.parallel.planning.stage_memory import StageMemory
from labkit.parallel.planning.training_memory import rank_memory
from labkit.parallel.scheduling.messages import needed_by
from labkit.parallel.scheduling.replay import StepCosts, receiving_rank
from labkit.parallel.scheduling.schedules import Action, Schedule

VALUE_BYTES = 4


class Seconds(NamedTuple):
    """What takes time: all of it, and the part in which collectives are awaited."""

    all: float
    collectives: float


NO_TIME = Seconds(0.0, 0.0)


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
        self.schedule, self.grid = choice.built_schedule(), rank_grid(choice.layout)
        self._gradient_makers = _gradient_makers(self.schedule)
        self._known_s: dict[tuple, Seconds] = {}
        self._known_events_s: dict[tuple, Seconds] = {}
        self.rows = batch // (self.layout.data * self.layout.microbatches)
        self.ranges = chain.stage_ranges(self.schedule.num_stages)
        self.stages = [self._stage(number) for number in range(self.schedule.num_stages)]

    def _stage(self, number: int) -> StageMemory:
        held, levers = self.ranges[number], self.choice.levers
        division, whole = Division.of(self.layout), self.choice.in_one_piece
        layers = [self.chain.profile(i, self.rows, levers, division, whole) for i in held]
        splits = self.choice.splits_backward
        gathered = None
        if self.choice.is_sharded:
            gathered = GatheredMemory(
                tuple(layer.parameter_bytes for layer in layers),
                tuple(self.chain.is_end[i] for i in held),
                self.layout.data,
                kept=self.layout.pipeline > 1,
            )
        return StageMemory(
            tuple(layers),
            gathered,
            self._split(held) if splits and number > 0 else (),
            splits,
        )

    def _split(self, held: range) -> tuple[SplitBackward, ...]:
        levers = self.choice.levers
        return tuple(self.chain.split_backward(i, self.rows, levers) for i in held)

    @property
    def waited_s(self) -> tuple[float, ...]:
        """By rank of the pipeline: collectives in its actions, and those that end its step."""
        return tuple(
            sum(self.work_s(action).collectives for action in order) + self._summing_s(rank)
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
        return tuple(rank_memory(self, rank) for rank in range(self.schedule.num_ranks))

    def costs(self) -> StepCosts:
        """For `replay`."""
        ends = tuple(self._end_s(rank) for rank in range(self.schedule.num_ranks))
        return StepCosts(
            self._action_s,
            self._transfer_s,
            overhead_per_step_s=self.agreement_s(),
            optimizer_s=ends,
        )

    def _action_s(self, action: Action) -> float:
        overhead_s = self._profile(action.stage).message_overhead_s
        return self.work_s(action).all + self._num_messages(action) * overhead_s

    def work_s(self, action: Action) -> Seconds:
        """Of the operators and collectives of an action; alike for all further microbatches."""
        key = action.stage, action.kind, action in self._gradient_makers
        if key not in self._known_s:
            passes = self.stages[action.stage].passes(action.kind, makes_gradients=key[2])
            parts = [self.events_s(one.events, action.stage) for one in passes]
            self._known_s[key] = Seconds(*map(sum, zip(*parts, strict=True))) if parts else NO_TIME
        return self._known_s[key]

    def events_s(self, events: Sequence[Event], stage: int) -> Seconds:
        """Of rehearsed events on a device of a stage, one after the other."""
        rank = self.schedule.rank_of_stage[stage]
        key = id(events), rank  # the events outlive this step
        if key not in self._known_events_s:
            profile = self._profile(stage)
            shared = [e for e in events if e.kind == "collective"]
            links_s = sum(self._tensor_collective_s(rank, e.name, e.num_bytes) for e in shared)
            own_s = sum(self.cost(event, profile) for event in events)
            # joining keeps a device busy; layers by hand do it in a region of its own
            by_hand = self.layout.style == "hand"
            joining_s = sum(self.cost(event, profile) for event in shared) if by_hand else 0.0
            self._known_events_s[key] = Seconds(own_s + links_s, joining_s + links_s)
        return self._known_events_s[key]

    def _tensor_collective_s(self, rank: int, kind: str, num_bytes: int) -> float:
        """Of the slowest group of ranks that share the matrices of a rank of the pipeline."""
        groups = self.grid[rank]
        return max(collective_s(kind, num_bytes, group, self.machine) for group in groups)

    def _num_messages(self, action: Action) -> int:
        """Those that a rank sends and receives for an action."""
        rank_of, needs = self.schedule.rank_of_stage, needed_by(action, self.schedule)
        received = needs is not None and rank_of[needs.stage] != rank_of[action.stage]
        return int(received) + (receiving_rank(action, self.schedule) is not None)

    def _transfer_s(self, action: Action) -> float:
        source = self.schedule.rank_of_stage[action.stage]
        target = receiving_rank(action, self.schedule)
        num_bytes = self.sent_bytes(action)
        pairs = zip(all_ranks(self.grid[source]), all_ranks(self.grid[target]), strict=True)
        return max(self.machine.link(*pair).transfer_s(num_bytes) for pair in pairs)

    def sent_bytes(self, action: Action) -> int:
        """Of the message with an action's result."""
        stage = self.stages[action.stage]
        return stage.message_bytes if action.kind == "F" else stage.input_bytes

    def agreement_s(self) -> float:
        """Before a step the ranks of a pipeline compare what they were given: 8 bytes each."""
        p = self.layout.pipeline
        if p == 1:
            return 0.0
        members = tuple(replicas[0][0] for replicas in self.grid)
        return self.machine.profiles[0].message_overhead_s + collective_s(
            "all_gather", 8 * p, members, self.machine
        )

    def _end_s(self, rank: int) -> float:
        """Behind a rank's last action: gradients summed, and the optimizer."""
        return self._summing_s(rank) + self.optimizer_s(rank)

    def _summing_s(self, rank: int) -> float:
        """What tensor ranks have left as shares of a sum, then the gradients of copies; FSDP2 has
        done both in the backwards."""
        if self.choice.is_sharded:
            return 0.0
        return self._settling_s(rank) + self._copies_s(rank) + self.loss_sum_s(rank)

    def optimizer_s(self, rank: int) -> float:
        return self.optimizer.step_s(self.sizes(rank), self._profile_of(rank), self.cost)

    def _settling_s(self, rank: int) -> float:
        """Shares of gradients that tensor ranks have left are summed, all in one piece."""
        layers = [p for s in self.schedule.stages_of_rank(rank) for p in self.stages[s].layers]
        flat = VALUE_BYTES * sum(sum(layer.partial_sizes) for layer in layers)
        if not flat:
            return 0.0
        joined = Event("compute", "aten::cat", num_bytes=2 * flat)
        return self.cost(joined, self._profile_of(rank)) + self.tensor_sum_s(rank, flat)

    def tensor_sum_s(self, rank: int, num_bytes: int) -> float:
        """One all-reduce of tensor ranks."""
        return self._sum_s(rank, num_bytes, self.grid[rank])

    def _copies_s(self, rank: int) -> float:
        """Gradients of copies joined, summed, divided and put back."""
        if self.layout.data == 1:
            return 0.0
        sizes = self.sizes(rank)
        flat = sum(sizes)
        moved = [("aten::cat", flat), ("aten::div_", flat), *(("aten::copy_", n) for n in sizes)]
        events = [Event("compute", name, num_bytes=2 * n * VALUE_BYTES) for name, n in moved]
        moving_s = sum(self.cost(event, self._profile_of(rank)) for event in events)
        return moving_s + self._sum_s(rank, flat * VALUE_BYTES, self.data_groups(rank))

    def loss_sum_s(self, rank: int) -> float:
        """The loss, over replicas."""
        return self._sum_s(rank, VALUE_BYTES, self.data_groups(rank)) if self.layout.data > 1 else 0

    def _sum_s(self, rank: int, num_bytes: int, groups: Sequence[tuple[int, ...]]) -> float:
        slowest_s = max(collective_s("all_reduce", num_bytes, g, self.machine) for g in groups)
        return self._profile_of(rank).message_overhead_s + slowest_s

    def data_groups(self, rank: int) -> list[tuple[int, ...]]:
        """Ranks that hold copies, or shards, of the same weights of a rank of the pipeline."""
        return list(zip(*self.grid[rank], strict=True))

    def _profile(self, stage: int) -> Profile:
        return self._profile_of(self.schedule.rank_of_stage[stage])

    def _profile_of(self, rank: int) -> Profile:
        """Of a rank of the pipeline, and of all that share its layers."""
        return self.machine.profiles[self.grid[rank][0][0]]

    def sizes(self, rank: int) -> tuple[int, ...]:
        held = self.schedule.stages_of_rank(rank)
        return sum((self.stages[stage].trained_sizes for stage in held), ())


def _gradient_makers(schedule: Schedule) -> set[Action]:
    """Of each stage the action that makes its gradients; later ones add to them."""
    first: dict[int, Action] = {}
    for action in schedule:
        if action.kind in "BW":
            first.setdefault(action.stage, action)
    return set(first.values())

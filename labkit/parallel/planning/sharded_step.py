"""A training step with FSDP2 as the program of each rank, for the virtual clock.

FSDP2 gathers weights and scatters gradients on a stream of its own, beside the computing. What of
that shows follows from the order in which a rank issues it, which is FSDP2's:

    forward    gather rest | gather 1 | compute 1 | gather 2 | compute 2 ...
    backward   gather n, n-1 | compute n | scatter n | gather n-2 | compute n-1 | scatter n-1 ...

"rest" is the unit of embedding and head; a block is a unit. In a pipeline a forward leaves all
units gathered for the backward that follows, whose end gives them up; a backward that follows
another gathers each block when its turn comes, without prefetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from labkit.measure.timeline import Timeline
from labkit.measure.virtual.calibration import recorded_cost
from labkit.measure.virtual.recording import NO_REGION, Event, Recording, Region
from labkit.measure.virtual.virtual_clock import play
from labkit.parallel.planning.layer_chains import Division
from labkit.parallel.planning.layer_rehearsal import LayerProfile
from labkit.parallel.planning.sharded_units import UnitTraffic, rehearse_unit
from labkit.parallel.planning.training_step import VALUE_BYTES, TrainingStep
from labkit.parallel.scheduling.messages import Message
from labkit.parallel.scheduling.rank_program import Instruction, rank_program
from labkit.parallel.scheduling.replay import receiving_rank
from labkit.parallel.scheduling.schedules import Action

REST = -1  # the unit of embedding and head; others go by their block's place in the stage


def play_sharded(step: TrainingStep, provenance: str) -> tuple[Timeline, tuple[float, ...]]:
    """A step on the clock, a row for each rank of the pipeline.

    All data-parallel ranks run; of tensor-parallel ones the first, which stands for all.

    Returns:
        The timeline, and by row the seconds of the collectives beside the computing.
    """
    programs = [
        _Program(step, stage, replica)
        for stage in range(step.layout.pipeline)
        for replica in range(step.layout.data)
    ]
    played = play([program.recording() for program in programs], step.machine, recorded_cost)
    row = {replicas[0][0]: stage for stage, replicas in enumerate(step.grid)}
    spans = tuple(replace(s, rank=row[s.rank]) for s in played.spans if s.rank in row)
    beside_s = [0.0] * len(row)
    for span in spans:
        beside_s[span.rank] += span.duration_s if span.kind == "collective" else 0.0
    return Timeline(spans, len(row), provenance), tuple(beside_s)


class _Program:
    """One rank's events, each with the seconds that it keeps the device busy."""

    def __init__(self, step: TrainingStep, stage: int, replica: int) -> None:
        self.step, self.stage, self.replica = step, stage, replica
        self.rank = step.grid[stage][replica][0]
        self.profile = step.machine.profiles[self.rank]
        self.group = step.data_groups(stage)[0]
        self.is_end = [step.chain.is_end[i] for i in step.ranges[stage]]
        self.blocks = [place for place, end in enumerate(self.is_end) if not end]
        self.units = _units(step, stage, self.is_end)
        self.events: list[Event] = []
        self.regions, self.region = [NO_REGION], 0
        self._number = count()
        self.sharded, self.whole = self._storages(), self._storages()
        self.gathered: set[int] = set()  # whole now
        self.on_its_way: dict[int, int] = {}  # unit -> storage that it is gathered into
        self.has_gradients = False
        self.made: list[int] = []  # storages of gradients

    def _storages(self) -> dict[int, int]:
        return {unit: next(self._number) for unit in self.units}

    def recording(self) -> Recording:
        step = self.step
        self._name("step overhead", "wait")
        self._compute(step.agreement_s())
        for instruction in rank_program(step.schedule, self.stage).instructions:
            self._name(instruction.label, instruction.kind)
            self._run(instruction)
        self._name("sum loss", "collective")
        self._compute(step.loss_sum_s(self.stage))
        self._name("opt", "optimizer")
        self._compute(step.optimizer_s(self.stage), reads=self.made)
        return Recording(self.rank, tuple(self.events), tuple(self.regions), 0, {})

    def _name(self, label: str, kind: str) -> None:
        self.region = len(self.regions)
        self.regions.append(Region(label, kind))

    def _run(self, instruction: Instruction) -> None:
        action, x = instruction.action, next(self._number)
        if instruction.needs is not None:
            self._message("recv", instruction.needs, x)
        (self._forward if action.kind == "F" else self._backward)(x)
        if receiving_rank(action, self.step.schedule) is not None:
            self._message("send", instruction.makes, x)

    def _forward(self, x: int) -> None:
        if REST in self.units:
            self._gather(REST)
        for place, layer in enumerate(self.step.stages[self.stage].layers):
            unit = REST if self.is_end[place] else place
            self._gather(unit)
            self._layer(layer.forward.events, [self.whole[unit], x], [x])
        if self.step.layout.pipeline == 1:
            self.gathered -= set(self.blocks)

    def _backward(self, x: int) -> None:
        alone, rest = self.step.layout.pipeline == 1, next(self._number)
        layers = self.step.stages[self.stage].layers
        for place in reversed(range(len(layers))):
            unit = REST if self.is_end[place] else place
            self._gather(unit)
            if unit != REST and alone and place - 1 in self.units:
                self._issue_gather(place - 1)
            if REST in self.units:
                self._gather(REST)
            made = rest if unit == REST else next(self._number)
            # whole gradients are new in each backward: the scatter adds, not the layer
            self._layer(layers[place].first_backward.events, [self.whole[unit], x], [x, made])
            self._settle(layers[place], made)
            if unit != REST:
                self._scatter(unit, made)
        if REST in self.units:
            self._scatter(REST, rest)
        self.gathered.clear()
        self.has_gradients = True

    def _gather(self, unit: int) -> None:
        """Make its weights whole, if they are not."""
        if unit in self.gathered:
            return
        self._issue_gather(unit)
        flat = self.on_its_way.pop(unit)
        self.gathered.add(unit)
        for event in self.units[unit].gather:
            if event.stream == "compute":
                self._add(event, [flat], [self.whole[unit]])

    def _issue_gather(self, unit: int) -> None:
        if unit in self.gathered or unit in self.on_its_way:
            return
        flat = self.on_its_way[unit] = next(self._number)
        source = self.sharded[unit]
        for event in self.units[unit].gather:
            if event.stream == "communication":
                self._add(event, [source], [flat])
                source = flat

    def _scatter(self, unit: int, gradients: int) -> None:
        traffic, flat, source = self.units[unit], next(self._number), gradients
        for event in traffic.scatter if self.has_gradients else traffic.first_scatter:
            self._add(event, [source], [flat])
            source = flat
        self.made.append(flat)

    def _layer(self, events: Sequence[Event], reads: list[int], writes: list[int]) -> None:
        self._compute(self.step.events_s(events, self.stage).all, reads, writes)

    def _settle(self, layer: LayerProfile, made: int) -> None:
        """Shares of gradients that tensor ranks have left are summed one by one."""
        outer = self.region
        for size in layer.partial_sizes:
            self._name("sum shares", "collective")
            self._compute(self.step.tensor_sum_s(self.stage, VALUE_BYTES * size), [made], [made])
        self.region = outer

    def _compute(self, seconds: float, reads: Sequence[int] = (), writes: Sequence[int] = ()):
        self.events.append(
            Event(
                "compute",
                "layer",
                reads=tuple(reads),
                writes=tuple(writes),
                region=self.region,
                own_s=seconds,
            )
        )

    def _message(self, kind: str, message: Message, x: int) -> None:
        schedule = self.step.schedule
        maker = Action(message.stage, message.kind, message.microbatch)
        sends = kind == "send"
        stage = receiving_rank(maker, schedule) if sends else schedule.rank_of_stage[maker.stage]
        number = maker.stage * schedule.num_microbatches + maker.microbatch
        event = Event(
            kind,
            kind,
            num_bytes=self.step.sent_bytes(maker),
            ranks=(self.step.grid[stage][self.replica][0],),
            tag=2 * number + (maker.kind == "F"),
        )
        self._add(event, [x] if sends else [], [] if sends else [x])

    def _add(self, event: Event, reads: list[int], writes: list[int]) -> None:
        self.events.append(
            event._replace(
                reads=tuple(reads),
                writes=tuple(writes),
                region=self.region,
                ranks=self.group if event.kind == "collective" else event.ranks,
                own_s=self.step.cost(event, self.profile),
            )
        )


def _units(step: TrainingStep, stage: int, is_end: Sequence[bool]) -> dict[int, UnitTraffic]:
    """The traffic of each unit of a stage; equal blocks are rehearsed once."""
    chain, division, data = step.chain, Division.of(step.layout), step.layout.data
    held = step.ranges[stage]
    units = {place: [held[place]] for place, end in enumerate(is_end) if not end}
    if any(is_end):
        units[REST] = [held[place] for place, end in enumerate(is_end) if end]
    return {
        unit: chain.remembered(
            ("unit", *(chain.kinds[i] for i in layers), division, data),
            partial(rehearse_unit, chain, layers, division, data),
        )
        for unit, layers in units.items()
    }

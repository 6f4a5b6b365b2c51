"""Where the bytes of a training step go on each device, predicted by walking its program.

The account is the one that `LiveStorages` keeps while a step runs: bytes of storages that are alive
at once. An allocator's rounding, its cache, and what a library holds for itself come on top.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from labkit.parallel.planning.stage_memory import StageMemory
from labkit.parallel.scheduling.messages import Message
from labkit.parallel.scheduling.rank_program import Instruction, RankProgram
from labkit.parallel.scheduling.schedules import Action

LOSS_BYTES = 4


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device at the moment when most are alive.

    Attributes:
        parameters: weights and buffers.
        gradients: those alive at that moment.
        optimizer: its state.
        activations: kept for backwards, of all microbatches in flight, and the batch itself.
        messages: receive buffers, what is on its way, and the buffer in which copies are summed.
        temporary: what the operators of that moment hold besides, and what FSDP2 has gathered.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    messages: int = 0
    temporary: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """By name, for a table or a stacked picture."""
        return asdict(self)


def pipeline_memory(
    program: RankProgram,
    stages: Mapping[int, StageMemory],
    *,
    batch_bytes: int,
    optimizer_bytes: int,
    keeps_gradients: bool = False,
) -> DeviceMemory:
    """The largest moment of a rank's forwards and backwards.

    Args:
        program: of the rank.
        stages: those that it holds.
        batch_bytes: of inputs and targets that it is given.
        optimizer_bytes: of its optimizer's state.
        keeps_gradients: those of the step before are still there, and are added to.
    """
    walk = _Walk(program, stages, keeps_gradients)
    state = DeviceMemory(
        parameters=sum(stage.parameter_bytes for stage in stages.values()),
        optimizer=optimizer_bytes,
        activations=batch_bytes,
    )
    return max(
        (_added(state, moment) for moment in walk.moments()), key=lambda memory: memory.peak_bytes
    )


def _added(state: DeviceMemory, moment: DeviceMemory) -> DeviceMemory:
    return DeviceMemory(**{name: n + getattr(moment, name) for name, n in state.parts.items()})


class _Walk:
    """Follows one rank's program: what is held, what is in the mail, what an action needs.

    The mail's rules are those of `labkit.parallel.pipelining.mail`: one receive is posted ahead
    for each sender, and what was sent is let go of when something has come back that proves its
    arrival.
    """

    def __init__(
        self, program: RankProgram, stages: Mapping[int, StageMemory], keeps_gradients: bool
    ) -> None:
        self.program, self.stages = program, stages
        self.held: dict[tuple[int, int], int] = {}  # by stage and microbatch
        self.has_gradients = set(stages) if keeps_gradients else set()
        self.gathered: set[int] = set()  # stages that FSDP2 has made whole for a backward to come
        self.sent: dict[Message, int] = {}
        self.local: dict[Message, int] = {}  # between two stages of this rank
        self.expected = {source: deque(q) for source, q in program.incoming.items()}
        self.posted: dict[int, Message | None] = {}
        for source in self.expected:
            self._post(source)

    def moments(self):
        for instruction in self.program.instructions:
            entered = 0 if instruction.needs is None else self._receive(instruction.needs)
            if instruction.brings_loss:
                self._receive(instruction.needs._replace(kind="loss"))
            yield self._act(instruction, entered)

    def _act(self, instruction: Instruction, entered: int) -> DeviceMemory:
        action = instruction.action
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        gathered = action.stage in self.gathered
        if action.kind == "F":
            if stage.gathered is not None and stage.gathered.kept:
                self.gathered.add(action.stage)
            self.held[key] = entered
            moment = self._moment(stage.forward_peak_bytes(gathered=gathered))
            self.held[key] += stage.held_bytes + stage.root_bytes
            named = stage.output_is_kept or stage.root_bytes
            self._send(instruction, 0 if named else stage.message_bytes)
            return moment
        if action.kind == "I":
            moment = self._moment(stage.input_peak_bytes)
            # the first stage leaves all to W, and keeps the gradient that came in for it
            changed = stage.waiting_bytes - stage.root_bytes if stage.split else entered
            self.held[key] += changed
            self._send(instruction, stage.input_bytes)
            return moment
        moment = self._moment(self._backward_peak(action, gathered))
        self.gathered.discard(action.stage)
        self.has_gradients.add(action.stage)
        del self.held[key]
        if action.kind == "B":
            self._send(instruction, stage.input_bytes)
        return moment

    def _backward_peak(self, action: Action, gathered: bool) -> int:
        """Of B or W, beside what is held of the microbatch."""
        stage, first = self.stages[action.stage], action.stage not in self.has_gradients
        if action.kind == "W" and stage.split:
            return stage.weight_peak_bytes(first=first)
        # what the microbatch holds counts in the stage's own peak, all but the stage's input
        peak = stage.backward_peak_bytes(first=first, gathered=gathered) - stage.held_bytes
        # and a W's incoming gradient has been held since its I
        return peak - (stage.message_bytes if action.kind == "W" else 0)

    def _moment(self, temporary: int) -> DeviceMemory:
        posted = sum(self._size(m) for m in self.posted.values() if m is not None)
        return DeviceMemory(
            gradients=sum(self.stages[s].gradient_bytes for s in self.has_gradients),
            activations=sum(self.held.values()),
            messages=posted + sum(self.sent.values()) + sum(self.local.values()),
            temporary=temporary,
        )

    def _receive(self, message: Message) -> int:
        if message in self.local:
            return self.local.pop(message)
        source = self.program.source_of[message]
        while self.posted[source] not in (message, None):
            self._post(source)
        self._post(source)
        for arrived in self.program.arrived_with.get(message, ()):
            self.sent.pop(arrived, None)
        return self._size(message)

    def _post(self, source: int) -> None:
        queue = self.expected[source]
        self.posted[source] = queue.popleft() if queue else None

    def _send(self, instruction: Instruction, num_bytes: int) -> None:
        if instruction.makes is not None:
            local = instruction.to == self.program.rank
            (self.local if local else self.sent)[instruction.makes] = num_bytes

    def _size(self, message: Message) -> int:
        """A message's bytes, seen from the stage of this rank that it concerns."""
        if message.kind == "loss":
            return LOSS_BYTES
        if message.kind == "F":
            return self.stages[message.stage + 1].input_bytes
        return self.stages[message.stage - 1].message_bytes


def step_memory(
    running: DeviceMemory, *, gradient_bytes: int, optimizer_temporary: int, summed: bool
) -> DeviceMemory:
    """The larger of a step's running and of what follows it: summing gradients, the optimizer.

    Args:
        running: the largest moment of forwards and backwards.
        gradient_bytes: of all gradients.
        optimizer_temporary: most that the optimizer needs for a moment.
        summed: gradients of copies are summed in one flat buffer of all of them.
    """
    after = replace(running, gradients=gradient_bytes, activations=0, messages=0, temporary=0)
    moments = [running, replace(after, temporary=optimizer_temporary)]
    if summed:
        moments.append(replace(after, messages=gradient_bytes))
    return max(moments, key=lambda memory: memory.peak_bytes)

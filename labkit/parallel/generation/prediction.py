"""Time to the first token, time per token and largest batch of a layout, before anything runs.

A prefill and a decode step of each part run on fake tensors; their operators' times and the links'
are then put in the order in which ``generate`` works:

    device 0   P0 P1 . D0.1 D1.1 . D0.2        two groups in flight
    device 1   .  P0 P1 .  D0.1 D1.1 .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.devices.profiles import Machine
from labkit.measure.virtual.collective_costs import collective_s
from labkit.measure.virtual.recorder import Recorder
from labkit.measure.virtual.recording import Event
from labkit.measure.virtual.virtual_clock import modelled_cost
from labkit.models.config import ModelConfig
from labkit.models.decoder import LabDecoder
from labkit.models.kv_cache import Step, decode, prefill
from labkit.models.transformer import Transformer
from labkit.parallel.generation.capacity import BatchMemory, batch_memory
from labkit.parallel.generation.runners import even_layers
from labkit.parallel.generation.tensor_shards import shard_over
from labkit.parallel.planning.pretended_ranks import pretended_mesh
from labkit.parallel.sharding.tensor_checks import check_tensor_sizes, sharded_sizes

TOKEN_BYTES = 8


@dataclass(frozen=True)
class GenerationPrediction:
    """What a user will wait for, and what fits.

    Attributes:
        first_token_s: by group, from the call to its first token.
        per_token_s: by group, mean gap between the tokens after it.
        tokens_per_s: of all sequences.
        memory: by device, for one sequence more or less.
        largest_batch: sequences that fit on every device, all groups together.
        provenance: begins with ``predicted``.
    """

    first_token_s: tuple[float, ...]
    per_token_s: tuple[float, ...]
    tokens_per_s: float
    memory: tuple[BatchMemory, ...]
    largest_batch: int
    provenance: str

    def __str__(self) -> str:
        return (
            f"first token after {max(self.first_token_s) * 1e3:.2f} ms, "
            f"{max(self.per_token_s) * 1e3:.2f} ms per token after it, {self.tokens_per_s:.0f} "
            f"tokens/s, at most {self.largest_batch} sequences ({self.provenance})"
        )


def predict_generation(
    config: ModelConfig,
    machine: Machine,
    *,
    rows: int,
    prompt: int,
    new_tokens: int,
    layers_over: int = 1,
    tensor: int = 1,
    groups: int = 1,
    decode_width: float = 1.0,
) -> GenerationPrediction:
    """Predict a greedy ``generate`` of the lab's transformer.

    Args:
        rows: sequences, shared out evenly over the groups.
        prompt, new_tokens: tokens of each, the second at least 2.
        layers_over: devices that share the layers.
        tensor: devices that share every layer; not together with ``layers_over``.
        groups: in flight at once.
        decode_width: how much wider the modelled model is (``widened``); ``LAB_WIDTH`` on ``lab``.

    Raises:
        ValueError: sizes do not divide, exceed the context, or are not predicted.
    """
    _check(config, machine, rows, prompt, new_tokens, layers_over, tensor, groups)
    devices = layers_over * tensor
    its = _Generation(config, machine, rows // groups, prompt, new_tokens, tensor, decode_width)
    stages = even_layers(config.layers, layers_over)
    passes = its.passes_s(stages, new_tokens)
    ready_s = _play(passes, its.between_s(prompt), its.between_s(1), its.token_s(devices), groups)
    first = tuple(group[0] for group in ready_s)
    gaps = tuple((group[-1] - group[0]) / (new_tokens - 1) for group in ready_s)
    memory = tuple(each for held in stages for each in [its.memory(held)] * tensor)
    room = (
        m.largest_batch(profile.memory_bytes)
        for m, profile in zip(memory, machine.profiles, strict=False)
    )
    rate = rows * new_tokens / max(group[-1] for group in ready_s)
    return GenerationPrediction(first, gaps, rate, memory, min(room), f"predicted:{machine.name}")


def _check(config, machine, rows, prompt, new_tokens, layers_over, tensor, groups) -> None:
    if layers_over > 1 and tensor > 1:
        raise ValueError(
            f"layers_over={layers_over} with tensor={tensor}: no engine here divides both ways"
        )
    if tensor > 1:
        check_tensor_sizes(tensor, sharded_sizes(config))
        if groups > 1:
            raise ValueError(f"groups={groups} with tensor={tensor}: all ranks take each step")
    if rows % groups or new_tokens < 2 or prompt + new_tokens - 1 > config.context:
        raise ValueError(
            f"rows={rows} must be divisible by groups={groups}, new_tokens={new_tokens} be at "
            f"least 2, and prompt={prompt} + new_tokens - 1 at most context={config.context}"
        )
    if not layers_over * tensor <= machine.count or layers_over > config.layers:
        raise ValueError(
            f"layers_over={layers_over} x tensor={tensor} devices: {machine.name!r} has "
            f"{machine.count}, the model {config.layers} layers"
        )


class _Generation:
    """Parts of one prediction; all groups are alike."""

    def __init__(self, config, machine, rows, prompt, new_tokens, tensor, decode_width) -> None:
        self.config, self.machine, self.rows = config, machine, rows
        self.prompt, self.columns = prompt, prompt + new_tokens - 1
        self.tensor, self.width = tensor, decode_width
        self._events: dict[tuple[int, bool, bool, int], tuple[Event, ...]] = {}

    def passes_s(self, stages: Sequence[range], new_tokens: int) -> list[list[float]]:
        """Seconds by step and stage: the prefill, then one decode for each token after the first.

        The first and the last decode are rehearsed. An operator's work grows evenly with the tokens
        in the cache, so the ones between lie on a line.
        """
        prefill, first, last = (self._step_s(stages, n) for n in (0, 1, new_tokens - 1))
        shares = [n / max(1, new_tokens - 2) for n in range(new_tokens - 1)]
        decodes = [[a + x * (b - a) for a, b in zip(first, last, strict=True)] for x in shares]
        return [prefill, *decodes]

    def _step_s(self, stages: Sequence[range], number: int) -> list[float]:
        return [self._stage_s(held, number, device) for device, held in enumerate(stages)]

    def _stage_s(self, held: range, number: int, device: int) -> float:
        wider = self.width if number else 1.0
        return sum(self._event_s(event, device, wider) for event in self._run(held, number))

    def _event_s(self, event: Event, device: int, wider: float) -> float:
        profile = self.machine.profiles[device]
        if event.kind == "compute":
            event = event._replace(num_bytes=int(event.num_bytes * wider))
        seconds = modelled_cost(event, profile)
        if event.kind == "collective":
            seconds += collective_s(event.name, event.num_bytes, event.ranks, self.machine)
        return seconds

    def _run(self, held: range, number: int) -> tuple[Event, ...]:
        """What a device does in a step; layers are alike, so only their count and ends matter."""
        key = len(held), held.start == 0, held.stop == self.config.layers, number
        if key not in self._events:
            with self._part(held) as part:
                cache = part.new_cache(self.rows, self.columns)
                step = self._step(number, part.device)
                x = self._input(held, 1 if number else self.prompt)
                recorder = Recorder(rank=0)
                with recorder:
                    y = part(x, cache, step)
                    if held.stop == self.config.layers:
                        y.argmax(-1)
                self._events[key] = recorder.take().events
        return self._events[key]

    @contextmanager
    def _part(self, held: range) -> Iterator[LabDecoder]:
        """A device's layers, or its share of each, on fake tensors and pretended ranks."""
        with ExitStack() as stack:
            mesh = stack.enter_context(pretended_mesh(1, self.tensor)) if self.tensor > 1 else None
            stack.enter_context(FakeTensorMode())
            stack.enter_context(torch.no_grad())
            part = LabDecoder(Transformer(self.config, layers=held))
            yield part if mesh is None else shard_over(part, mesh["tensor"])

    def _step(self, number: int, device: torch.device) -> Step:
        if number == 0:
            return prefill([self.prompt] * self.rows, device)
        return decode([self.prompt + number - 1] * self.rows, device)

    def _input(self, held: range, tokens: int) -> torch.Tensor:
        if held.start == 0:
            return torch.zeros(self.rows, tokens, dtype=torch.int64)
        return torch.zeros(self.rows, tokens, self.config.width)

    def between_s(self, tokens: int) -> list[float]:
        """Seconds of an activation over each link onwards."""
        size = self.rows * tokens * self.config.width * 4
        pairs = [(i, i + 1) for i in range(self.machine.count - 1)]
        return [self.machine.link(*pair).transfer_s(size) for pair in pairs]

    def token_s(self, devices: int) -> float:
        """Seconds until the first device has the drawn tokens."""
        size = self.rows * TOKEN_BYTES
        if self.tensor > 1:
            return collective_s("broadcast", size, tuple(range(self.tensor)), self.machine)
        return 0.0 if devices == 1 else self.machine.link(0, devices - 1).transfer_s(size)

    def memory(self, held: range) -> BatchMemory:
        with self._part(held) as part:
            return batch_memory(part, prompt=self.prompt, columns=self.columns)


def _play(
    passes: Sequence[Sequence[float]],
    far_s: Sequence[float],
    near_s: Sequence[float],
    token_s: float,
    groups: int,
) -> list[list[float]]:
    """When each group's tokens are drawn; devices take the groups in turn.

    Args:
        passes: by step, seconds on each device.
        far_s, near_s: seconds of a prefill's and of a decode's activation between devices.
        token_s: from drawing to the first device.
    """
    free = [0.0] * len(passes[0])
    ready: list[list[float]] = [[] for _ in range(groups)]
    for number, seconds in enumerate(passes):
        for group in ready:
            there = group[-1] + token_s if group else 0.0
            for device, work_s in enumerate(seconds):
                there = free[device] = max(free[device], there) + work_s
                if device + 1 < len(seconds):
                    there += (near_s if number else far_s)[device]
            group.append(there)
    return ready

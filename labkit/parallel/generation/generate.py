"""Prompts in, tokens out: prefill once, then one token a step, for one or more groups in flight.

With G groups each device works on one group while the others' tokens travel:

    two devices, G = 1        device 0   A . A . A .       device 1   . A . A . A
    two devices, G = 2        device 0   A B A B A B       device 1   . A B A B A
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from labkit.models.kv_cache import decode, prefill
from labkit.parallel.generation.runners import Result, Runner, even_layers
from labkit.parallel.generation.sampling import GREEDY, Sampling
from labkit.parallel.generation.sequences import Growing, next_tokens, padded


@dataclass(frozen=True)
class Generated:
    """What came out, in the order of the prompts.

    Attributes:
        tokens: new ids of each prompt, the stop token included.
        stopped: whether a stop token ended it; else the limit did.
        begun_s: seconds on ``time.perf_counter``'s clock before the first prefill.
        ready_s: by group, when each of its steps' tokens were there, on the same clock.
        groups: which prompts each group held.
    """

    tokens: tuple[tuple[int, ...], ...]
    stopped: tuple[bool, ...]
    begun_s: float
    ready_s: tuple[tuple[float, ...], ...]
    groups: tuple[range, ...]


@torch.no_grad()
def generate(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 32,
    sampling: Sampling = GREEDY,
    stop: Collection[int] = (),
    groups: int = 1,
) -> Generated:
    """Continue every prompt by up to ``new_tokens`` tokens.

    The tokens of a prompt depend on it, on its place among the prompts (when sampled) and on
    ``sampling``, not on the runner, the batch or the groups. Each step runs in a region: ``P0``
    prefills group 0, ``D0.1`` gives its token 1.

    Args:
        prompts: ids, of any lengths; on ranks the same everywhere.
        stop: ids after which a sequence ends. A group runs until all its sequences have.
        groups: of sequences in flight at once, 1 to the number of prompts.

    Raises:
        ValueError: there is no prompt, one is empty, prompt and new tokens exceed the model's
            context, or ``groups`` is out of range.
    """
    if not 1 <= groups <= len(prompts):
        raise ValueError(f"groups={groups} must lie within 1..{len(prompts)}, the prompts given")
    sequences = [
        Growing(i, tuple(prompt), new_tokens, sampling, stop) for i, prompt in enumerate(prompts)
    ]
    shares = even_layers(len(prompts), groups)
    batches = [_Group(runner, i, [sequences[j] for j in held]) for i, held in enumerate(shares)]
    begun_s = time.perf_counter()
    for batch in batches:
        batch.start()
    running = batches
    while running:
        for batch in running:
            batch.take()
            if not batch.done:
                batch.start()
        running = [batch for batch in running if not batch.done]
    runner.finish()
    return Generated(
        tuple(tuple(sequence.tokens) for sequence in sequences),
        tuple(sequence.stopped for sequence in sequences),
        begun_s,
        tuple(tuple(batch.ready_s) for batch in batches),
        tuple(shares),
    )


class _Group:
    """Sequences that take their steps together, with a cache of their own."""

    def __init__(self, runner: Runner, number: int, sequences: list[Growing]) -> None:
        self.runner, self.number, self.sequences = runner, number, sequences
        self.prompts = [sequence.prompt for sequence in sequences]
        columns = max(len(s.prompt) + s.most - 1 for s in sequences)
        self.cache = runner.new_cache(len(sequences), columns)
        self.ready_s: list[float] = []
        self._waiting: Result | None = None
        self._newest_B: Tensor | None = None  # read by the next step, of sequences that ended, too

    @property
    def done(self) -> bool:
        return all(sequence.done for sequence in self.sequences)

    def start(self) -> None:
        """Begin the prefill, or the step that reads the newest tokens."""
        device, draw = self.runner.device, partial(next_tokens, rows=self.sequences)
        if not self.ready_s:
            label, ids_BT = f"P{self.number}", padded(self.prompts, device)
            step = prefill([len(prompt) for prompt in self.prompts], device)
        else:
            label = f"D{self.number}.{len(self.ready_s)}"
            ids_BT = self._newest_B[:, None]
            step = decode([s.cached for s in self.sequences], device)
        self._waiting = self.runner.start(ids_BT, step, self.cache, draw, label)

    def take(self) -> None:
        """Wait for the tokens, and give each sequence that is not done its own."""
        self._newest_B = self._waiting()
        tokens = self._newest_B.tolist()
        self.ready_s.append(time.perf_counter())
        for sequence, token in zip(self.sequences, tokens, strict=True):
            if not sequence.done:
                sequence.tokens.append(token)

"""Sequences in the making: which tokens they have, which may still come, and when they end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from labkit.parallel.generation.sampling import Sampling, chances, choose


@dataclass
class Growing:
    """One sequence: its prompt, and the tokens that it has got.

    Args:
        number: decides the draws of a sampled sequence; the same number draws the same.
        prompt: ids, at least one.
        most: new tokens, >= 1.
        stop: ids after which the sequence ends; such a token is kept as its last one.

    Raises:
        ValueError: the prompt is empty or ``most`` below 1.
    """

    number: int
    prompt: tuple[int, ...]
    most: int
    sampling: Sampling
    stop: Collection[int] = ()
    tokens: list[int] = field(default_factory=list)
    _chances: list[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.prompt or self.most < 1:
            raise ValueError(
                f"sequence {self.number}: the prompt has {len(self.prompt)} tokens and "
                f"{self.most} new ones are asked for; both must be at least 1"
            )
        draws = 0 if self.sampling.greedy else self.most
        self._chances = chances(self.sampling, self.number, draws)

    @property
    def cached(self) -> int:
        """Tokens in the KV cache: all but the newest, which is not yet read."""
        return len(self.prompt) + max(0, len(self.tokens) - 1)

    @property
    def stopped(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.stop

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) == self.most

    @property
    def chance(self) -> float:
        """The number that draws the next token."""
        return self._chances[len(self.tokens)] if self._chances and not self.done else 0.0


def padded(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Prompts as ids (B, T), padded with 0 on the right.

    >>> padded([(5, 6), (7,)], torch.device("cpu")).tolist()
    [[5, 6], [7, 0]]
    """
    longest = max(map(len, prompts))
    rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    return torch.tensor(rows, device=device)


def next_tokens(logits_BV: Tensor, rows: Sequence[Growing | None]) -> Tensor:
    """The next token (B,) of each row's sequence; rows without one get any.

    All sequences of a batch are sampled in the same way.
    """
    sampling = next(row.sampling for row in rows if row is not None)
    if sampling.greedy:
        return choose(logits_BV, sampling)
    drawn = [0.0 if row is None else row.chance for row in rows]
    return choose(logits_BV, sampling, torch.tensor(drawn, device=logits_BV.device))

"""Choose the next token, so that a sequence gets the same ones wherever and with whom it runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.models.seeds import named_generator


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: 0 takes the likeliest token (greedy); lower is more cautious.
        top_k: draw from the k likeliest only; None for all.
        top_p: draw from the fewest likeliest tokens whose chances add up to p (Holtzman et al.
            2020, nucleus sampling).
        seed: with the sequence's number it decides every draw.

    Raises:
        ValueError: a value is out of range, or greedy is given a ``top_k`` or ``top_p``.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        no_token = self.top_k is not None and self.top_k < 1
        if self.temperature < 0 or not 0 < self.top_p <= 1 or no_token:
            raise ValueError(
                f"temperature={self.temperature} must be 0 or more, top_p={self.top_p} above 0 "
                f"and at most 1, top_k={self.top_k} at least 1 or None"
            )
        if self.greedy and (self.top_k is not None or self.top_p < 1):
            raise ValueError(
                f"top_k={self.top_k} and top_p={self.top_p} do nothing at temperature=0; set a "
                "temperature, such as 0.8"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling()


def chances(sampling: Sampling, sequence: int, tokens: int) -> list[float]:
    """One uniform number in [0, 1) for each token to be drawn for a sequence.

    They depend on the seed and the sequence's number, not on the batch, the slot or the device.
    """
    generator = named_generator("token", sampling.seed, sequence)
    return torch.rand(tokens, generator=generator).tolist()


def choose(logits_BV: Tensor, sampling: Sampling, chance_B: Tensor | None = None) -> Tensor:
    """The next token of each row, (B,) int64.

    Draws by inverting the cumulative chances, likeliest token first, at ``chance_B``.

    Args:
        chance_B: uniform numbers in [0, 1), one per row; unused when greedy.

    >>> choose(torch.tensor([[1.0, 3.0, 2.0]]), GREEDY).tolist()
    [1]
    >>> even = torch.zeros(2, 4)
    >>> choose(even, Sampling(temperature=1.0), torch.tensor([0.1, 0.9])).tolist()
    [0, 3]
    """
    if sampling.greedy:
        return logits_BV.argmax(-1)
    likely_BV, token_BV = (logits_BV.float() / sampling.temperature).sort(
        dim=-1, descending=True, stable=True
    )
    chance_BV = likely_BV[:, : sampling.top_k].softmax(-1)
    below_BV = chance_BV.cumsum(-1) - chance_BV  # of all likelier tokens together
    chance_BV = chance_BV.where(below_BV < sampling.top_p, 0.0)
    reached_BV = chance_BV.cumsum(-1)
    aim_B1 = chance_B[:, None] * reached_BV[:, -1:]
    # the first token whose cumulative chance exceeds the aim; rounding must not pass the last
    place_B1 = (reached_BV <= aim_B1).sum(-1, keepdim=True)
    last_B1 = (chance_BV > 0).sum(-1, keepdim=True) - 1
    return token_BV.gather(1, place_B1.minimum(last_B1))[:, 0]

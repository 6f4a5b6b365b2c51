"""Requests to a server of text, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch

from labkit.measure.timeline import Span, Timeline
from labkit.models.seeds import named_generator


@dataclass(frozen=True)
class Request:
    """Continue ``prompt`` by up to ``new_tokens``; its ``number`` decides sampled draws."""

    number: int
    arrival_s: float
    prompt: tuple[int, ...]
    new_tokens: int


def random_requests(
    count: int,
    *,
    per_s: float,
    vocabulary: int,
    prompt: range = range(4, 17),
    new_tokens: range = range(2, 33),
    seed: int = 0,
) -> tuple[Request, ...]:
    """Requests that arrive at random (a Poisson process) and differ in length.

    Args:
        per_s: mean arrivals per second.
        prompt, new_tokens: lengths, each as likely as any other.

    Raises:
        ValueError: ``count`` or ``per_s`` is not above 0.
    """
    if count < 1 or not per_s > 0:
        raise ValueError(f"count={count} must be at least 1 and per_s={per_s} above 0")
    generator = named_generator("requests", seed)
    gaps = torch.empty(count, dtype=torch.float64).exponential_(per_s, generator=generator)
    arrivals = gaps.cumsum(0).tolist()

    def draw(among: range) -> int:
        return among[int(torch.randint(len(among), (), generator=generator))]

    made = []
    for number, arrival_s in enumerate(arrivals):
        ids = torch.randint(vocabulary, (draw(prompt),), generator=generator)
        made.append(Request(number, arrival_s, tuple(ids.tolist()), draw(new_tokens)))
    return tuple(made)


@dataclass(frozen=True)
class Answer:
    """A request's tokens, the slot it had, and when what happened, in seconds."""

    request: Request
    slot: int
    admitted_s: float
    first_token_s: float
    finished_s: float
    tokens: tuple[int, ...]

    @property
    def latency_s(self) -> float:
        """From arrival to the last token."""
        return self.finished_s - self.request.arrival_s

    @property
    def wait_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.request.arrival_s


@dataclass(frozen=True)
class Served:
    """Everything a server did.

    Attributes:
        answers: in the order of the requests' numbers.
        slots: how many requests it could hold at once.
        provenance: of the times.
    """

    answers: tuple[Answer, ...]
    slots: int
    provenance: str

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        last_s = max(answer.finished_s for answer in self.answers)
        return last_s - min(answer.request.arrival_s for answer in self.answers)

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(answer.tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def slot_use(self) -> float:
        """Share of all slots' time in which they held a request that was not finished."""
        held_s = sum(answer.finished_s - answer.admitted_s for answer in self.answers)
        return held_s / (self.slots * self.seconds)

    def latency_s(self, percentile: int) -> float:
        """Percentile, 1 to 99, of the time from arrival to the last token."""
        return _percentile([answer.latency_s for answer in self.answers], percentile)

    def wait_s(self, percentile: int) -> float:
        """Percentile, 1 to 99, of the time from arrival to the first token."""
        return _percentile([answer.wait_s for answer in self.answers], percentile)

    def slot_timeline(self) -> Timeline:
        """Which request was in which slot: a slot takes the place of a rank."""
        spans = tuple(
            Span(a.slot, a.admitted_s, a.finished_s, str(a.request.number)) for a in self.answers
        )
        return Timeline(spans, self.slots, self.provenance)

    def __str__(self) -> str:
        return (
            f"{len(self.answers)} requests in {self.seconds:.3g} s: {self.tokens_per_s:.0f} "
            f"tokens/s, first token after {self.wait_s(50) * 1e3:.1f} ms (half) and "
            f"{self.wait_s(95) * 1e3:.1f} ms (95 %), all after {self.latency_s(50) * 1e3:.1f} and "
            f"{self.latency_s(95) * 1e3:.1f} ms, slots {self.slot_use:.0%} used"
        )


def _percentile(values: Sequence[float], percentile: int) -> float:
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percentile - 1]

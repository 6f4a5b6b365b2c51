"""What a user of generated text waits for: the first token, and each one after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from labkit.measure.timeline import Timeline
from labkit.parallel.generation.generate import Generated


@dataclass(frozen=True)
class GenerationTimes:
    """Waiting times of one ``generate``, and its rate.

    Attributes:
        first_token_s: by group, from the call to its first token (TTFT).
        per_token_s: by group, mean gap between tokens after the first; None for a single token.
        tokens_per_s: new tokens of all sequences over the whole time.
    """

    first_token_s: tuple[float, ...]
    per_token_s: tuple[float | None, ...]
    tokens_per_s: float

    def __str__(self) -> str:
        gaps = [gap for gap in self.per_token_s if gap is not None]
        per_token = f"{mean(gaps) * 1e3:.2f} ms per token after it, " if gaps else ""
        return (
            f"first token after {max(self.first_token_s) * 1e3:.2f} ms, {per_token}"
            f"{self.tokens_per_s:.0f} tokens/s"
        )


def measured_times(made: Generated) -> GenerationTimes:
    """By the clock of the process that called ``generate``."""
    ready_s = [[moment - made.begun_s for moment in group] for group in made.ready_s]
    return _times(ready_s, made)


def timeline_times(timeline: Timeline, made: Generated) -> GenerationTimes:
    """By a timeline, measured or virtual, of one ``generate``: a token is there when the last
    device that works on its step ends.

    Raises:
        ValueError: the timeline lacks a step of ``made``.
    """
    ends: dict[str, float] = {}
    for span in timeline.spans:
        ends[span.label] = max(ends.get(span.label, 0.0), span.end_s)
    labels = [
        [f"P{i}", *(f"D{i}.{step}" for step in range(1, len(group)))]
        for i, group in enumerate(made.ready_s)
    ]
    missing = [label for group in labels for label in group if label not in ends]
    if missing:
        raise ValueError(f"the timeline has no span {missing[0]}; record the same generate")
    ready_s = [[ends[label] - timeline.start_s for label in group] for group in labels]
    return _times(ready_s, made)


def _times(ready_s: Sequence[Sequence[float]], made: Generated) -> GenerationTimes:
    gaps = [
        (group[-1] - group[0]) / (len(group) - 1) if len(group) > 1 else None for group in ready_s
    ]
    new = sum(map(len, made.tokens))
    last_s = max(group[-1] for group in ready_s)
    return GenerationTimes(tuple(group[0] for group in ready_s), tuple(gaps), new / last_s)

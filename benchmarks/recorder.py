"""What recording costs: a training step recorded over the same step unrecorded, in CPU time.

The two alternate and the median of the pairs' ratios counts, so that a machine busy with other
things does not decide. Fails above the limit of 3.
"""

from __future__ import annotations

from statistics import median
from time import thread_time

import torch

from labkit.measure.virtual.recorder import Recorder
from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer, next_token_loss

LIMIT = 3.0
SIZES = {  # sequences, tokens each
    "tiny operators": (1, 8),
    "the lab's microbatch": (2, 64),
    "the lab's batch": (16, 128),
}


def main() -> None:
    torch.set_num_threads(1)
    worst = 0.0
    for name, (batch, tokens) in SIZES.items():
        ratio, plain_ms, events = cost_ratio(batch, tokens)
        worst = max(worst, ratio)
        print(
            f"{name:22} {batch:3} x {tokens:3}: {plain_ms:7.1f} ms unrecorded, "
            f"{events} events, recorded takes {ratio:.2f} times as long"
        )
    if worst > LIMIT:
        raise SystemExit(f"recording took {worst:.2f} times as long, over the limit of {LIMIT}")


def cost_ratio(batch: int, tokens: int, pairs: int = 9) -> tuple[float, float, int]:
    """Median ratio, median CPU milliseconds unrecorded, number of events."""
    model = Transformer(ModelConfig(layers=8, width=128, heads=4, context=128))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ids = torch.randint(0, 256, (batch, tokens))

    def step() -> None:
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()

    step()
    recorder, ratios, plain = Recorder(), [], []
    for _ in range(pairs):
        plain.append(_seconds(step))
        with recorder:
            ratios.append(_seconds(step) / plain[-1])
        events = len(recorder.take().events)
    return median(ratios), median(plain) * 1e3, events


def _seconds(step) -> float:
    started = thread_time()
    step()
    return thread_time() - started


if __name__ == "__main__":
    main()

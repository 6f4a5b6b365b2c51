"""Which layouts the planner looks at."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

PIPELINES = ("1F1B", "interleaved", "zero bubble", "zero bubble V")


def candidates(count: int, batch: int) -> Iterator[tuple[dict, str]]:
    """Settings of layouts, and schedules, over all divisors of the number of devices.

    Pipelines get one, two and four times as many microbatches as stages; without a pipeline, more
    microbatches only save memory, and are tried while they are needed. GPipe is left out: it is as
    fast as 1F1B and never leaner. Of more than eight devices either all are used or one.
    """
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    totals = sizes if count <= 8 else (1, count)
    for p, d, t in product(sizes, sizes, sizes):
        if p * d * t not in totals:
            continue
        settings = {"pipeline": p, "data": d, "tensor": t, "data_style": "copies"}
        shared = [{}, {"sequence": True}] if t > 1 and p == 1 else [{}]
        for tokens in shared if d > 1 else []:
            yield settings | tokens | {"data_style": "fsdp", "microbatches": p}, "1F1B"
        if p == 1:
            yield from ((settings | tokens | {"microbatches": 1}, "1F1B") for tokens in shared)
            continue
        schedules = PIPELINES if t == 1 else PIPELINES[:1]
        for times, schedule in product((1, 2, 4), schedules):
            if p * times <= batch:
                yield settings | {"microbatches": p * times}, schedule


def in_words(settings: dict, schedule: str) -> str:
    """Settings that may be no legal layout, as a layout would be named."""
    named = {k: v for k, v in settings.items() if v not in (1, "copies")}
    listed = " ".join(f"{k} {v}" for k, v in named.items())
    if settings.get("sequence"):
        listed += " with sequence"
    return f"{listed}, {schedule}" if settings["pipeline"] > 1 else listed or "one device"

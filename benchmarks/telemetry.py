"""What telemetry costs: one look at four scripted GPUs, and sampling beside a training run."""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from labkit.measure.telemetry.cpu_source import ProcessSource
from labkit.measure.telemetry.nvidia_source import NvidiaSource
from labkit.measure.telemetry.power_sweep import ratio_interval
from labkit.measure.telemetry.sampler import DEFAULT_HZ, Sampler
from labkit.models.config import preset
from labkit.models.transformer import Transformer, next_token_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fakes"))

LOOKS = 200
PAIRS, BLOCK_S = 60, 0.5


def look_times_ms(sampler: Sampler) -> list[float]:
    """Milliseconds of ``LOOKS`` looks at all devices."""
    times = []
    for _ in range(LOOKS):
        began = time.perf_counter()
        sampler.look()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def training_step():
    """A step of the tiny preset on this thread."""
    config = preset("tiny").model
    model = Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (1, config.context + 1))

    def step() -> None:
        optimizer.zero_grad()
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()

    return step


class Block(NamedTuple):
    """Of one step, in seconds: median on the clock, and mean CPU time of the process."""

    clock_s: float
    cpu_s: float


def block(step) -> Block:
    """Run steps for ``BLOCK_S``."""
    times, until, cpu_s = [], time.perf_counter() + BLOCK_S, time.process_time()
    while time.perf_counter() < until:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return Block(statistics.median(times), (time.process_time() - cpu_s) / len(times))


def sampled_block(step, sampler: Sampler) -> Block:
    """The same with the sampler running."""
    sampler.start()
    try:
        return block(step)
    finally:
        sampler.stop()


def compared(name: str, sampled: list[float], plain: list[float]) -> str:
    """The pairs' ratios in words."""
    ratio = statistics.median(s / p for s, p in zip(sampled, plain, strict=True))
    low, high = ratio_interval(sampled, plain)
    return (
        f"{name} {statistics.median(plain) * 1e3:.2f} ms, sampled at {DEFAULT_HZ:g} Hz "
        f"{100 * (ratio - 1):+.2f} % (median of {len(plain)} pairs; their mean "
        f"{100 * (low - 1):+.2f} to {100 * (high - 1):+.2f} %, 95 %)"
    )


def main() -> None:
    from fake_nvml import FakeGPU, Scenario, installed

    torch.set_num_threads(1)
    with installed(Scenario([FakeGPU(busy=50) for _ in range(4)])):
        sampler = Sampler([NvidiaSource()])
        times = look_times_ms(sampler)
        ninth = statistics.quantiles(times, n=10)[-1]
        median = statistics.median(times)
        print(f"a look at 4 scripted GPUs: median {median:.2f} ms, p90 {ninth:.2f} ms, n={LOOKS}")
        print(f"so {DEFAULT_HZ:g} looks a second take {median * DEFAULT_HZ / 10:.2f} % of one core")

        step, beside = training_step(), Sampler([NvidiaSource(), ProcessSource([os.getpid()])])
        block(step)
        plain, sampled = [], []
        for pair in range(PAIRS):  # in turns, and every second pair the other way round
            runs = [lambda: plain.append(block(step))]
            runs.append(lambda: sampled.append(sampled_block(step, beside)))
            for run in runs if pair % 2 else reversed(runs):
                run()
    for place, name in enumerate(("step time", "CPU time of a step")):
        print(compared(name, [b[place] for b in sampled], [b[place] for b in plain]))


if __name__ == "__main__":
    main()

"""What telemetry costs: one look at four scripted GPUs, and sampling beside a training run.

Sampling is tried at its default rate and at ten times that: each look costs the same, so a tenth of
what the second one adds says the same as the first, more sharply.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from labkit.measure.telemetry.cpu_source import ProcessSource
from labkit.measure.telemetry.nvidia_source import NvidiaSource
from labkit.measure.telemetry.sampler import DEFAULT_HZ, Sampler
from labkit.models.config import preset
from labkit.models.transformer import Transformer, next_token_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fakes"))

LOOKS = 200
PAIRS, BLOCK_S = 60, 0.5
RATES_HZ = (DEFAULT_HZ, 10 * DEFAULT_HZ)


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


class Timed(Sampler):
    """Adds up what its own looks take.

    Attributes:
        looks: how many were taken.
        looks_cpu_s: CPU time of the thread that looked.
    """

    looks, looks_cpu_s = 0, 0.0

    def look(self) -> None:
        began_s = time.thread_time()
        super().look()
        self.looks, self.looks_cpu_s = (
            self.looks + 1,
            self.looks_cpu_s + time.thread_time() - began_s,
        )


class Block(NamedTuple):
    """Of one step, in seconds: on the clock, and CPU time of the whole process."""

    clock_s: float
    cpu_s: float


def block(step) -> Block:
    """Means over ``BLOCK_S`` of steps: a median would leave out the few steps that a look meets."""
    calls, began_s, cpu_s = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() < began_s + BLOCK_S:
        step()
        calls += 1
    return Block((time.perf_counter() - began_s) / calls, (time.process_time() - cpu_s) / calls)


def sampled_block(step, sampler: Sampler) -> Block:
    """The same with the sampler running."""
    sampler.start()
    try:
        return block(step)
    finally:
        sampler.stop()


def pairs(step, sampler: Sampler) -> list[tuple[Block, Block]]:
    """Blocks with and without the sampler, in turns, every second pair the other way round."""
    taken = []
    for pair in range(PAIRS):
        if pair % 2:
            sampled = sampled_block(step, sampler)
            taken.append((sampled, block(step)))
        else:
            plain = block(step)
            taken.append((sampled_block(step, sampler), plain))
    return taken


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Median and its interval at 95 %, whatever the distribution.

    The number of values below the true median is binomial: the interval ends at the order
    statistics 0.98 * sqrt(n) places from the middle.
    """
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low = max(0, math.floor(len(values) / 2 - half))
    high = min(len(values) - 1, math.ceil(len(values) / 2 + half))
    return statistics.median(values), ordered[low], ordered[high]


def compared(name: str, place: int, taken: list[tuple[Block, Block]], hz: float) -> str:
    """The pairs' ratios in words, as what ``DEFAULT_HZ`` adds."""
    added = [100 * (sampled[place] / plain[place] - 1) for sampled, plain in taken]
    median, low, high = (value * DEFAULT_HZ / hz for value in median_interval(added))
    plain_ms = statistics.median(plain[place] for _, plain in taken) * 1e3
    return (
        f"{name} {plain_ms:.2f} ms; sampling adds {median:+.2f} %, 95 % of its median "
        f"{low:+.2f} .. {high:+.2f} % (ratio {1 + median / 100:.4f}, {len(taken)} pairs"
        + (")" if hz == DEFAULT_HZ else f" at {hz:g} Hz, divided by {hz / DEFAULT_HZ:g})")
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
        step = training_step()
        block(step)
        for hz in RATES_HZ:
            beside = Timed([NvidiaSource(), ProcessSource([os.getpid()])], hz)
            taken = pairs(step, beside)
            look_ms = beside.looks_cpu_s / beside.looks * 1e3
            print(
                f"\n{hz:g} Hz, at 4 GPUs and this process: a look takes {look_ms:.3f} ms of CPU, "
                f"so {DEFAULT_HZ:g} a second take {look_ms * DEFAULT_HZ / 10:.2f} % of one core"
            )
            for place, name in enumerate(("step time", "CPU time of a step")):
                print(compared(name, place, taken, hz))


if __name__ == "__main__":
    main()

"""What telemetry costs: one look at four scripted GPUs, and sampling beside a training run.

Sampling is tried at its default rate and at ten times that: each look costs the same, so a tenth of
what the second one adds says the same as the first, on a loud machine often more sharply. The
estimate with the narrower interval counts. Looks are taken by the clock, steps as fast as the core
allows: a training run that has only a fifth of a core meets five times the looks a step. So each
pair's ratio is reduced to a whole core, by the share that the block without sampling had of one.
Fails above the limits.

    python benchmarks/telemetry.py
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
MOST_LOOK_MS, MOST_ADDED_PERCENT = 2.0, 1.0


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


class Added(NamedTuple):
    """What ``DEFAULT_HZ`` adds on a whole core, in percent: the median and its interval at 95 %."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low


def percents(place: int, taken: list[tuple[Block, Block]], hz: float) -> list[float]:
    """By pair, what ``DEFAULT_HZ`` adds to the clock (place 0) or CPU time (1), from ``hz``."""
    return [100 * (s[place] / p[place] - 1) * DEFAULT_HZ / hz for s, p in taken]


def added(place: int, taken: list[tuple[Block, Block]], hz: float) -> Added:
    shares = [plain.cpu_s / plain.clock_s for _, plain in taken]
    pairs_percent = percents(place, taken, hz)
    return Added(*median_interval([p * s for p, s in zip(pairs_percent, shares, strict=True)]))


def in_words(name: str, place: int, taken: list[tuple[Block, Block]], hz: float) -> str:
    plain_ms = statistics.median(plain[place] for _, plain in taken) * 1e3
    here, low, high = median_interval(percents(place, taken, hz))
    share = statistics.median(plain.cpu_s / plain.clock_s for _, plain in taken)
    found = added(place, taken, hz)
    return (
        f"{name} {plain_ms:.2f} ms; with {share:.0%} of a core sampling at {DEFAULT_HZ:g} Hz adds "
        f"{here:+.2f} % ({low:+.2f} .. {high:+.2f}, {len(taken)} pairs); reduced to a whole one "
        f"{found.median:+.2f} % ({found.low:+.2f} .. {found.high:+.2f})"
    )


def failures(look_ms: float, estimates: dict[str, list[Added]]) -> list[str]:
    """What is above its limit.

    Args:
        look_ms: median.
        estimates: by figure, one for each rate.
    """
    found = [f"a look takes {look_ms:.2f} ms > {MOST_LOOK_MS:g}"] * (look_ms > MOST_LOOK_MS)
    for name, ways in estimates.items():
        sharper = min(ways, key=lambda way: way.width)
        if sharper.median > MOST_ADDED_PERCENT:
            found.append(f"sampling adds {sharper.median:.2f} % > {MOST_ADDED_PERCENT:g} to {name}")
    return found


def time_looks() -> float:
    """Median in milliseconds; says it."""
    times = look_times_ms(Sampler([NvidiaSource()]))
    median, ninth = statistics.median(times), statistics.quantiles(times, n=10)[-1]
    print(
        f"a look at 4 scripted GPUs: median {median:.2f} ms, p90 {ninth:.2f} ms, n={LOOKS}; "
        f"at most {MOST_LOOK_MS:g} ms"
    )
    return median


def compare_rates(step) -> dict[str, list[Added]]:
    """By figure, what sampling adds by each rate; says it."""
    estimates: dict[str, list[Added]] = {"step time": [], "CPU time of a step": []}
    for hz in RATES_HZ:
        beside = Timed([NvidiaSource(), ProcessSource([os.getpid()])], hz)
        taken = pairs(step, beside)
        look_ms = beside.looks_cpu_s / beside.looks * 1e3
        print(
            f"\nfrom {hz:g} Hz, at 4 GPUs and this process: a look takes {look_ms:.3f} ms of CPU, "
            f"so {DEFAULT_HZ:g} a second take {look_ms * DEFAULT_HZ / 10:.2f} % of one core"
        )
        for place, (name, found) in enumerate(estimates.items()):
            found.append(added(place, taken, hz))
            print(in_words(name, place, taken, hz))
    return estimates


def main() -> None:
    from fake_nvml import FakeGPU, Scenario, installed

    torch.set_num_threads(1)
    with installed(Scenario([FakeGPU(busy=50) for _ in range(4)])):
        look_ms = time_looks()
        step = training_step()
        block(step)
        estimates = compare_rates(step)
    print(f"\nsampling: at most {MOST_ADDED_PERCENT:g} %, by the sharper of the two estimates")
    if found := failures(look_ms, estimates):
        raise SystemExit("above the limit: " + "; ".join(found))


if __name__ == "__main__":
    main()

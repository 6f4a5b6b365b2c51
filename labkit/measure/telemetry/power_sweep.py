"""Time and energy of a step against power cap, clocks or fans, with confidence."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nvitop
import torch

from labkit.devices.inventory import DeviceSet
from labkit.devices.tuning.tuning import tuned
from labkit.devices.tuning.tuning_manifest import MANIFEST
from labkit.devices.tuning.tuning_plan import Wish
from labkit.measure.telemetry.metrics import SLOWED_DOWN, throttle_reasons
from labkit.measure.telemetry.telemetry import telemetry
from labkit.measure.timers import synchronize

# Student's t, two-sided 95 %, for 2, 3, 4 ... degrees of freedom
T_95 = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
DEFAULT = Wish()


@dataclass(frozen=True)
class Block:
    """Some steps in a row under one setting.

    Attributes:
        seconds: of one step.
        energy_j: of one step on all devices; None where one has no counter.
        temperature_c: highest of all devices; None where none was read.
        throttled: what held the clocks back in some sample.
    """

    seconds: float
    energy_j: float | None = None
    temperature_c: float | None = None
    throttled: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SweepPoint:
    """One setting against the default one.

    Attributes:
        setting: in words; ``default`` for the first.
        relative_time: step time over the default's: below 1 is faster.
        interval: of ``relative_time``, at 95 % confidence; None for a single run.
        relative_energy: per token, over the default's; None where it was not counted.
        tokens_per_s, joules_per_token: absolute, where they were measured here.
        provenance: ``measured:cuda``, or ``published`` with its source.
        energy_interval: as ``interval``, of ``relative_energy``.
    """

    setting: str
    relative_time: float
    interval: tuple[float, float] | None
    relative_energy: float | None
    provenance: str
    tokens_per_s: float | None = None
    joules_per_token: float | None = None
    temperature_c: float | None = None
    throttled: tuple[str, ...] = ()
    energy_interval: tuple[float, float] | None = None


def measure_block(step: Callable[[], object], devices: DeviceSet, seconds: float = 2.0) -> Block:
    """Call ``step`` for at least ``seconds`` and watch the devices meanwhile.

    A quarter of that time goes before it uncounted: clocks take a moment to follow a new setting.

    Args:
        step: no arguments; all its devices are of this process.
        devices: those that it uses.
        seconds: long against the energy counter's own steps of some 20 to 100 ms.
    """
    on = [torch.device(devices.kind, d.index) for d in devices.devices]
    _repeat(step, on, seconds / 4)
    with telemetry(devices, hz=10) as t:
        calls, took_s = _repeat(step, on, seconds)
    numbers = range(devices.count)
    energies = [t.energy_j(number) for number in numbers]
    hottest = [c for n in numbers if (c := t.peak(n, "temperature_c")) is not None]
    bits = [int(b) for n in numbers for _, b in t.series(n, "throttle_bits")]
    return Block(
        took_s / calls,
        None if None in energies else sum(energies) / calls,
        max(hottest, default=None),
        frozenset(name for b in bits for name in throttle_reasons(b & SLOWED_DOWN)),
    )


def _repeat(
    step: Callable[[], object], devices: Sequence[torch.device], seconds: float
) -> tuple[int, float]:
    """How many calls were made, and what they took."""
    calls, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        step()
        synchronize(devices)
        calls += 1
    return calls, time.perf_counter() - began_s


def sweep(
    measure: Callable[[], Block],
    tokens: float,
    wishes: Sequence[Wish],
    gpus: Sequence[nvitop.Device],
    *,
    apply: bool = False,
    rounds: int = 5,
    manifest: Path = MANIFEST,
) -> list[SweepPoint]:
    """Measure the default and every wish, in turns, so that a room that warms up hits all alike.

    Args:
        measure: such as ``lambda: measure_block(step, devices)``.
        tokens: of one step.
        wishes: settings to try; the default is measured in any case, and comes first.
        gpus: whose settings change.
        apply: without it only the default is measured: nothing is changed.
        rounds: blocks of each setting, >= 3 for an interval.

    Raises:
        ValueError: too few rounds, or a wish outside of the driver's bounds.
        TuningError: see ``tuned``.
    """
    if rounds < 3:
        raise ValueError(f"rounds={rounds} must be at least 3: less gives no interval")
    settings = [DEFAULT, *(wishes if apply else ())]
    blocks: dict[Wish, list[Block]] = {wish: [] for wish in settings}
    for _ in range(rounds):
        for wish in settings:
            with tuned(wish, gpus, apply=apply and wish != DEFAULT, manifest=manifest):
                blocks[wish].append(measure())
    return [_point(wish, taken, blocks[DEFAULT], tokens) for wish, taken in blocks.items()]


def describe(wish: Wish) -> str:
    """The setting in words.

    >>> describe(Wish(power_limit_w=250)), describe(Wish(clocks_mhz=(210, 1400))), describe(Wish())
    ('250 W', '210 to 1400 MHz', 'default')
    """
    words = []
    if wish.power_limit_w is not None:
        words.append(f"{wish.power_limit_w:g} W")
    if wish.clocks_mhz is not None:
        words.append(f"{' to '.join(map(str, dict.fromkeys(wish.clocks_mhz)))} MHz")
    if wish.fan_percent is not None:
        words.append(f"fans {wish.fan_percent} %")
    return ", ".join(words) or "default"


def _point(wish: Wish, blocks: list[Block], default: list[Block], tokens: float) -> SweepPoint:
    seconds = [b.seconds for b in blocks]
    interval = ratio_interval(seconds, [b.seconds for b in default])
    energies, before = _energies(blocks), _energies(default)
    of_energy = ratio_interval(energies, before) if energies and before else None
    heats = [b.temperature_c for b in blocks if b.temperature_c is not None]
    return SweepPoint(
        describe(wish),
        _middle(interval),
        interval,
        _middle(of_energy) if of_energy else None,
        "measured:cuda",
        tokens / statistics.median(seconds),
        statistics.median(energies) / tokens if energies else None,
        max(heats, default=None),
        tuple(sorted(frozenset().union(*(b.throttled for b in blocks)))),
        of_energy,
    )


def _energies(blocks: list[Block]) -> list[float]:
    """Of each block; none at all where one has none, or a counter that stood still."""
    energies = [block.energy_j for block in blocks]
    return energies if all(energies) else []


def _middle(interval: tuple[float, float]) -> float:
    """The geometric mean of the rounds' ratios."""
    return math.sqrt(interval[0] * interval[1])


def ratio_interval(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Interval of the mean ratio of pairs, measured one after the other, at 95 % confidence.

    Student's t on the logarithms of the ratios, so that half and double count alike. Pairs, because
    a room that warms up changes both.

    Raises:
        ValueError: fewer than three pairs, or not as many values as others.
    """
    logs = [math.log(a / b) for a, b in zip(values, others, strict=True)]
    if len(logs) < 3:
        raise ValueError(f"{len(logs)} pairs give no interval: take at least 3")
    mean = statistics.mean(logs)
    half = _student_t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean + half)


def _student_t(freedom: int) -> float:
    """Two-sided 95 % quantile; beyond the table the next lower entry, which is on the safe side."""
    return T_95[min(freedom, len(T_95) + 1) - 2]

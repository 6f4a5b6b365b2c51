"""Placement against an even split and Accelerate's device map: slowest stage over the optimum.

Run with `make bench` or `python benchmarks/placement.py`. Accelerate is compared where it is
installed (it is no dependency of this project). Nothing is executed on any device: models live on
the meta device, and a stage's time is the sum of its layers' FLOPs. Accelerate balances bytes, not
time: that is what the comparison shows.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import nn

from labkit.devices.machines import machine
from labkit.models.config import ModelConfig
from labkit.parallel.placing.costs import LayerCost
from labkit.parallel.placing.placement import even_split, place
from labkit.parallel.placing.placement_plan import PlacementDevice, machine_devices
from labkit.parallel.planning.layer_chains import LabChain
from labkit.parallel.planning.layer_costs import layer_costs

try:
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory
except ImportError:
    infer_auto_device_map = None

SEEDS = range(20)
DEVICE_COUNTS = (2, 4, 8)
TOKENS = 1024


def layer_cost(name: str, parameters: int, flops_per_parameter: float) -> LayerCost:
    """A layer of the given size; 2 FLOPs per token and parameter forward, 4 backward."""
    forward = int(parameters * flops_per_parameter)
    size = 4 * parameters
    return LayerCost(name, forward, 2 * forward, size, size, 2 * size, 0, 0)


def large_vocabulary(rng: random.Random) -> list[LayerCost]:
    """A transformer whose embedding and head outweigh several blocks."""
    config = ModelConfig(rng.randint(14, 40), 1024, 16, TOKENS, rng.choice([32_000, 128_000]))
    return layer_costs(LabChain(config), 1)


def uneven_blocks(rng: random.Random) -> list[LayerCost]:
    """Blocks of lognormal size, as in pruned or searched models."""
    sizes = [int(1e6 * rng.lognormvariate(0, 1)) for _ in range(rng.randint(14, 40))]
    return [layer_cost(str(i), size, 2 * TOKENS) for i, size in enumerate(sizes)]


def pyramid(rng: random.Random) -> list[LayerCost]:
    """A convolutional network: each level has 4 times the parameters on a quarter of the pixels."""
    levels = [level for level in range(4) for _ in range(rng.randint(3, 9))]
    return [
        layer_cost(str(i), 4**level * 40_000, 2 * 3136 / 4**level) for i, level in enumerate(levels)
    ]


def accelerate_slowest(costs: list[LayerCost], count: int) -> float:
    """Slowest stage, in FLOPs, of Accelerate's balanced map of a model with these parameters."""

    class Layer(nn.Module):
        def __init__(self, cost: LayerCost) -> None:
            super().__init__()
            size = cost.parameter_bytes // 4
            self.weight = nn.Parameter(torch.empty(size, device="meta"))

    model = nn.Sequential(*map(Layer, costs))
    room = dict.fromkeys(range(count), sum(cost.parameter_bytes for cost in costs))
    # Accelerate drops devices that this machine does not have; here they are only counted
    with patch("accelerate.utils.modeling.get_max_memory", dict):
        balanced = get_balanced_memory(model, room, no_split_module_classes=["Layer"])
        where = infer_auto_device_map(model, balanced, no_split_module_classes=["Layer"])
    load = dict.fromkeys(range(count), 0)
    for name, device in where.items():
        held = costs if name == "" else [costs[int(name)]]
        load[device] += sum(cost.flops for cost in held)
    return max(load.values())


def compare(make: Callable[[random.Random], list[LayerCost]], count: int) -> dict[str, list[float]]:
    """Per method, slowest stage over the optimum, one entry per seed."""
    devices = [PlacementDevice("device", 1.0)] * count
    ratios: dict[str, list[float]] = {"place": [], "even split": []}
    for seed in SEEDS:
        costs = make(random.Random(seed))
        optimum = exact_optimum([cost.flops for cost in costs], count)
        ratios["place"].append(place(costs, devices).slowest_stage_s / optimum)
        ratios["even split"].append(even_split(costs, devices).slowest_stage_s / optimum)
        if infer_auto_device_map is not None:
            slowest = accelerate_slowest(costs, count)
            ratios.setdefault("Accelerate", []).append(slowest / optimum)
    return ratios


def exact_optimum(loads: list[int], count: int) -> int:
    """The smallest slowest stage, found apart from `place`: bisection over integer loads."""
    low, high = max(loads), sum(loads)
    while low < high:
        middle = (low + high) // 2
        used, load = 1, 0
        for item in loads:
            used, load = (used, load + item) if load + item <= middle else (used + 1, item)
        low, high = (low, middle) if used <= count else (middle + 1, high)
    return low


def placing_times_ms(repeats: int = 31) -> list[float]:
    """Milliseconds to place 200 uneven layers on 8 cards with 48 GiB each."""
    rng = random.Random(0)
    costs = [layer_cost(str(i), rng.randrange(1, 10**7), 2 * TOKENS) for i in range(200)]
    devices = machine_devices(machine("a6000-nvlink", 8))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        place(costs, devices, num_microbatches=16)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    print(f"slowest stage / optimum, {len(SEEDS)} models each: median (worst)")
    for make in (large_vocabulary, uneven_blocks, pyramid):
        for count in DEVICE_COUNTS:
            cells = "  ".join(
                f"{name} {statistics.median(r):.2f} ({max(r):.2f})"
                for name, r in compare(make, count).items()
            )
            print(f"  {make.__name__.replace('_', ' '):<17} {count} devices  {cells}")
    if infer_auto_device_map is None:
        print("  Accelerate is not installed; `pip install accelerate` to compare with it")
    times = placing_times_ms()
    print(
        f"placing 200 layers on 8 devices: median {statistics.median(times):.1f} ms, "
        f"fastest {min(times):.1f} ms of {len(times)}"
    )


if __name__ == "__main__":
    main()

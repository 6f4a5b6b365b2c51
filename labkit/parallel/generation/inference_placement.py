"""Which device runs which layers when a model only generates: our placement, and Accelerate's.

``place`` weighs layers by FLOPs; a decode step is bound by bytes. So a layer's work is stated here
as the picoseconds that its step takes, and a device's rate as picoseconds per second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch import nn

from labkit.devices.profiles import Profile
from labkit.measure.virtual.recorder import Recorder
from labkit.measure.virtual.virtual_clock import modelled_cost
from labkit.models.decoder import Decoder
from labkit.models.kv_cache import decode, prefill
from labkit.parallel.generation.runners import check_cover
from labkit.parallel.placing.costs import LayerCost
from labkit.parallel.placing.placement import place
from labkit.parallel.placing.placement_plan import Placement, PlacementDevice
from labkit.parallel.scheduling.schedules import gpipe

PICOSECONDS = 1e12

Stopwatch = Callable[[Callable[[], object]], float]


def place_decoder(
    costs: Sequence[LayerCost],
    num_devices: int,
    *,
    memory_bytes: int | None = None,
    groups: int = 1,
    provenance: str = "predicted",
) -> Placement:
    """The split over equal devices whose slowest one is fastest, among those that fit.

    Args:
        costs: from ``inference_costs``, of one group of sequences.
        memory_bytes: of each device; None does not limit.
        groups: in flight; every device holds the caches of all.

    Raises:
        ValueError: as ``place``: nothing fits, or there are fewer layers than devices.
    """
    devices = [
        PlacementDevice(f"device {i}", PICOSECONDS, memory_bytes) for i in range(num_devices)
    ]
    return place(costs, devices, num_microbatches=groups, schedule=gpipe, provenance=provenance)


def inference_costs(
    decoder: Decoder,
    *,
    rows: int,
    columns: int,
    prompt: int | None = None,
    profile: Profile | None = None,
) -> list[LayerCost]:
    """What each layer takes and holds; the embedding counts with the first, the head with the last.

    Every layer runs alone. Its ``forward_flops`` are picoseconds, its ``activation_bytes`` the KV
    cache of its sequences.

    Args:
        rows, columns: sequences of a group, and tokens of each that the cache has room for.
        prompt: the step is a prefill of so many tokens; None for the last decode step.
        profile: models the time; None measures this process's CPU seconds.
    """
    stopwatch = _cpu_seconds if profile is None else _modelled_seconds(profile)
    costs = []
    for number in decoder.held:
        part = decoder.part(range(number, number + 1))
        seconds, out, cache_bytes = _run(part, rows, columns, prompt, stopwatch)
        costs.append(
            LayerCost(
                name=f"layers.{number}",
                forward_flops=round(seconds * PICOSECONDS),
                backward_flops=0,
                parameter_bytes=part.parameter_bytes,
                gradient_bytes=0,
                optimizer_bytes=0,
                activation_bytes=cache_bytes,
                output_bytes=out.nbytes,
            )
        )
    return costs


@torch.no_grad()
def _run(
    part: Decoder, rows: int, columns: int, prompt: int | None, stopwatch: Stopwatch
) -> tuple[float, torch.Tensor, int]:
    """Seconds of the step, its output, and the bytes of the cache."""
    cache = part.new_cache(rows, columns)
    if prompt is None:
        step = decode([columns - 1] * rows, part.device)
    else:
        step = prefill([prompt] * rows, part.device)
    size = (rows, prompt or 1)
    if part.embed is not None:
        x = torch.zeros(size, dtype=torch.int64, device=part.device)
    else:
        x = torch.zeros(*size, part.shape.width, dtype=part.dtype, device=part.device)
    return stopwatch(lambda: part(x, cache, step)), part(x, cache, step), cache.bytes


def _cpu_seconds(step: Callable[[], object], times: int = 9) -> float:
    """Median seconds of this thread; other work on the machine does not count."""
    seconds = []
    for _ in range(times):
        begun_s = time.thread_time()
        step()
        seconds.append(time.thread_time() - begun_s)
    return median(seconds)


def _modelled_seconds(profile: Profile) -> Stopwatch:
    def seconds(step: Callable[[], object]) -> float:
        recorder = Recorder()
        with recorder:
            step()
        return sum(modelled_cost(event, profile) for event in recorder.take().events)

    return seconds


def accelerate_layers(model: nn.Module, num_devices: int, *, memory_bytes: int) -> list[range]:
    """The layers that Accelerate's ``device_map="auto"`` puts on each device, by bytes of weights.

    Args:
        model: a ``transformers`` causal model.
        memory_bytes: that each device offers; Accelerate balances below it.

    Returns:
        One range per device, empty ones included.

    Raises:
        ValueError: it would leave layers on the host.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    keep_whole = list(model._no_split_modules)
    offered = dict.fromkeys(range(num_devices), memory_bytes)
    with _quiet("accelerate.utils.modeling"):  # it warns of devices that this machine lacks
        budget = get_balanced_memory(model, offered, no_split_module_classes=keep_whole)
        found = infer_auto_device_map(model, budget, no_split_module_classes=keep_whole)
    inner = model.get_submodule(
        "transformer.h" if hasattr(model, "transformer") else "model.layers"
    )
    layer_name = {id(layer): name for name, layer in model.named_modules()}
    where = [_device_of(layer_name[id(layer)], found) for layer in inner]
    if any(not isinstance(device, int) for device in where):
        raise ValueError(
            f"{memory_bytes} bytes on each of {num_devices} devices leave layers on the host; "
            "offer more"
        )
    edges = [sum(device < i for device in where) for i in range(num_devices + 1)]
    return [range(a, b) for a, b in zip(edges, edges[1:], strict=False)]


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _device_of(name: str, device_map: dict) -> object:
    """The entry for a module or for the module that holds it."""
    while name not in device_map:
        name = name.rpartition(".")[0]
    return device_map[name]


def slowest_ratio(layers: Sequence[range], placement: Placement) -> float:
    """The slowest device's time with ``layers`` over the placement's; 1 is as good.

    Raises:
        ValueError: ``layers`` do not cover the model in order.
    """
    held = [part for part in layers if part]
    check_cover(held, len(placement.costs), len(held))
    work = [sum(placement.costs[i].forward_flops for i in part) / PICOSECONDS for part in held]
    return max(work) / placement.slowest_stage_s

"""Which device runs which layers when a model only generates.

``place`` weighs layers by FLOPs; a decode step is bound by bytes. So a layer's work is stated here
as the picoseconds that its step takes, and a device's rate as picoseconds per second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from labkit.devices.profiles import Profile
from labkit.measure.virtual.recorder import Recorder
from labkit.measure.virtual.virtual_clock import modelled_cost
from labkit.models.decoder import Decoder
from labkit.models.kv_cache import decode, prefill
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
    decode_width: float = 1.0,
) -> list[LayerCost]:
    """What each layer takes and holds; the embedding counts with the first, the head with the last.

    Every layer runs alone. Its ``forward_flops`` are picoseconds, its ``activation_bytes`` the KV
    cache of its sequences.

    Args:
        rows, columns: sequences of a group, and tokens of each that the cache has room for.
        prompt: the step is a prefill of so many tokens; None for the last decode step.
        profile: models the time; None measures this process's CPU seconds.
        decode_width: how much wider the model of a modelled decode step is (``widened``).
    """
    wider = decode_width if prompt is None else 1.0
    stopwatch = _cpu_seconds if profile is None else _modelled_seconds(profile, wider)
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


def _modelled_seconds(profile: Profile, wider: float) -> Stopwatch:
    def seconds(step: Callable[[], object]) -> float:
        recorder = Recorder()
        with recorder:
            step()
        events = recorder.take().events
        return sum(
            modelled_cost(event._replace(num_bytes=int(event.num_bytes * wider)), profile)
            for event in events
        )

    return seconds

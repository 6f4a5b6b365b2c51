"""Which device holds which layers: the optimal contiguous partition, or a refusal with figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from labkit.parallel.pipelining.stages import even_ranges
from labkit.parallel.placing.costs import LayerCost
from labkit.parallel.placing.placement_plan import Placement, PlacementDevice
from labkit.parallel.placing.placement_solver import (
    RangeTables,
    best_cuts,
    leanest_cuts,
    range_sums,
)
from labkit.parallel.placing.placement_view import readable_bytes
from labkit.parallel.scheduling.schedule_checks import peak_per_stage
from labkit.parallel.scheduling.schedules import Schedule, one_f_one_b

ScheduleBuilder = Callable[[int, int], Schedule]
MOST_DEVICES_TRIED = 64


def place(
    costs: Sequence[LayerCost],
    devices: Sequence[PlacementDevice],
    *,
    num_microbatches: int = 1,
    schedule: ScheduleBuilder = one_f_one_b,
    provenance: str = "predicted",
) -> Placement:
    """The contiguous partition with the fastest slowest stage, among those that fit in memory.

    Exact: every partition is looked at (see `placement_solver`). Ties go to less peak memory, then
    to earlier cuts. The order of the devices is kept.

    Args:
        costs: one per layer, for one microbatch.
        devices: p of them, in pipeline order; every one gets at least one layer.
        num_microbatches: m of a step; with `schedule` it says how many are in flight where.
        schedule: builder with one stage per rank, such as `one_f_one_b` or `gpipe`.
        provenance: where the costs come from.

    Raises:
        ValueError: fewer layers than devices, or nothing fits; the message has what each device
            would need and holds, the capacity that would do, and how many devices would.
    """
    costs, devices = tuple(costs), tuple(devices)
    if not 1 <= len(devices) <= len(costs):
        raise ValueError(
            f"{len(costs)} layers on {len(devices)} devices: every device needs at least one "
            f"layer; try 1 to {len(costs)} devices"
        )
    in_flight = microbatches_in_flight(schedule, len(devices), num_microbatches)
    tables = range_tables(costs, devices, in_flight)
    cuts = best_cuts(tables)
    if cuts is None:
        raise ValueError(_refusal(costs, devices, tables, num_microbatches, schedule))
    return Placement(costs, devices, cuts, in_flight, provenance)


def even_split(
    costs: Sequence[LayerCost],
    devices: Sequence[PlacementDevice],
    *,
    num_microbatches: int = 1,
    schedule: ScheduleBuilder = one_f_one_b,
) -> Placement:
    """As many layers on each device as on any other, whatever they cost: the usual first try."""
    cuts = [held.start for held in even_ranges(len(costs), len(devices))[1:]]
    in_flight = microbatches_in_flight(schedule, len(devices), num_microbatches)
    return Placement(tuple(costs), tuple(devices), tuple(cuts), in_flight)


def microbatches_in_flight(
    schedule: ScheduleBuilder, num_devices: int, num_microbatches: int
) -> tuple[int, ...]:
    """How many microbatches `schedule` keeps in flight on each device.

    Raises:
        ValueError: it holds several stages per rank, which is not one range of layers per device.

    >>> microbatches_in_flight(one_f_one_b, num_devices=4, num_microbatches=8)
    (4, 3, 2, 1)
    """
    built = schedule(num_devices, num_microbatches)
    if built.num_stages != num_devices:
        raise ValueError(
            f"{built.name} has {built.num_stages} stages on {num_devices} ranks; a placement gives "
            "each device one range of layers: use a schedule with one stage per rank"
        )
    return peak_per_stage(built)


def range_tables(
    costs: Sequence[LayerCost], devices: Sequence[PlacementDevice], in_flight: Sequence[int]
) -> RangeTables:
    """What every device would take and hold for every range of layers."""
    flops = range_sums([cost.flops for cost in costs])
    state = range_sums([cost.state_bytes for cost in costs])
    kept = range_sums([cost.activation_bytes for cost in costs])
    times, memories, gradients = [], [], np.zeros(len(costs) + 1)
    for rank, device in enumerate(devices):
        last = rank + 1 == len(devices)
        activations = np.zeros(len(costs) + 1) if last else _message_times(costs, device)
        time = flops / device.flops_per_s
        time += activations[None, :]
        time += gradients[:, None]
        memory = kept * in_flight[rank]
        memory += state
        times.append(time)
        memories.append(memory)
        gradients = activations  # of the same size, over the same link
    capacities = [np.inf if d.memory_bytes is None else d.memory_bytes for d in devices]
    return RangeTables(tuple(times), tuple(memories), tuple(capacities))


def _message_times(costs: Sequence[LayerCost], device: PlacementDevice) -> np.ndarray:
    """(n + 1,) seconds of the message behind `device` by cut; the model's two ends send nothing."""
    seconds = np.zeros(len(costs) + 1)
    if device.link_to_next is not None:
        seconds[1:-1] = [device.link_to_next.transfer_s(c.output_bytes) for c in costs[:-1]]
    return seconds


def _refusal(
    costs: Sequence[LayerCost],
    devices: Sequence[PlacementDevice],
    tables: RangeTables,
    num_microbatches: int,
    schedule: ScheduleBuilder,
) -> str:
    """What lacks where, for the split that comes nearest, and what would do."""
    in_flight = microbatches_in_flight(schedule, len(devices), num_microbatches)
    # a finite "no limit", because the tables have inf for empty ranges and inf / inf is nan
    limits = [sys.float_info.max if np.isinf(c) else c for c in tables.capacity_bytes]
    loads = [memory / limit for memory, limit in zip(tables.memory_bytes, limits, strict=True)]
    nearest = Placement(tuple(costs), tuple(devices), leanest_cuts(loads)[1], in_flight)
    lacking = ", ".join(
        f"{device.name} needs {readable_bytes(needed)} of {readable_bytes(device.memory_bytes)}"
        for device, needed in zip(devices, nearest.memory_bytes, strict=True)
    )
    enough = int(leanest_cuts(tables.memory_bytes)[0])
    count = _count_that_would_do(costs, devices, num_microbatches, schedule)
    most = min(len(costs), MOST_DEVICES_TRIED)
    more = f"or {count} devices" if count else f"but no number of devices up to {most}"
    return (
        f"{len(costs)} layers do not fit on {len(devices)} devices with m={num_microbatches}. The "
        f"nearest split: {lacking}. What would do: {len(devices)} devices of "
        f"{readable_bytes(enough)} ({enough} bytes) each, {more} when the further "
        f"ones are like {devices[-1].name}"
    )


def _count_that_would_do(
    costs: Sequence[LayerCost],
    devices: Sequence[PlacementDevice],
    num_microbatches: int,
    schedule: ScheduleBuilder,
) -> int | None:
    """The smallest larger count at which the layers fit, when the last device is repeated."""
    for count in range(len(devices) + 1, min(len(costs), MOST_DEVICES_TRIED) + 1):
        longer = [*devices, *[devices[-1]] * (count - len(devices))]
        in_flight = microbatches_in_flight(schedule, count, num_microbatches)
        if best_cuts(range_tables(costs, longer, in_flight)) is not None:
            return count
    return None

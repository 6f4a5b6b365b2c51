"""Energy per token on one, two, four devices: each rank counts its own device over the same steps.

On each rank ``count_energy`` repeats the step between two looks at the device's own energy counter;
on the notebook's side ``read_energy`` adds the ranks up. Where nothing counts there is no number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from labkit.devices.backends import backend
from labkit.devices.inventory import DeviceSet
from labkit.measure.telemetry.cpu_source import RaplSource
from labkit.measure.telemetry.metrics import Source
from labkit.measure.telemetry.telemetry import sources_for
from labkit.measure.timers import synchronize

SHORTEST_S = 1.0  # a GPU's counter moves in steps of some 20 to 100 ms
NOT_MODELLED = "the energy of a virtual device is not modelled"
NO_PACKAGES = "no RAPL counter: this system shows no /sys/class/powercap/intel-rapl"


@dataclass(frozen=True)
class RankEnergy:
    """What one rank counted.

    Attributes:
        steps: as many on every rank.
        seconds: of all of them, between two barriers.
        meters: UUIDs of the GPUs, or names of the processor packages, that were read.
        energy_j: of all its meters; None where one does not count.
        reason: why there is no energy.
    """

    rank: int
    steps: int
    seconds: float
    meters: tuple[str, ...]
    energy_j: float | None
    reason: str | None = None


@dataclass(frozen=True)
class EnergyReading:
    """Of one step on all devices.

    Attributes:
        energy_j: of all devices, idle ones included; None where one does not count.
        reason: why there is no energy; for a claim's ``needs=EnergyCounters(p, reading.reason)``.
    """

    num_devices: int
    step_time_s: float | None
    energy_j: float | None
    reason: str | None
    provenance: str

    def per_token(self, tokens: float) -> float | None:
        """Joules a token, for ``tokens`` in one step; None where nothing counts."""
        return None if self.energy_j is None else self.energy_j / tokens

    @property
    def power_w(self) -> float | None:
        """Mean power of all devices together; None where nothing counts."""
        return None if self.energy_j is None else self.energy_j / self.step_time_s


def count_energy(
    step: Callable[[], object],
    *,
    devices: DeviceSet,
    steps: int,
    group: dist.ProcessGroup | None = None,
    meters: Sequence[Source] | None = None,
) -> RankEnergy:
    """Call ``step`` once, then ``steps`` times between two looks; on every rank at once.

    All ranks look after the same barrier, so that a device that waits is counted while it waits. On
    virtual devices nothing is run.

    Args:
        step: no arguments: a training step, or the generation of some tokens.
        devices: those of the notebook.
        steps: such as ``math.ceil(3 / step_time_s)``: less than a second is not believed.
        group: the ranks that share the step; None for one process.
        meters: what to read; None for the device of this rank. On the CPU rank 0 reads the packages
            for all: they count whatever runs on them.

    Raises:
        ValueError: ``steps`` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1; try math.ceil(3 / step_time_s)")
    rank = dist.get_rank(group) if group is not None else 0
    if devices.kind == "virtual":
        return RankEnergy(rank, steps, 0.0, (), None, NOT_MODELLED)
    device = backend(devices.kind).current_device() if meters is None else torch.device("cpu")
    sources = _own_meters(devices, rank, device) if meters is None else meters
    step()
    _meet(device, group)
    before, began_s = _look(sources), time.perf_counter()
    for _ in range(steps):
        step()
    _meet(device, group)
    after, seconds = _look(sources), time.perf_counter() - began_s
    names = tuple(d.uuid or d.name for source in sources for d in source.devices)
    return RankEnergy(rank, steps, seconds, names, *_grown(before, after, seconds))


def _own_meters(devices: DeviceSet, rank: int, device: torch.device) -> list[Source]:
    if devices.kind == "cpu":
        return [RaplSource()] if rank == 0 else []
    # what the process is bound to, not what the set says of its rank: read_energy compares the two
    uuid = backend(devices.kind).uuid(device.index)
    bound = replace(devices.devices[rank], index=device.index, uuid=uuid)
    return sources_for(DeviceSet((bound,), devices.physical_cores))


def _meet(device: torch.device, group: dist.ProcessGroup | None) -> None:
    synchronize([device])
    if group is not None:
        dist.barrier(group)
        synchronize([device])


Counters = list[tuple[float | None, str | None]]


def _look(sources: Sequence[Source]) -> Counters:
    readings = [source.read(i) for source in sources for i in range(len(source.devices))]
    return [(r.values.get("energy_j"), r.reasons.get("energy_j")) for r in readings]


def _grown(before: Counters, after: Counters, seconds: float) -> tuple[float | None, str | None]:
    """Joules of all counters, or None and why."""
    total_j = 0.0
    for (first_j, at_first), (last_j, at_last) in zip(before, after, strict=True):
        if first_j is None or last_j is None:
            return None, at_first or at_last or "it has no energy counter"
        if last_j < first_j:
            return None, f"the counter fell from {first_j:.0f} to {last_j:.0f} J: it began anew"
        total_j += last_j - first_j
    if seconds < SHORTEST_S:
        return None, f"{seconds:.2f} s are too short for a counter: take more steps"
    return total_j, None


def read_energy(found: Mapping[int, RankEnergy], devices: DeviceSet) -> EnergyReading:
    """Add up what the ranks counted, where each device was counted once.

    Args:
        found: by rank, as ``ranks.pull("counted")`` gives them.
        devices: those that were used, no more and no fewer.

    Raises:
        ValueError: a rank is missing, the ranks made different steps, or what they read is not what
            ``devices`` names.
    """
    ranks = [found[number] for number in sorted(found)]
    if sorted(found) != list(range(devices.count)):
        raise ValueError(
            f"energy of ranks {sorted(found)} for {devices.count} devices: each rank counts once; "
            "give the device set that they used, such as lab.devices.first(2)"
        )
    if len({rank.steps for rank in ranks}) > 1:
        raise ValueError(f"the ranks made {[rank.steps for rank in ranks]} steps: take as many")
    if devices.kind not in ("cpu", "virtual"):
        _check_meters(ranks, devices)
    if devices.kind == "cpu" and not ranks[0].meters:
        return EnergyReading(devices.count, None, None, NO_PACKAGES, devices.provenance)
    reasons = [
        f"rank {rank.rank}: {rank.reason}" if devices.kind != "virtual" else rank.reason
        for rank in ranks
        if rank.reason
    ]
    steps, seconds = ranks[0].steps, max(rank.seconds for rank in ranks)
    return EnergyReading(
        devices.count,
        seconds / steps or None,
        None if reasons else sum(rank.energy_j for rank in ranks) / steps,
        reasons[0] if reasons else None,
        devices.provenance,
    )


def _check_meters(ranks: Sequence[RankEnergy], devices: DeviceSet) -> None:
    read = [meter for rank in ranks for meter in rank.meters]
    wanted = [device.uuid for device in devices.devices]
    if None not in wanted and sorted(read) != sorted(wanted):
        raise ValueError(
            f"counted {', '.join(read)}, but the devices are {', '.join(wanted)}: "
            "give the device set that the ranks used"
        )

"""Layers on devices: what a contiguous partition takes and holds on each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from labkit.devices.profiles import Link, Machine
from labkit.parallel.placing import placement_view
from labkit.parallel.placing.costs import LayerCost
from labkit.parallel.scheduling.replay import StepCosts
from labkit.parallel.scheduling.schedules import Action

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PlacementDevice:
    """What the search knows of a device.

    Args:
        name: as shown in tables.
        flops_per_s: rate at which layers run; only ratios matter for the cuts.
        memory_bytes: capacity; None does not limit.
        link_to_next: to the device behind it in the pipeline; None is a free transfer.
    """

    name: str
    flops_per_s: float
    memory_bytes: int | None = None
    link_to_next: Link | None = None

    def __post_init__(self) -> None:
        if not self.flops_per_s > 0:
            raise ValueError(f"{self.name}: flops_per_s={self.flops_per_s} must be above 0")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ValueError(f"{self.name}: memory_bytes={self.memory_bytes} must be above 0")


def machine_devices(machine: Machine, dtype: str = "float32") -> tuple[PlacementDevice, ...]:
    """The devices of `machine` in the order of their ranks, at their peak for `dtype`."""
    devices = []
    for rank, profile in enumerate(machine.profiles):
        link = machine.link(rank, rank + 1) if rank + 1 < machine.count else None
        name = f"{rank}: {profile.name}"
        peak = profile.peak_flops[dtype]
        devices.append(PlacementDevice(name, peak, profile.memory_bytes, link))
    return tuple(devices)


@dataclass(frozen=True)
class Placement:
    """Layers on devices; built by `place` or, for comparison, by hand from any cuts.

    A stage's time per microbatch is its FLOPs, forward and backward, over its device's rate, plus
    the messages that it sends: activations to the next stage, gradients to the one before. That
    charges each message to its sender; overlap would only make it faster.

    Attributes:
        costs: all layers of the model, in order.
        devices: p of them, in pipeline order.
        cuts: p - 1 ascending numbers; device i starts at layer cuts[i - 1].
        in_flight: microbatches whose activations each device holds at once.
        provenance: where the costs come from.
    """

    costs: tuple[LayerCost, ...]
    devices: tuple[PlacementDevice, ...]
    cuts: tuple[int, ...]
    in_flight: tuple[int, ...]
    provenance: str = "predicted"

    def __post_init__(self) -> None:
        edges = (0, *self.cuts, len(self.costs))
        if len(self.cuts) != len(self.devices) - 1 or sorted(set(edges)) != list(edges):
            raise ValueError(
                f"cuts={self.cuts} must be {len(self.devices) - 1} ascending numbers within "
                f"1..{len(self.costs) - 1}, so that each device gets a layer"
            )
        if len(self.in_flight) != len(self.devices):
            raise ValueError(
                f"in_flight={self.in_flight} must have one entry per device, {len(self.devices)}"
            )

    @property
    def ranges(self) -> tuple[range, ...]:
        """The layer numbers of each device."""
        edges = (0, *self.cuts, len(self.costs))
        return tuple(map(range, edges, edges[1:]))

    @property
    def layer_names(self) -> tuple[tuple[str, ...], ...]:
        """The layer names of each device."""
        return tuple(tuple(self.costs[i].name for i in held) for held in self.ranges)

    @property
    def forward_s(self) -> tuple[float, ...]:
        """Seconds of one microbatch's forward on each device, messages left out."""
        return self._per_device(lambda cost: cost.forward_flops, by_rate=True)

    @property
    def backward_s(self) -> tuple[float, ...]:
        """Seconds of one microbatch's full backward on each device, messages left out."""
        return self._per_device(lambda cost: cost.backward_flops, by_rate=True)

    @property
    def transfer_s(self) -> tuple[float, ...]:
        """Seconds of the messages that each device sends per microbatch."""
        return tuple(map(sum, self._sent_s))

    @cached_property
    def stage_time_s(self) -> tuple[float, ...]:
        """Seconds per microbatch of each device: what `place` makes the slowest of smallest."""
        work = self._per_device(lambda cost: cost.flops, by_rate=True)
        return tuple(w + on + back for w, (on, back) in zip(work, self._sent_s, strict=True))

    @property
    def slowest_stage_s(self) -> float:
        """The pipeline's pace: seconds per microbatch once it is full."""
        return max(self.stage_time_s)

    @cached_property
    def memory_bytes(self) -> tuple[int, ...]:
        """Weights, gradients, optimizer state and activations in flight on each device."""
        state = self._per_device(lambda cost: cost.state_bytes)
        kept = self._per_device(lambda cost: cost.activation_bytes)
        return tuple(s + n * k for s, n, k in zip(state, self.in_flight, kept, strict=True))

    def step_costs(self) -> StepCosts:
        """Costs for `replay`, one stage per device.

        I and W are half of B each, but on the first stage, which has no input gradient to compute,
        W is all of it, as when PyTorch runs it.
        """
        table = {}
        for stage, (forward, backward) in enumerate(
            zip(self.forward_s, self.backward_s, strict=True)
        ):
            table[stage, "F"], table[stage, "B"] = forward, backward
            table[stage, "I"] = backward / 2 if stage else 0.0
            table[stage, "W"] = backward - table[stage, "I"]
        return StepCosts(table, transfer_s=self._message_s)

    @property
    def _sent_s(self) -> tuple[tuple[float, float], ...]:
        """Per device, seconds of its activations onwards and of its gradients back."""
        cuts = [self._cut_s(i) for i in range(len(self.cuts))]
        return tuple(zip([*cuts, 0.0], [0.0, *cuts], strict=True))

    def _message_s(self, action: Action) -> float:
        return self._cut_s(action.stage if action.kind == "F" else action.stage - 1)

    def _cut_s(self, cut: int) -> float:
        link = self.devices[cut].link_to_next
        return link.transfer_s(self.costs[self.cuts[cut] - 1].output_bytes) if link else 0.0

    def _per_device(self, figure: Callable[[LayerCost], int], by_rate: bool = False) -> tuple:
        sums = [sum(figure(self.costs[i]) for i in held) for held in self.ranges]
        if not by_rate:
            return tuple(sums)
        return tuple(s / d.flops_per_s for s, d in zip(sums, self.devices, strict=True))

    def __str__(self) -> str:
        return placement_view.as_text(self)

    def _repr_html_(self) -> str:
        return placement_view.as_html(self)

    def draw(self) -> Figure:
        """Time and memory of each device, the memory beside its capacity."""
        return placement_view.as_figure(self)

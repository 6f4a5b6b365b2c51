"""A training step's time in any layout on any machine, predicted from sizes; nothing is executed.

Operators take what the machine's profile gives them, collectives what a ring takes
(``measure.collective_costs``), and nothing else costs. Computing and communication add up, but for
FSDP2, which gathers the next block while one computes. A pipeline is its schedule replayed with
these costs. Not modelled: contention of two axes for one link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labkit.devices.profiles import Machine
from labkit.measure.virtual.collective_costs import collective_s
from labkit.models.config import ModelConfig
from labkit.parallel.planning.layer_operators import (
    LayerOperators,
    Operator,
    adamw_operators,
    operators_s,
)
from labkit.parallel.scheduling.replay import StepCosts, replay
from labkit.parallel.scheduling.schedules import Action
from labkit.parallel.sharding.layouts import Layout, blocks_of_stage
from labkit.parallel.sharding.traffic import VALUE_BYTES, unit_sizes


def predict_step_s(config: ModelConfig, layout: Layout, machine: Machine, batch: int) -> float:
    """Seconds of one AdamW step on the machine's first ``layout.ranks`` devices, all alike.

    Args:
        batch: rows of the whole batch.

    Raises:
        ValueError: the layout does not divide the model or batch, or the machine is too small.
    """
    layout.check(config, batch)
    if machine.count < layout.ranks:
        raise ValueError(
            f"{layout} needs {layout.ranks} devices, {machine.name} has {machine.count}"
        )
    step = _Step(config, layout, machine, batch)
    return step.pipelined_s() if layout.pipeline > 1 else step.whole_s()


def axis_groups(layout: Layout, axis: str) -> list[tuple[int, ...]]:
    """The groups of ranks along one axis.

    >>> layout = Layout(data=2, tensor=2)
    >>> axis_groups(layout, "tensor"), axis_groups(layout, "data")
    ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
    """
    sizes = [getattr(layout, name) for name in layout.order]
    ranks = torch.arange(layout.ranks).view(sizes).movedim(layout.order.index(axis), -1)
    return [tuple(group) for group in ranks.reshape(-1, getattr(layout, axis)).tolist()]


@dataclass(frozen=True)
class _Step:
    config: ModelConfig
    layout: Layout
    machine: Machine
    batch: int

    @property
    def _layers(self) -> LayerOperators:
        pieces = self.layout.microbatches if self.layout.pipeline > 1 else 1
        rows = self.batch // self.layout.data // pieces
        return LayerOperators(self.config, rows, self.layout.tensor, self.layout.sequence)

    def _run_s(self, operators: Sequence[Operator]) -> float:
        return operators_s(operators, self.machine.profiles[0])

    def _collective_s(self, axis: str, kind: str, num_bytes: int) -> float:
        """With what joining costs the device itself; the slowest group of the axis counts."""
        groups = axis_groups(self.layout, axis)
        if len(groups[0]) == 1:
            return 0.0
        overhead_s = self.machine.profiles[0].message_overhead_s
        slowest = max(collective_s(kind, num_bytes, group, self.machine) for group in groups)
        return overhead_s + slowest

    def _tensor_s(self, count: int) -> float:
        """``count`` all-reduces of an activation; or as many all-gathers and reduce-scatters."""
        kinds = ("all_gather", "reduce_scatter") if self.layout.sequence else ("all_reduce",)
        size = self._layers.activation_bytes
        return count * sum(self._collective_s("tensor", kind, size) for kind in kinds)

    def block_s(self, direction: str) -> float:
        """One block forward or backward, with the tensor ranks' communication."""
        operators = getattr(self._layers, f"block_{direction}")()
        return self._run_s(operators) + self._tensor_s(2)

    def edges_s(self, stage: int, direction: str) -> float:
        """Embedding on the first stage and head on the last."""
        found = []
        if stage == 0:
            found += getattr(self._layers, f"embed_{direction}")()
        if stage == self.layout.pipeline - 1:
            found += getattr(self._layers, f"head_{direction}")()
        seconds = self._run_s(found)
        if self.layout.sequence:  # the head gathers forward, the embedding backward
            size = self._layers.activation_bytes
            seconds += self._collective_s("tensor", "all_gather", size)
        return seconds

    def optimizer_s(self, stage: int) -> float:
        """AdamW over this rank's parameters, and settling gradients that the norms left."""
        ranks = self.layout.data if self._fsdp else 1
        sizes = [
            -(-size // ranks)
            for unit in unit_sizes(self.config, self.layout, stage)
            for size in unit
        ]
        return self._run_s(adamw_operators(sizes))

    @property
    def _fsdp(self) -> bool:
        return self.layout.data > 1 and self.layout.data_style == "fsdp"

    def _unit_bytes(self, stage: int) -> list[int]:
        return [sum(unit) * VALUE_BYTES for unit in unit_sizes(self.config, self.layout, stage)]

    def _copies_s(self, stage: int) -> float:
        """All gradients flattened, all-reduced, divided and copied back."""
        if self.layout.data == 1 or self._fsdp:
            return 0.0
        size = sum(self._unit_bytes(stage))
        tensors = sum(map(len, unit_sizes(self.config, self.layout, stage)))
        moved = self._run_s([Operator(0, 2 * size)] * 2)
        moved += self._run_s([Operator(0, 2 * size // tensors)] * tensors)
        return moved + self._collective_s("data", "all_reduce", size)

    def whole_s(self) -> float:
        """A step without a pipeline."""
        blocks = self.config.layers
        if self._fsdp:
            computing = self._sharded_s()
        else:
            computing = blocks * (self.block_s("forward") + self.block_s("backward"))
            computing += self.edges_s(0, "forward") + self.edges_s(0, "backward")
        return computing + self._copies_s(0) + self.optimizer_s(0)

    def _sharded_s(self) -> float:
        """FSDP2: gather the first, then each block hides the next one's; the last scatter shows."""
        *blocks, rest = self._unit_bytes(0)
        gather_s = [self._collective_s("data", "all_gather", size) for size in blocks]
        scatter_s = [self._collective_s("data", "reduce_scatter", size) for size in blocks]
        gather_rest_s = self._collective_s("data", "all_gather", rest)
        scatter_rest_s = self._collective_s("data", "reduce_scatter", rest)
        forward_s, backward_s = self.block_s("forward"), self.block_s("backward")
        seconds = gather_rest_s + self.edges_s(0, "forward") + self.edges_s(0, "backward")
        seconds += gather_s[0] + forward_s
        seconds += sum(max(forward_s, gather) for gather in gather_s[1:])
        seconds += sum(
            max(backward_s, gather + scatter)
            for gather, scatter in zip(gather_s, scatter_s, strict=True)
        )
        return seconds + scatter_rest_s

    def pipelined_s(self) -> float:
        """The schedule replayed with each stage's costs."""
        stages = range(self.layout.pipeline)
        after = tuple(self._copies_s(stage) + self.optimizer_s(stage) for stage in stages)
        costs = StepCosts(self._action_s, self._transfer_s, optimizer_s=after)
        return replay(self.layout.schedule(), costs).step_time_s

    def _action_s(self, action: Action) -> float:
        """One microbatch through one stage, one way; what it sends and receives costs the device
        itself its overhead, and gradients after the first are added."""
        stage, forward = action.stage, action.kind == "F"
        direction = "forward" if forward else "backward"
        blocks = len(blocks_of_stage(self.config.layers, self.layout.pipeline, stage))
        seconds = blocks * self.block_s(direction) + self.edges_s(stage, direction)
        cuts = (stage > 0) + (stage < self.layout.pipeline - 1)
        seconds += cuts * self.machine.profiles[0].message_overhead_s
        if not forward and action.microbatch:
            ranks = self.layout.data if self._fsdp else 1
            units = unit_sizes(self.config, self.layout, stage)
            added = [3 * size * VALUE_BYTES // ranks for unit in units for size in unit]
            seconds += self._run_s([Operator(0, size) for size in added])
        return seconds + self._shown_s(stage, forward, seconds)

    def _shown_s(self, stage: int, forward: bool, computing_s: float) -> float:
        """What shows of FSDP2's communication in a pipeline's action: all units are gathered once
        a microbatch and scattered in each backward, one of them while nothing is computed."""
        if not self._fsdp:
            return 0.0
        kind = "all_gather" if forward else "reduce_scatter"
        sizes = [size for size in self._unit_bytes(stage) if size]
        units_s = [self._collective_s("data", kind, size) for size in sizes]
        alone_s = units_s[-1]
        return alone_s + max(0.0, sum(units_s) - alone_s - computing_s)

    def _transfer_s(self, action: Action) -> float:
        """To the next stage, or back; the slowest pair counts."""
        step = 1 if action.kind == "F" else -1
        pairs = [
            (group[action.stage], group[action.stage + step])
            for group in axis_groups(self.layout, "pipeline")
        ]
        size = self._layers.activation_bytes
        return max(self.machine.link(*pair).transfer_s(size) for pair in pairs)

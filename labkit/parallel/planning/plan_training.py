"""Runs what the planner chose: one rank's part of a model under a `Choice`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.devices.backends import backend
from labkit.devices.inventory import DeviceSet
from labkit.measure.step_trace import StepTrace, trace_step
from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer
from labkit.parallel.parity import gradients, joined
from labkit.parallel.pipelining.losses import LossFunction, token_losses
from labkit.parallel.pipelining.pipeline import Pipeline
from labkit.parallel.pipelining.stages import (
    Chain,
    cut,
    even_block_ranges,
    even_ranges,
    layer_names,
)
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.levers import Levers
from labkit.parallel.planning.optimizer_rehearsal import MakeOptimizer, adamw
from labkit.parallel.sharding.data_parallel import own_rows, sum_gradients
from labkit.parallel.sharding.layout_training import LayoutTraining

Model = ModelConfig | Mapping[str, nn.Module]


def train_choice(
    model: Model,
    choice: Choice,
    device: torch.device,
    *,
    mesh: DeviceMesh | None = None,
    make_optimizer: MakeOptimizer = adamw,
    loss_fn: LossFunction = token_losses,
) -> LayoutTraining | ChainTraining:
    """This rank's training; call it on every rank, or in one process for one device.

    Args:
        model: the lab's configuration, or blocks in order of execution by full name.
        mesh: ``choice.layout.mesh(device.type)``; None makes it.
        loss_fn: for blocks, one loss per target.

    Returns:
        An object with ``step(inputs, targets) -> loss``, ``backward``, ``optimizer``, ``model`` and
        ``full_gradients()``.
    """
    mesh = choice.layout.mesh(device.type) if mesh is None else mesh
    in_layout = choice.schedule == "1F1B" and (choice.in_one_piece or choice.layout.pipeline > 1)
    if isinstance(model, ModelConfig) and in_layout:
        return LayoutTraining(
            model,
            choice.layout,
            mesh,
            device,
            make_optimizer=make_optimizer,
            prepare=partial(_pull, choice.levers),
        )
    return ChainTraining(model, choice, mesh, device, make_optimizer, loss_fn)


def _pull(levers: Levers, part: Transformer) -> None:
    ends = [end for end in (part.embed, part.head) if end is not None]
    levers.apply(ends, part.layers.values())


def trace_choice(
    model: Model,
    choice: Choice,
    inputs: Tensor,
    targets: Tensor,
    *,
    devices: DeviceSet,
    steps: int = 5,
    loss_fn: LossFunction = token_losses,
) -> StepTrace:
    """Build this rank's part and trace one whole step of it, optimizer included.

    Args:
        inputs, targets: the whole batch, on every rank.
        devices: those of the ranks; the kind decides between measuring and recording.
        steps: timed calls on real devices.
    """
    device = backend(devices.kind).current_device()
    training = train_choice(model, choice, device, loss_fn=loss_fn)
    return trace_step(
        partial(training.step, inputs, targets),
        devices=devices,
        hold=[training.model, training.optimizer],
        steps=steps,
        group=dist.group.WORLD,
    )


class ChainTraining:
    """A chain of layers as a pipeline of any schedule, in one or more copies.

    The arguments are those of `train_choice`.

    Attributes:
        model: this rank's stages.
        optimizer: of their parameters.
    """

    def __init__(
        self,
        model: Model,
        choice: Choice,
        mesh: DeviceMesh,
        device: torch.device,
        make_optimizer: MakeOptimizer,
        loss_fn: LossFunction,
    ) -> None:
        self.choice, self.device = choice, device
        self._data = mesh["data"].get_group()
        schedule, rank = choice.built_schedule(), mesh.get_local_rank("pipeline")
        stages = _stages_of(model, schedule.num_stages, schedule.stages_of_rank(rank))
        names = layer_names(model) if isinstance(model, ModelConfig) else tuple(model)
        for stage in stages.values():
            _pull_chain(choice.levers, stage.to(device), names)
        self._pipeline = Pipeline(
            stages, schedule, loss_fn=loss_fn, group=mesh["pipeline"].get_group()
        )
        self._is_first, self._is_last = 0 in stages, schedule.num_stages - 1 in stages
        self.model = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
        self.optimizer = make_optimizer(list(self.model.parameters()))

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one batch, which every rank is given whole; returns its mean loss."""
        loss = self.backward(inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def backward(self, inputs: Tensor, targets: Tensor) -> float:
        """Forward and backward; the gradients of all copies summed.

        Raises:
            ValueError: the rows do not divide.
        """
        copies = self.choice.layout.data
        rows, their_targets = (own_rows(t, self._data) for t in (inputs, targets))
        loss = self._pipeline.step(
            rows.to(self.device) if self._is_first else None,
            their_targets.to(self.device) if self._is_last else None,
        )
        if copies == 1:
            return loss
        sum_gradients(self.model, self._data, divide_by=copies)
        total = torch.tensor(loss, device=self.device)
        dist.all_reduce(total, group=self._data)
        return total.item() / copies

    def full_gradients(self) -> dict[str, Tensor]:
        """Every gradient of the whole model by full name, on every rank."""
        stages = [gradients(stage) for stage in self.model.values()]
        everyone: list = [None] * self._pipeline._peers.size
        dist.all_gather_object(everyone, stages, group=self._pipeline._peers.group)
        return joined({i: s for i, s in enumerate(s for held in everyone for s in held)})


def _stages_of(model: Model, num_stages: int, held: tuple[int, ...]) -> dict[int, Chain]:
    if isinstance(model, ModelConfig):
        return cut(model, even_block_ranges(model, num_stages), held=held)
    return cut(model, even_ranges(len(model), num_stages), held=held)


def _pull_chain(levers: Levers, stage: Chain, names: Sequence[str]) -> None:
    """Pull the levers of a stage's layers; the whole model's first and last are its ends."""
    ends = {names[0], names[-1]}
    layers = {name: stage.get_submodule(name) for name in stage.names}
    levers.apply(
        [layer for name, layer in layers.items() if name in ends],
        [layer for name, layer in layers.items() if name not in ends],
    )

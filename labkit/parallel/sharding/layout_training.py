"""One training step of the lab's transformer in any layout: the part that runs on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from labkit.measure.regions import region
from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer
from labkit.parallel.parity import joined
from labkit.parallel.pipelining.pipeline import Pipeline
from labkit.parallel.pipelining.pipeline_guards import check_optimizer
from labkit.parallel.sharding import shards
from labkit.parallel.sharding.data_parallel import own_rows, shard_data, sum_gradients
from labkit.parallel.sharding.layouts import Layout, blocks_of_stage
from labkit.parallel.sharding.tensor_parallel import loss_and_backward, tensor_parallel

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class LayoutTraining:
    """This rank's part of a model in a layout, its optimizer and its step.

    Args:
        config: of the whole model.
        layout: the same on every rank.
        mesh: ``layout.mesh(device.type)``.
        device: of this rank.
        make_optimizer: called with this rank's parameters, after they have been divided.
        seed: of the weights; equal in every layout.
        prepare: called with this rank's still undivided part, to load or change its weights.

    Attributes:
        model: this rank's part; names are those in the whole model.
        optimizer: of its parameters.

    Raises:
        ValueError: (on every rank) the model does not divide, or the ranks disagree.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        make_optimizer: MakeOptimizer = adamw,
        seed: int = 0,
        prepare: Callable[[Transformer], object] | None = None,
    ) -> None:
        layout.check(config, batch=layout.data * layout.microbatches)
        self.config, self.layout, self.mesh, self.device = config, layout, mesh, device
        self.stage = mesh.get_local_rank("pipeline")
        blocks = blocks_of_stage(config.layers, layout.pipeline, self.stage)
        self.model = Transformer(config, layers=blocks, seed=seed).to(device)
        if prepare is not None:
            prepare(self.model)
        self._divide()
        self.optimizer = make_optimizer(self.model.parameters())
        check_optimizer(self.optimizer, [self.model])
        self._pipeline = None
        if layout.pipeline > 1:
            group = mesh["pipeline"].get_group()
            self._pipeline = Pipeline(self.model, layout.schedule(), group=group)

    def _divide(self) -> None:
        layout = self.layout
        if layout.tensor > 1:
            tensor_parallel(
                self.model,
                self.mesh["tensor"],
                style=layout.style,
                sequence=layout.sequence,
            )
        if layout.data > 1 and layout.data_style == "fsdp":
            shard_data(self.model, self.mesh["data"], reshard_after_forward=layout.pipeline == 1)

    def step(self, ids_BT: Tensor, targets_BT: Tensor, *, clip: float | None = None) -> float:
        """Train on one batch, the whole of which every rank is given.

        Args:
            clip: largest norm of the whole model's gradient; None leaves it.

        Returns:
            The mean loss of the whole batch, on every rank.

        Raises:
            ValueError: the rows do not divide, or a parameter is left without a gradient.
        """
        loss = self.backward(ids_BT, targets_BT)
        if clip is not None:
            shards.clip_gradients(self.model, self.gradient_norm(), clip)
        with region("optimizer", "optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def backward(self, ids_BT: Tensor, targets_BT: Tensor) -> float:
        """Forward and backward of the whole batch, every gradient there and settled."""
        self.layout.check(self.config, len(ids_BT))
        group = self.mesh["data"].get_group()
        ids, targets = (own_rows(t, group).to(self.device) for t in (ids_BT, targets_BT))
        if self._pipeline is None:
            loss = loss_and_backward(self.model, ids, targets)
        else:
            loss = torch.tensor(self._pipeline.step(ids, targets), device=self.device)
        if self.layout.data > 1:
            if self.layout.data_style == "copies":
                with region("sum gradients", "collective"):
                    sum_gradients(self.model, group, divide_by=self.layout.data)
            dist.all_reduce(loss, group=group)
            loss /= self.layout.data
        shards.check_gradients(self.model)
        return loss.item()

    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient, on every rank."""
        return shards.gradient_norm(self.model, self.mesh, pipeline_axis="pipeline")

    def full_gradients(self) -> dict[str, Tensor]:
        """Every gradient of the whole model, on every rank; all call together."""
        return self._whole(shards.full_gradients(self.model))

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter of the whole model, on every rank; all call together."""
        return self._whole(shards.full_parameters(self.model))

    def _whole(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.layout.pipeline == 1:
            return dict(held)
        on_host = {name: tensor.cpu() for name, tensor in held.items()}
        stages: list = [None] * self.layout.pipeline
        dist.all_gather_object(stages, on_host, group=self.mesh["pipeline"].get_group())
        return joined(dict(enumerate(stages)))

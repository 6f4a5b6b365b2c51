"""Models as chains of layers that can be rehearsed one by one; the lab's transformer as one.

A chain's ends (embedding, head) and its blocks between have kinds; layers of one kind are alike,
so that one rehearsal speaks for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from labkit.models.config import ModelConfig
from labkit.models.transformer import Block, Embed, Head, next_token_loss
from labkit.parallel.pipelining.losses import BatchLoss, token_losses
from labkit.parallel.pipelining.stages import even_block_ranges, even_ranges, layer_names
from labkit.parallel.planning.layer_rehearsal import LayerProfile, MakeInput, rehearse_layer
from labkit.parallel.planning.levers import Levers
from labkit.parallel.planning.pretended_ranks import pretended_mesh
from labkit.parallel.planning.split_rehearsal import SplitBackward, rehearse_split
from labkit.parallel.sharding.layouts import Layout
from labkit.parallel.sharding.tensor_parallel import tensor_parallel

Loss = Callable[[Tensor], Tensor]
T = TypeVar("T")
INDEX_BYTES = 8
_LAYERS = {"embed": Embed, "block": Block, "head": Head}


class Division(NamedTuple):
    """How tensor-parallel ranks share a layer; the fields are a `Layout`'s."""

    tensor: int = 1
    style: str = "hand"
    sequence: bool = False

    @staticmethod
    def of(layout: Layout) -> Division:
        return Division(layout.tensor, layout.style, layout.sequence)


UNDIVIDED = Division()


class _OneBlock(nn.Module):
    """What `tensor_parallel` divides, of one block."""

    def __init__(self, config: ModelConfig, embed: Embed, block: Block, head: Head) -> None:
        super().__init__()
        self.config, self.embed, self.head = config, embed, head
        self.layers = nn.ModuleDict({"0": block})


class LayerChain(ABC):
    """A model, layer by layer.

    Attributes:
        names: of the layers, in order.
        kinds: one for each; equal kinds are equal layers.
        tied_bytes: of weights that two layers share and each counts.
        cannot_divide: why tensor parallelism is not for it; "" where it is.
        batch_dependent: names of layers that mix the rows of a batch.
        untrained: numbers of the layers without weights to train.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    tied_bytes = 0
    cannot_divide = ""
    batch_dependent: tuple[str, ...] = ()
    untrained: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._outcomes: dict[tuple, Any] = {}

    @property
    def is_end(self) -> tuple[bool, ...]:
        """Which layers are not checkpointed: the first and the last."""
        return tuple(i in (0, len(self.names) - 1) for i in range(len(self.names)))

    def stage_ranges(self, num_stages: int) -> tuple[range, ...]:
        """The layers of each stage, as the engine cuts them."""
        return even_ranges(len(self.names), num_stages)

    def profile(
        self, layer: int, rows: int, levers: Levers, division: Division, whole: bool
    ) -> LayerProfile:
        """Rehearse a layer, or remember how it went.

        Args:
            rows: of a microbatch.
            division: over the tensor-parallel ranks that share the layer.
            whole: the loss is one device's, that of the whole batch in one piece.
        """
        rehearse = partial(rehearse_layer, takes_data=layer == 0)
        return self._rehearsed("whole", rehearse, layer, rows, levers, division, whole)

    def split_backward(self, layer: int, rows: int, levers: Levers) -> SplitBackward:
        """Rehearse the halves of a backward, or remember them; of an undivided layer."""
        return self._rehearsed("split", rehearse_split, layer, rows, levers, UNDIVIDED, False)

    def remembered(self, key: tuple, rehearse: Callable[[], T]) -> T:
        """The outcome of a rehearsal, which is held once for each key."""
        if key not in self._outcomes:
            self._outcomes[key] = rehearse()
        return self._outcomes[key]

    def _rehearsed(
        self,
        what: str,
        rehearse: Callable[..., T],
        layer: int,
        rows: int,
        levers: Levers,
        division: Division,
        whole: bool,
    ) -> T:
        last = layer == len(self.names) - 1
        kind = (what, self.kinds[layer], layer == 0, last)

        def run() -> T:
            with ExitStack() as stack:
                mesh = None
                if division.tensor > 1:
                    mesh = stack.enter_context(pretended_mesh(1, division.tensor))["tensor"]
                mode = FakeTensorMode()
                module = self.divided_layer(layer, division, mesh, levers, mode)
                stack.enter_context(mode)
                loss = self.loss(rows, whole, mode) if last else None
                return rehearse(module, self.input_of(layer, rows, division), loss)

        return self.remembered((*kind, rows, levers, division, whole and last), run)

    def divided_layer(
        self,
        layer: int,
        division: Division,
        mesh: DeviceMesh | None,
        levers: Levers,
        mode: FakeTensorMode,
    ) -> nn.Module:
        """One rank's part of a layer on fake tensors, its levers pulled.

        Args:
            mesh: of the pretended ranks that share it; None for an undivided layer.
        """
        with mode:
            module = self.fake_layer(layer, mode)
            levers.apply(*(([module], []) if self.is_end[layer] else ([], [module])))
        return module if mesh is None else self.divide(layer, module, division, mesh, mode)

    @abstractmethod
    def fake_layer(self, layer: int, mode: FakeTensorMode) -> nn.Module:
        """A whole layer, on fake tensors."""

    def divide(
        self,
        layer: int,
        module: nn.Module,
        division: Division,
        mesh: DeviceMesh,
        mode: FakeTensorMode,
    ) -> nn.Module:
        """This rank's part of a layer, divided by the code that divides it in training."""
        raise ValueError(self.cannot_divide)

    @abstractmethod
    def input_of(self, layer: int, rows: int, division: Division) -> MakeInput:
        """What makes a microbatch of a layer's inputs."""

    @abstractmethod
    def loss(self, rows: int, whole: bool, mode: FakeTensorMode) -> Loss:
        """What makes the scalar behind the last layer."""

    @abstractmethod
    def batch_bytes(self, rows: int) -> tuple[int, int]:
        """Of the inputs and of the targets of so many rows."""


class LabChain(LayerChain):
    """The lab's transformer.

    Args:
        config: its sizes.
        tokens: T of a sequence, at most the context; None for the context.
    """

    def __init__(self, config: ModelConfig, tokens: int | None = None) -> None:
        super().__init__()
        self.config, self.tokens = config, tokens or config.context
        self.names = layer_names(config)
        self.kinds = ("embed", *["block"] * config.layers, "head")

    def stage_ranges(self, num_stages: int) -> tuple[range, ...]:
        return even_block_ranges(self.config, num_stages)

    def fake_layer(self, layer: int, mode: FakeTensorMode) -> nn.Module:
        return _LAYERS[self.kinds[layer]](self.config)

    def divide(
        self,
        layer: int,
        module: nn.Module,
        division: Division,
        mesh: DeviceMesh,
        mode: FakeTensorMode,
    ) -> nn.Module:
        kind = self.kinds[layer]
        if kind != "block" and not division.sequence:
            return module
        with mode:
            others = {name: make(self.config) for name, make in _LAYERS.items()}
        whole = tensor_parallel(
            _OneBlock(self.config, **(others | {kind: module})),
            mesh,
            style=division.style,
            sequence=division.sequence,
        )
        return whole.layers["0"] if kind == "block" else whole.get_submodule(kind)

    def input_of(self, layer: int, rows: int, division: Division) -> MakeInput:
        if layer == 0:
            return lambda: torch.zeros(rows, self.tokens, dtype=torch.int64)
        tokens = self.tokens // (division.tensor if division.sequence else 1)
        return lambda: torch.empty(rows, tokens, self.config.width)

    def loss(self, rows: int, whole: bool, mode: FakeTensorMode) -> Loss:
        targets = torch.zeros(rows, self.tokens, dtype=torch.int64)
        if not whole:
            return BatchLoss(token_losses, [(targets, None)], divide_by=rows).of(0)
        held = []  # the logits have a name in the program, so they live until the backward ends

        def loss(logits: Tensor) -> Tensor:
            held.append(logits.detach())
            return next_token_loss(logits, targets)

        return loss

    def batch_bytes(self, rows: int) -> tuple[int, int]:
        each = rows * self.tokens * INDEX_BYTES
        return each, each

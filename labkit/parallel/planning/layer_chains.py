"""Models as chains of layers that can be rehearsed one by one: the lab's, and your own.

A chain's ends (embedding, head) and its blocks between have kinds; layers of one kind are alike,
so that one rehearsal speaks for all of them.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.models.config import ModelConfig
from labkit.models.transformer import Block, Embed, Head, next_token_loss
from labkit.parallel.pipelining.losses import BatchLoss, LossFunction, token_losses
from labkit.parallel.pipelining.stages import layer_names
from labkit.parallel.planning.layer_rehearsal import LayerProfile, MakeInput, rehearse_layer
from labkit.parallel.planning.levers import Levers

Loss = Callable[[Tensor], Tensor]
INDEX_BYTES = 8


class LayerChain(ABC):
    """A model, layer by layer.

    Attributes:
        names: of the layers, in order.
        kinds: one for each; equal kinds are equal layers.
        tied_bytes: of weights that two layers share and each counts.
        cannot_divide: why tensor parallelism is not for it; "" where it is.
        batch_dependent: names of layers that mix the rows of a batch.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    tied_bytes = 0
    cannot_divide = ""
    batch_dependent: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._profiles: dict[tuple, LayerProfile] = {}

    @property
    def is_end(self) -> tuple[bool, ...]:
        """Which layers are not checkpointed: the first and the last."""
        return tuple(i in (0, len(self.names) - 1) for i in range(len(self.names)))

    def profile(self, layer: int, rows: int, levers: Levers, t: int, whole: bool) -> LayerProfile:
        """Rehearse a layer, or remember how it went.

        Args:
            rows: of a microbatch.
            t: tensor-parallel ranks that share the layer.
            whole: the loss is one device's, that of the whole batch in one piece.
        """
        last = layer == len(self.names) - 1
        key = (self.kinds[layer], layer == 0, last, rows, levers, t, whole and last)
        if key not in self._profiles:
            with FakeTensorMode() as mode:
                module = self.fake_layer(layer, t, mode)
                levers.apply(*(([module], []) if self.is_end[layer] else ([], [module])))
                loss = self.loss(rows, whole, mode) if last else None
                make = self.input_of(layer, rows, mode)
                self._profiles[key] = rehearse_layer(module, make, loss)
        return self._profiles[key]

    @abstractmethod
    def fake_layer(self, layer: int, t: int, mode: FakeTensorMode) -> nn.Module:
        """One rank's part of a layer, on fake tensors."""

    @abstractmethod
    def input_of(self, layer: int, rows: int, mode: FakeTensorMode) -> MakeInput:
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

    def fake_layer(self, layer: int, t: int, mode: FakeTensorMode) -> nn.Module:
        kind = {"embed": Embed, "block": Block, "head": Head}[self.kinds[layer]]
        module = kind(self.config)
        return shard_of_block(module, t) if kind is Block and t > 1 else module

    def input_of(self, layer: int, rows: int, mode: FakeTensorMode) -> MakeInput:
        if layer == 0:
            return lambda: torch.zeros(rows, self.tokens, dtype=torch.int64)
        return lambda: torch.empty(rows, self.tokens, self.config.width)

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


class OwnChain(LayerChain):
    """A model of your own, as blocks in order; each takes the output of the one before.

    Args:
        blocks: by full name.
        inputs, targets: of a batch, one row or more; only shapes and dtypes count.
        loss_fn: (outputs, targets) -> one loss per target, as `Pipeline` takes it.
        tied_bytes: of weights that two blocks share.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        inputs: Tensor,
        targets: Tensor,
        loss_fn: LossFunction,
        tied_bytes: int = 0,
    ) -> None:
        super().__init__()
        self.blocks, self.inputs, self.targets = dict(blocks), inputs, targets
        self.loss_fn, self.tied_bytes = loss_fn, tied_bytes
        self.names = tuple(self.blocks)
        self._forms: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = {}
        form = self._forms_of(2)  # layers that average over rows refuse a single one
        self.kinds = tuple(
            f"{_signature(block)} of {form[i]}" for i, block in enumerate(self.blocks.values())
        )

    def fake_layer(self, layer: int, t: int, mode: FakeTensorMode) -> nn.Module:
        return fake_copy(list(self.blocks.values())[layer], mode)

    def input_of(self, layer: int, rows: int, mode: FakeTensorMode) -> MakeInput:
        shape, dtype = self._forms_of(rows)[layer]
        return lambda: torch.zeros(shape, dtype=dtype)

    def loss(self, rows: int, whole: bool, mode: FakeTensorMode) -> Loss:
        targets = torch.zeros(rows, *self.targets.shape[1:], dtype=self.targets.dtype)
        return BatchLoss(self.loss_fn, [(targets, None)], divide_by=rows).of(0)

    def batch_bytes(self, rows: int) -> tuple[int, int]:
        return tuple(rows * t[:1].nbytes for t in (self.inputs, self.targets))

    def _forms_of(self, rows: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each block's input."""
        if rows not in self._forms:
            forms = []
            with FakeTensorMode() as mode, torch.no_grad():
                x = torch.zeros(rows, *self.inputs.shape[1:], dtype=self.inputs.dtype)
                for name, block in self.blocks.items():
                    forms.append((tuple(x.shape), x.dtype))
                    x = _output(name, fake_copy(block, mode), x)
            self._forms[rows] = forms
        return self._forms[rows]


def _output(name: str, block: nn.Module, x: Tensor) -> Tensor:
    try:
        y = block(x)
    except Exception as error:
        raise ValueError(
            f"block {name} ({type(block).__name__}) does not take a tensor {tuple(x.shape)} of "
            f"{x.dtype}, which the block before hands it: {error}"
        ) from error
    if not isinstance(y, Tensor):
        raise ValueError(
            f"block {name} ({type(block).__name__}) returns a {type(y).__name__}; across a cut "
            "goes one tensor and nothing else"
        )
    return y


def _signature(block: nn.Module) -> str:
    """Equal for blocks that run the same operators on the same shapes."""
    shapes = [(n, tuple(t.shape), t.dtype) for n, t in block.state_dict().items()]
    trained = [p.requires_grad for p in block.parameters()]
    return f"{block!r} {shapes} {trained} {block.training}"


def fake_copy(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a module whose weights are fake: it has their shapes and holds no memory."""
    memo: dict[int, object] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        memo[id(tensor)] = mode.from_tensor(tensor)
    return copy.deepcopy(module, memo)


class _RowShard(nn.Module):
    """The shapes of a `RowLinear`, without its all-reduce."""

    def __init__(self, whole: nn.Linear, t: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(whole.out_features, whole.in_features // t))
        self.bias = nn.Parameter(torch.empty(whole.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.bias


def shard_of_block(block: Block, t: int) -> Block:
    """A block with the matrices that one of t ranks holds, as `tensor_parallel` divides them."""
    for layer in (block.attention, block.mlp):
        for name, linear in list(layer.named_children()):
            if name in ("out", "down"):
                setattr(layer, name, _RowShard(linear, t))
            else:
                setattr(layer, name, nn.Linear(linear.in_features, linear.out_features // t))
    return block

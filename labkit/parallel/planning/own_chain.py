"""A model of your own as a chain of layers to rehearse."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.parallel.pipelining.losses import BatchLoss, LossFunction
from labkit.parallel.planning.layer_chains import Division, LayerChain, Loss
from labkit.parallel.planning.layer_rehearsal import MakeInput, trained_weights


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
        self.untrained = frozenset(
            i for i, block in enumerate(self.blocks.values()) if not trained_weights(block)
        )
        self._forms: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = {}
        form = self._forms_of(2)  # layers that average over rows refuse a single one
        self.kinds = tuple(
            f"{_signature(block)} of {form[i]}" for i, block in enumerate(self.blocks.values())
        )

    def fake_layer(self, layer: int, mode: FakeTensorMode) -> nn.Module:
        return fake_copy(list(self.blocks.values())[layer], mode)

    def input_of(self, layer: int, rows: int, division: Division) -> MakeInput:
        shape, dtype = self._forms_of(rows)[layer]
        return lambda: torch.zeros(shape, dtype=dtype)

    def loss(self, rows: int, whole: bool, mode: FakeTensorMode) -> Loss:
        targets = torch.zeros(rows, *self.targets.shape[1:], dtype=self.targets.dtype)
        return BatchLoss(self.loss_fn, [(targets, None)], divide_by=rows).of(0)

    def batch_bytes(self, rows: int) -> tuple[int, int]:
        return tuple(rows * t[:1].nbytes for t in (self.inputs, self.targets))

    def _rehearsed(self, what: str, rehearse, layer: int, *settings) -> Any:
        try:
            return super()._rehearsed(what, rehearse, layer, *settings)
        except Exception as error:
            name, block = self.names[layer], self.blocks[self.names[layer]]
            raise ValueError(
                f"block {name} ({type(block).__name__}) cannot be rehearsed, forward and "
                f"backward on tensors without values: {error}"
            ) from error

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
    version = x._version
    try:
        y = block(x)
    except Exception as error:
        raise ValueError(
            f"block {name} ({type(block).__name__}) does not take a tensor {tuple(x.shape)} of "
            f"{x.dtype}, which the block before hands it: {error}"
        ) from error
    if x._version != version:
        raise ValueError(
            f"block {name} ({type(block).__name__}) writes into its input, which across a cut, or "
            "to run it again, must stay as it is; use inplace=False, or put it into the block "
            "before"
        )
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

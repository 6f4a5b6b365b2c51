"""Two ways to spend less memory: activation checkpointing, and bfloat16 autocast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Levers:
    """What is done to every layer of a model.

    Args:
        checkpointing: keep a layer's input only, and run its forward again in the backward (Chen
            et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). Embedding and head are
            left as they are: the first keeps next to nothing, the second would be run twice for
            one use.
        autocast: matrix products in bfloat16, by ``torch.autocast``; weights, gradients, optimizer
            state and what goes from layer to layer stay float32.
    """

    checkpointing: bool = False
    autocast: bool = False

    def __str__(self) -> str:
        names = {"checkpointing": self.checkpointing, "bf16 autocast": self.autocast}
        return ", ".join(name for name, used in names.items() if used)

    def apply(self, ends: Iterable[nn.Module], blocks: Iterable[nn.Module]) -> None:
        """Pull them, in place; parameters keep their names.

        Args:
            ends: embedding and head, which are not checkpointed.
            blocks: the layers between.
        """
        for layers, recomputed in ((ends, False), (blocks, self.checkpointing)):
            for layer in layers:
                layer.forward = self._levered(layer.forward, recomputed)

    def _levered(self, forward, recomputed: bool):
        if self.autocast:
            forward = partial(_autocast, forward)
        # outside autocast, which torch restores itself when it runs the forward again
        return partial(_recomputed, forward) if recomputed else forward


PLAIN = Levers()


def _autocast(forward, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        y = forward(x)
    return y.float() if y.dtype == torch.bfloat16 else y


def _recomputed(forward, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(x)
    # the second run draws the random numbers of the first: the same mask of a dropout
    return checkpoint(forward, x, use_reentrant=False, preserve_rng_state=True)

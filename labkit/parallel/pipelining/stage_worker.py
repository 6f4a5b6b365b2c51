"""Runs the four actions of one stage: F, B, I and W, each for one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

LossOf = Callable[[Tensor], Tensor]


class _Held(NamedTuple):
    """What a stage keeps of a microbatch between its actions."""

    entered: Tensor
    root: Tensor | GradientEdge | None  # where the backward starts; None without a gradient
    gradient: Tensor | None = None  # of the root, from the stage behind
    unfinished: list[dict[str, Any]] | None = None  # of I, for W


class StageWorker:
    """One stage of this rank.

    Args:
        module: the layers; takes one tensor and returns one.
        is_first: its input is data and gets no gradient.
        splits_backward: the schedule runs I and W in place of B.
    """

    def __init__(self, module: nn.Module, *, is_first: bool, splits_backward: bool) -> None:
        self.module, self.is_first, self.splits_backward = module, is_first, splits_backward
        self._held: dict[int, _Held] = {}

    def forward(self, microbatch: int, entered: Tensor, loss_of: LossOf | None = None) -> Tensor:
        """The stage's output; on the last stage, with `loss_of`, the summed loss.

        Keeps for the backward what autograd keeps, and not the output: only where its graph begins.
        """
        entered = entered if self.is_first else entered.requires_grad_()
        out = self.module(entered)
        if loss_of is not None:
            out = loss_of(out)
        if not torch.is_grad_enabled():
            return out
        root = None
        if out.requires_grad:
            root = _detachable(out) if self.splits_backward else get_gradient_edge(out)
        self._held[microbatch] = _Held(entered, root)
        return out.detach()

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """All gradients; returns the one of the input, None on the first stage."""
        entered, root, *_ = self._held.pop(microbatch)
        if root is not None:
            torch.autograd.backward([root], [gradient])
        return self._gradient_of(entered)

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the input alone; W has to follow. The first stage leaves all to W."""
        held = self._held[microbatch]
        if self.is_first or held.root is None:
            self._held[microbatch] = held._replace(gradient=gradient)
            return None if self.is_first else self._gradient_of(held.entered)
        gradients = None if gradient is None else [gradient]
        _, unfinished = stage_backward_input(
            [held.root], gradients, [held.entered], iter(self._trained)
        )
        self._held[microbatch] = held._replace(root=None, unfinished=unfinished)
        return self._gradient_of(held.entered)

    def backward_weight(self, microbatch: int) -> None:
        """The gradients of the weights, added to those that are there."""
        _, root, gradient, unfinished = self._held.pop(microbatch)
        if unfinished is not None:
            stage_backward_weight(iter(self._trained), unfinished)
        elif root is not None:
            torch.autograd.backward([root], [gradient])

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def _gradient_of(self, entered: Tensor) -> Tensor | None:
        if self.is_first:
            return None
        gradient, entered.grad = entered.grad, None
        return torch.zeros_like(entered) if gradient is None else gradient


def _detachable(out: Tensor) -> Tensor:
    """torch's input half ends by detaching its root in place, which a view does not allow."""
    return out.clone() if out._is_view() else out

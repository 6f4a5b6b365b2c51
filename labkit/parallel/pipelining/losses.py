"""Losses per target, whose sum over microbatches is divided once by the number of valid targets.

The mean of the microbatches' means is not the mean over the batch when some targets do not count,
and a microbatch of which none counts would be 0/0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LossFunction = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> one per target
Scale = Callable[[Tensor], Tensor]
IGNORED = -100  # torch's own default for targets that do not count


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats of each target: (..., V) and int64 (...) -> (...), 0 where ignored."""
    flat = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return flat.view(targets.shape)


def valid_targets(targets: Tensor, valid: Tensor | None = None) -> Tensor | None:
    """Which targets count, as bool of the targets' shape; None when all do.

    Args:
        targets: int64 with `IGNORED` where a target does not count, or floating point.
        valid: bool, of the targets' shape or of its first dims (B,), (B, T) ...

    Raises:
        ValueError: `valid` has another shape.
    """
    mask = None if targets.is_floating_point() else targets != IGNORED
    if valid is not None:
        if valid.shape != targets.shape[: valid.dim()]:
            raise ValueError(
                f"valid has shape {tuple(valid.shape)} and targets {tuple(targets.shape)}; valid "
                "must have the targets' shape or its first dims"
            )
        further = targets.dim() - valid.dim()
        valid = valid.bool().reshape(valid.shape + (1,) * further).expand(targets.shape)
        mask = valid if mask is None else mask & valid
    return None if mask is None or bool(mask.all()) else mask


def count_valid(targets: Tensor, valid: Tensor | None = None) -> int:
    """Number of targets that count: what a sum of losses is divided by.

    >>> import torch
    >>> count_valid(torch.tensor([[3, 4], [5, IGNORED]]))
    3
    """
    mask = valid_targets(targets, valid)
    return targets.numel() if mask is None else int(mask.sum())


class BatchLoss:
    """The loss of one batch on the last stage, gathered microbatch by microbatch in `total`.

    Args:
        loss_fn: returns a tensor of the targets' shape.
        targets: per microbatch its targets and which of them count (None: all).
        divide_by: number of valid targets; the backward starts from the sum over this.
        scale: applied to what the backward starts from, such as a `GradScaler`'s.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        targets: Sequence[tuple[Tensor, Tensor | None]],
        divide_by: int,
        scale: Scale | None = None,
    ) -> None:
        self._loss_fn, self._targets = loss_fn, targets
        self._divide_by, self._scale = divide_by, scale
        self.total: Tensor | None = None

    def of(self, microbatch: int) -> Callable[[Tensor], Tensor]:
        """What makes this microbatch's loss, ready for its backward, from the last outputs."""

        def loss(outputs: Tensor) -> Tensor:
            targets, mask = self._targets[microbatch]
            losses = self._loss_fn(outputs, targets)
            # a sum in which nothing counts is 0 with gradient 0, where a mean would be NaN
            summed = (losses if mask is None else losses.where(mask, 0.0)).sum()
            mean = summed / self._divide_by
            self._add(mean.detach())
            return mean if self._scale is None else self._scale(mean)

        return loss

    def _add(self, share: Tensor) -> None:
        share = share.to(total_dtype(share.dtype))
        self.total = share if self.total is None else self.total + share


def total_dtype(dtype: torch.dtype) -> torch.dtype:
    """What losses are summed in: float64 where the model computes in it, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_per_target(losses: Tensor, targets: Tensor) -> None:
    """Check that a loss function returned one loss per target.

    Raises:
        ValueError: it returned a mean or a sum, of which no global mean can be made.
    """
    if losses.shape != targets.shape:
        raise ValueError(
            f"loss_fn returned shape {tuple(losses.shape)} for targets {tuple(targets.shape)}; it "
            "must return one loss per target (reduction='none'), which is summed and divided by "
            "the number of valid targets of the whole batch"
        )

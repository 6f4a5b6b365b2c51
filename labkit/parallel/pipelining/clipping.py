"""The gradient norm of the whole model, of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from labkit.parallel.peers import Peers


@torch.no_grad()
def global_gradient_norm(
    parameters: Iterable[nn.Parameter], peers: Peers, counted_elsewhere: Collection[int] = ()
) -> Tensor:
    """Euclidean norm over the gradients of all ranks; every rank must call.

    Args:
        parameters: those of this rank.
        counted_elsewhere: ids of parameters whose gradient another one stands for (tied weights).
    """
    mine = [p.grad for p in parameters if p.grad is not None and id(p) not in counted_elsewhere]
    squared = get_total_norm(mine).to(peers.device).square() if mine else _zero(peers.device)
    if peers.size > 1:
        dist.all_reduce(squared, group=peers.group)
    return squared.sqrt()


def clip_to_global_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    peers: Peers,
    counted_elsewhere: Collection[int] = (),
) -> float:
    """Scale the gradients of all ranks by one factor so that their common norm is at most max_norm.

    `torch.nn.utils.clip_grad_norm_` on each rank would see the local stage only, and scale each
    stage differently.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: `max_norm` is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be above 0")
    parameters = list(parameters)
    norm = global_gradient_norm(parameters, peers, counted_elsewhere)
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm.item()


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), device=device)

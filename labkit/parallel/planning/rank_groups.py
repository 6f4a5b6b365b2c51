"""Which ranks of a layout share a stage, a batch or a matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from labkit.parallel.sharding.layouts import AXES, Layout

Grid = tuple[tuple[tuple[int, ...], ...], ...]


def rank_grid(layout: Layout) -> Grid:
    """Ranks by place along pipeline, data and tensor, whichever of them are neighbours.

    >>> rank_grid(Layout(pipeline=2, tensor=2))
    (((0, 1),), ((2, 3),))
    >>> rank_grid(Layout(pipeline=2, tensor=2, order=("tensor", "pipeline", "data")))
    (((0, 2),), ((1, 3),))
    """
    sizes = [getattr(layout, name) for name in layout.order]
    ranks = torch.arange(layout.ranks).view(sizes)
    grid = ranks.permute([layout.order.index(axis) for axis in AXES]).tolist()
    return tuple(tuple(tuple(shared) for shared in replicas) for replicas in grid)


def all_ranks(replicas: Sequence[Sequence[int]]) -> list[int]:
    """The ranks of a stage in one list."""
    return [rank for shared in replicas for rank in shared]

"""Weights that two stages share, such as embedding and head: kept equal, their gradients summed.

Without this they drift apart silently, since each stage sees half of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.peers import Peers

Names = tuple[str, ...]


def find_tied(model: nn.Module) -> tuple[Names, ...]:
    """The groups of full names under which `model` holds one and the same parameter.

    >>> pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> pair[1].weight = pair[0].weight
    >>> find_tied(pair)
    (('0.weight', '1.weight'),)
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


class TiedWeights:
    """The tied parameters of this rank, and the ranks that hold their other ends.

    All ranks must construct it together. The weights of each group are made equal at once, to
    those of the first name.

    Args:
        stages: the modules of this rank.
        groups: full names that stand for one weight, each held by exactly one stage.

    Raises:
        ValueError: (on every rank) a name is held by no stage or by two, or shapes differ.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], groups: Sequence[Names], peers: Peers
    ) -> None:
        own: dict[str, list[nn.Parameter]] = {}
        for module in stages.values():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                own.setdefault(name, []).append(parameter)
        wanted = set(chain.from_iterable(groups))
        shapes = {name: [tuple(p.shape) for p in own[name]] for name in wanted & own.keys()}
        everywhere = peers.gather(shapes) if groups else []
        _check_groups(groups, everywhere)
        self._groups = [
            _Group(
                [own[name][0] for name in names if name in own], *_ends(names, everywhere, peers)
            )
            for names in groups
        ]
        for group in self._groups:
            group.equalise()

    def set_aside(self) -> None:
        """Before a step: keep what has accumulated, so that the step's own gradient is summed."""
        for group in self._groups:
            group.set_aside()

    def sum_gradients(self) -> None:
        """After a step: give every end the sum of all ends' gradients."""
        for group in self._groups:
            group.sum_gradients()

    def counted_elsewhere(self) -> set[int]:
        """Ids of the parameters that another parameter stands for in a norm."""
        return set(chain.from_iterable(group.counted_elsewhere() for group in self._groups))


def _check_groups(groups: Sequence[Names], everywhere: Sequence[Mapping[str, list]]) -> None:
    for names in groups:
        found = {
            name: [shape for own in everywhere for shape in own.get(name, [])] for name in names
        }
        for name, shapes in found.items():
            if len(shapes) != 1:
                raise ValueError(
                    f"tied weight {name} is held by {len(shapes)} stages; it must be the full name "
                    "of one parameter of one stage"
                )
        if len({shapes[0] for shapes in found.values()}) > 1:
            raise ValueError(f"tied weights must have one shape, got {found}")


def _ends(
    names: Names, everywhere: Sequence[Mapping[str, list]], peers: Peers
) -> tuple[list[int], dist.ProcessGroup | None, bool]:
    """Ranks that hold an end, the group of them, and whether this rank holds the first name."""
    ranks = [rank for rank, own in enumerate(everywhere) if any(name in own for name in names)]
    holds_first = names[0] in everywhere[peers.rank]
    group = None
    if peers.rank in ranks and len(ranks) > 1:
        members = [peers.global_rank(rank) for rank in ranks]
        group = dist.new_group(members, use_local_synchronization=True)
    source = next(rank for rank in ranks if names[0] in everywhere[rank])
    return ranks.index(source), group, holds_first


class _Group:
    """The ends of one tied weight on this rank; without any it does nothing."""

    def __init__(
        self,
        ends: list[nn.Parameter],
        source: int,
        group: dist.ProcessGroup | None,
        holds_first: bool,
    ) -> None:
        self._ends = list({id(p): p for p in ends}.values())
        self._source, self._group, self._holds_first = source, group, holds_first
        self._aside: list[Tensor | None] = []

    @torch.no_grad()
    def equalise(self) -> None:
        if not self._ends:
            return
        weight = self._ends[0].detach().clone()
        if self._group is not None:
            dist.broadcast(weight, group_src=self._source, group=self._group)
        for end in self._ends:
            end.copy_(weight)

    def set_aside(self) -> None:
        self._aside = [end.grad for end in self._ends]
        for end in self._ends:
            end.grad = None

    @torch.no_grad()
    def sum_gradients(self) -> None:
        if not self._ends:
            return
        own = [end.grad for end in self._ends if end.grad is not None]
        total = sum(own[1:], own[0].clone()) if own else torch.zeros_like(self._ends[0])
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        for end, before in zip(self._ends, self._aside, strict=True):
            end.grad = total.clone() if before is None else before + total

    def counted_elsewhere(self) -> Iterable[int]:
        ends = self._ends[1:] if self._holds_first else self._ends
        return [id(end) for end in ends]

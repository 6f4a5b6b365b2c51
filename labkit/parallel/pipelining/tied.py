"""Weights that two stages share, such as embedding and head: kept equal, their gradients summed.

Without this they drift apart silently, since each stage sees half of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from labkit.parallel.peers import Peers
from labkit.parallel.pipelining.links import Link, Pair

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

    Args:
        stages: the modules of this rank.
        groups: full names that stand for one weight, each held by exactly one stage.

    Raises:
        ValueError: (on every rank) a name is held by no stage or by two, or shapes differ.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], groups: Sequence[Names], peers: Peers
    ) -> None:
        own = _by_name(stages)
        wanted = set(chain.from_iterable(groups)) & own.keys()
        shapes = {name: [tuple(p.shape) for p in own[name]] for name in wanted}
        everywhere = peers.gather(shapes) if groups else []
        _check_groups(groups, everywhere)
        self.pairs: set[Pair] = set()
        self._weights = []
        for names in groups:
            holders = list(dict.fromkeys(_rank_of(name, everywhere) for name in names))
            self.pairs |= {
                (a, b) for a in holders for b in holders if a != b and holders[0] in (a, b)
            }
            ends = [own[name][0] for name in names if name in own]
            self._weights.append(_TiedWeight(ends, holders, peers.rank))

    def equalise(self, links: Mapping[Pair, Link]) -> None:
        """Give every end the weight of its group's first name; `links` serve `self.pairs`."""
        for weight in self._weights:
            weight.equalise(links)

    def set_aside(self) -> None:
        """Before a step: keep what has accumulated, so that the step's own gradient is summed."""
        for weight in self._weights:
            weight.set_aside()

    def sum_gradients(self, links: Mapping[Pair, Link]) -> None:
        """After a step: give every end the sum of all ends' gradients."""
        for weight in self._weights:
            weight.sum_gradients(links)

    def counted_elsewhere(self) -> set[int]:
        """Ids of the parameters that another parameter stands for in a norm."""
        return {key for weight in self._weights for key in weight.counted_elsewhere()}


def _by_name(stages: Mapping[int, nn.Module]) -> dict[str, list[nn.Parameter]]:
    own: dict[str, list[nn.Parameter]] = {}
    for module in stages.values():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            own.setdefault(name, []).append(parameter)
    return own


def _rank_of(name: str, everywhere: Sequence[Mapping[str, list]]) -> int:
    return next(rank for rank, own in enumerate(everywhere) if name in own)


def _check_groups(groups: Sequence[Names], everywhere: Sequence[Mapping[str, list]]) -> None:
    for names in groups:
        found = {name: [s for own in everywhere for s in own.get(name, [])] for name in names}
        for name, shapes in found.items():
            if len(shapes) != 1:
                raise ValueError(
                    f"tied weight {name} is held by {len(shapes)} stages; it must be the full name "
                    "of one parameter of one stage"
                )
        if len({shapes[0] for shapes in found.values()}) > 1:
            raise ValueError(f"tied weights must have one shape, got {found}")


class _TiedWeight:
    """The ends of one tied weight on this rank; without any it does nothing.

    Args:
        ends: parameters of this rank, maybe one and the same.
        holders: ranks that hold an end, that of the first name first.
    """

    def __init__(self, ends: list[nn.Parameter], holders: list[int], rank: int) -> None:
        self._ends = list({id(p): p for p in ends}.values())
        self._holders, self._rank = holders, rank
        self._aside: list[Tensor | None] = []

    @torch.no_grad()
    def equalise(self, links: Mapping[Pair, Link]) -> None:
        if self._ends:
            weight = self._ends[0].detach().clone()
            self._spread(weight, links)
            for end in self._ends:
                end.copy_(weight)

    def set_aside(self) -> None:
        self._aside = [end.grad for end in self._ends]
        for end in self._ends:
            end.grad = None

    @torch.no_grad()
    def sum_gradients(self, links: Mapping[Pair, Link]) -> None:
        if not self._ends:
            return
        total = torch.zeros_like(self._ends[0])
        for end in self._ends:
            if end.grad is not None:
                total += end.grad
        self._collect(total, links)
        self._spread(total, links)
        for end, before in zip(self._ends, self._aside, strict=True):
            end.grad = total.clone() if before is None else before + total

    def counted_elsewhere(self) -> list[int]:
        is_first = self._rank == self._holders[0]
        return [id(end) for end in (self._ends[1:] if is_first else self._ends)]

    def _collect(self, total: Tensor, links: Mapping[Pair, Link]) -> None:
        """Add the others' totals on the first holder."""
        first, *others = self._holders
        if self._rank != first:
            links[self._rank, first].send(total).wait()
            return
        for other in others:
            buffer = torch.empty_like(total)
            links[other, first].receive(buffer).wait()
            total += buffer

    def _spread(self, tensor: Tensor, links: Mapping[Pair, Link]) -> None:
        """Overwrite the others' tensors by the first holder's."""
        first, *others = self._holders
        if self._rank != first:
            links[first, self._rank].receive(tensor).wait()
            return
        for work in [links[first, other].send(tensor) for other in others]:
            work.wait()

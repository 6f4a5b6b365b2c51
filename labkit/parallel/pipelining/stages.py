"""Cuts a model into stages that keep their layers' full names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from labkit.models.config import ModelConfig
from labkit.models.transformer import Block, Embed, Head, initialise_by_name
from labkit.parallel.pipelining.tied import Names, find_tied


class Chain(nn.Module):
    """Blocks one after the other, each under its full name in the whole model.

    Args:
        blocks: by name, such as `layers.3`, in order of execution.
        tied: groups of full names that stand for one weight of the whole model.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], tied: Sequence[Names] = ()) -> None:
        super().__init__()
        self.names, self.tied = tuple(blocks), tuple(tied)
        for name, block in blocks.items():
            parent = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(leaf, block)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


Model = ModelConfig | nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module]


def cut(
    model: Model, ranges: Sequence[range], *, held: Iterable[int] | None = None, seed: int = 0
) -> dict[int, Chain]:
    """The stages of a model by number.

    Args:
        model: the lab transformer's configuration, of which only what is held is built (layer 0 is
            the embedding, the last one the head, as a `Placement` counts); or blocks in order:
            an `nn.Sequential`, a list, a mapping from name to block. Blocks are not copied.
        ranges: layer numbers of each stage, as `Placement.ranges` or `even_ranges` give them.
        held: stages to return; None for all.
        seed: of a configuration's weights, which depend on it and their names alone.

    Raises:
        ValueError: the ranges do not cover the layers in order, or a block is no link of a chain:
            it needs more than the output of the block before.

    >>> two = cut(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), even_ranges(3, 2))
    >>> [name for stage in two.values() for name, _ in stage.named_parameters()]
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    names = layer_names(model) if isinstance(model, ModelConfig) else tuple(blocks_of(model))
    _check_ranges(ranges, len(names))
    stages = range(len(ranges)) if held is None else held
    if isinstance(model, ModelConfig):
        return {s: _lab_chain(model, [names[i] for i in ranges[s]], seed) for s in stages}
    blocks = blocks_of(model)
    for name, block in blocks.items():
        check_link(name, block)
    tied = tuple(names for names in find_tied(Chain(blocks)))
    return {s: Chain({names[i]: blocks[names[i]] for i in ranges[s]}, tied) for s in stages}


def even_ranges(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """As many layers in each stage as in any other; the first ones take what is left over.

    >>> even_ranges(10, 4)
    (range(0, 3), range(3, 6), range(6, 8), range(8, 10))
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"{num_layers} layers in {num_stages} stages: every stage needs at least one layer; "
            f"try 1 to {num_layers} stages"
        )
    base, extra = divmod(num_layers, num_stages)
    edges = [base * i + min(i, extra) for i in range(num_stages + 1)]
    return tuple(map(range, edges, edges[1:]))


def even_block_ranges(config: ModelConfig, num_stages: int) -> tuple[range, ...]:
    """The lab transformer's blocks shared out evenly; embedding and head go with the ends.

    >>> even_block_ranges(ModelConfig(layers=4, width=8, heads=1, context=8), 2)
    (range(0, 3), range(3, 6))
    """
    blocks = even_ranges(config.layers, num_stages)
    edges = [0, *(held.start + 1 for held in blocks[1:]), config.layers + 2]
    return tuple(map(range, edges, edges[1:]))


def layer_names(config: ModelConfig) -> tuple[str, ...]:
    """The names of the lab transformer's layers, embedding and head counted."""
    return ("embed", *(f"layers.{i}" for i in range(config.layers)), "head")


def _lab_chain(config: ModelConfig, names: Sequence[str], seed: int) -> Chain:
    kinds = {"embed": Embed, "head": Head}
    chain = Chain({name: kinds.get(name, Block)(config) for name in names})
    initialise_by_name(chain, config.layers, seed)
    return chain


def blocks_of(model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module]) -> dict:
    """The blocks of a model by name, in order of execution.

    Raises:
        ValueError: nothing says in which order its blocks run.
    """
    if isinstance(model, nn.Sequential):
        return dict(model._modules)
    if isinstance(model, nn.Module):
        raise ValueError(
            f"{type(model).__name__} does not say in which order its blocks run; pass them as an "
            "nn.Sequential, a list, or a mapping from full name to block, or use `cut_at`"
        )
    return dict(model) if isinstance(model, Mapping) else {str(i): b for i, b in enumerate(model)}


def check_link(name: str, block: nn.Module) -> None:
    """Check that a block takes the output of the block before and nothing else.

    Raises:
        ValueError: its forward has another number of required arguments.
    """
    parameters = inspect.signature(block.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p.name for p in parameters if p.kind in positional and p.default is p.empty]
    takes_one = bool(required) or any(p.kind in (*positional, p.VAR_POSITIONAL) for p in parameters)
    if len(required) > 1 or not takes_one:
        raise ValueError(
            f"block {name} ({type(block).__name__}) takes ({', '.join(required)}); across a cut it "
            "gets the output of the block before and nothing else: put what shares more than that "
            "into one block"
        )


def _check_ranges(ranges: Sequence[range], num_layers: int) -> None:
    covered = [layer for held in ranges for layer in held]
    if covered != list(range(num_layers)) or not all(ranges):
        raise ValueError(
            f"ranges={[(r.start, r.stop) for r in ranges]} must cover layers 0 to {num_layers - 1} "
            f"in order, each stage at least one; try even_ranges({num_layers}, {len(ranges)})"
        )

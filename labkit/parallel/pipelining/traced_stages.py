"""Cuts a model whose forward is ordinary code: its graph is traced, and each stage gets a part.

What runs in one stage may branch and join as it likes. Across a cut exactly one value may go; a
skip connection over a cut is refused by name, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx, nn

from labkit.parallel.pipelining.tied import find_tied

StageOf = dict[fx.Node, int]


def cut_at(
    model: nn.Module, starts: Sequence[str], *, held: Iterable[int] | None = None
) -> dict[int, fx.GraphModule]:
    """The stages of a traceable model by number; its modules are shared, not copied.

    Args:
        model: takes one tensor; what `torch.fx` can trace.
        starts: full name of the module with which each stage but the first begins.
        held: stages to return; None for all.

    Raises:
        ValueError: the model cannot be traced or takes more than one input, a start does not come
            in that order, or more than one value crosses a cut; the message names it.
    """
    graph = _trace(model)
    stage_of = _stages_of_nodes(graph, starts)
    crossing = [_crossing(stage_of, cut, start) for cut, start in enumerate(starts)]
    stages = {}
    for stage in range(len(starts) + 1) if held is None else held:
        entering = crossing[stage - 1] if stage > 0 else None
        leaving = crossing[stage] if stage < len(starts) else None
        part = _part_of(graph, stage_of, stage, entering, leaving)
        stages[stage] = fx.GraphModule(model, part)
        stages[stage].tied = find_tied(model)
    return stages


def _trace(model: nn.Module) -> fx.Graph:
    name = type(model).__name__
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be traced ({type(error).__name__}: {error}); give its blocks as an "
            "nn.Sequential, a list, or a mapping from full name to block, and use `cut`"
        ) from error
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise ValueError(
            f"{name} takes ({', '.join(inputs)}); a pipeline's model takes one tensor: compute the "
            "others inside, or close over them"
        )
    return graph


def _stages_of_nodes(graph: fx.Graph, starts: Sequence[str]) -> StageOf:
    """In order of execution, each node in the stage whose start came last."""
    stage_of, stage = {}, 0
    for node in graph.nodes:
        if node.op == "call_module" and stage < len(starts):
            stage += f"{node.target}.".startswith(f"{starts[stage]}.")
        stage_of[node] = stage
    if stage < len(starts):
        raise ValueError(
            f"no module {starts[stage]!r} runs after {starts[stage - 1] if stage else 'the start'}"
            f"; starts={list(starts)} must be full names in order of execution"
        )
    for node in graph.nodes:
        if node.op == "get_attr":  # a bare parameter belongs to who reads it
            stage_of[node] = _only_reader(node, stage_of)
    return stage_of


def _only_reader(node: fx.Node, stage_of: StageOf) -> int:
    readers = {stage_of[user] for user in node.users}
    if len(readers) > 1:
        raise ValueError(
            f"{node.target} is read in stages {sorted(readers)}; give each stage a weight of its "
            "own and tie them"
        )
    return readers.pop() if readers else stage_of[node]


def _crossing(stage_of: StageOf, cut: int, start: str) -> fx.Node:
    """The one value that goes from stage `cut` to the next."""
    over = {}
    for node, stage in stage_of.items():
        later = [user for user in node.users if stage_of[user] > cut]
        if stage <= cut and later:
            over[node] = later[-1]
    if len(over) != 1:
        read = "; ".join(f"{node} is read by {user}" for node, user in over.items())
        raise ValueError(
            f"{len(over)} values cross the cut before {start} ({read}); a stage hands exactly one "
            "tensor to the next: keep both ends of a skip connection within one stage"
        )
    return next(iter(over))


def _part_of(
    graph: fx.Graph,
    stage_of: StageOf,
    stage: int,
    entering: fx.Node | None,
    leaving: fx.Node | None,
) -> fx.Graph:
    """The nodes of one stage, with its own input and output."""
    part, copied = fx.Graph(), {}
    if entering is not None:
        copied[entering] = part.placeholder(entering.name)
    for node in graph.nodes:
        if stage_of[node] == stage:
            copied[node] = part.node_copy(node, copied.__getitem__)
    if leaving is not None:
        part.output(copied[leaving])
    return part

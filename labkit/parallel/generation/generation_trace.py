"""One ``generate`` on this rank, spread in one of the ways there are, measured or recorded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from labkit.devices.inventory import DeviceSet
from labkit.measure.step_trace import StepTrace, trace_step
from labkit.models.decoder import Decoder
from labkit.parallel.generation.generate import Generated, generate
from labkit.parallel.generation.rank_runners import LayersOnRanks, TensorOnRanks
from labkit.parallel.generation.runners import even_layers
from labkit.parallel.peers import Peers


@dataclass(frozen=True)
class GenerationTrace:
    """What one rank generated, and what it noted; ``read_generation`` joins those of all."""

    made: Generated
    step: StepTrace


def trace_generation(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    devices: DeviceSet,
    tensor: bool = False,
    layers: Sequence[range] | None = None,
    groups: int = 1,
    group: dist.ProcessGroup | None = None,
    steps: int = 3,
) -> GenerationTrace:
    """Generate greedily and note what this rank does; call it on every rank at once.

    Args:
        decoder: the whole model, equal on all ranks; it stays whole.
        devices: those of the notebook; the kind decides between measuring and recording.
        tensor: every rank takes its share of each layer; else each takes layers of its own,
            those of ``layers`` by rank, or as many as any other.
        groups: of sequences in flight at once.
        group: the ranks that share the model; None for all, or for one process.
        steps: timed calls on real devices.

    Raises:
        ValueError: ``layers`` are given with ``tensor``; or as ``generate``, ``LayersOnRanks`` and
            ``TensorOnRanks``.
        VirtualOutOfMemoryError: a virtual device's memory is exceeded.
    """
    if tensor and layers is not None:
        raise ValueError(f"layers={list(layers)} with tensor=True: choose one of the two ways")
    peers = Peers(group)
    if tensor:
        runner = TensorOnRanks(copy.deepcopy(decoder), peers.group)
        held = runner.decoder
    else:
        split = even_layers(decoder.shape.layers, peers.size) if layers is None else layers
        held = decoder.part(split[peers.rank])
        runner = LayersOnRanks(held, peers.group)

    made: list[Generated] = []  # of each run; all give the same tokens

    def run() -> None:
        made[:] = [generate(runner, prompts, new_tokens=new_tokens, groups=groups)]

    trace = trace_step(run, devices=devices, hold=[held], group=peers.group, steps=steps)
    return GenerationTrace(made[0], trace)

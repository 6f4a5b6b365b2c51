"""Bytes and number of collectives in a training step: predicted from sizes, counted as executed.

A payload is the bytes of the whole tensor that is reduced, gathered or scattered; a ring of n ranks
moves 2 (n - 1) / n of an all-reduce's over each link and (n - 1) / n of the others' (Thakur et al.
2005, as in ``measure.collective_costs``).

Predictions are for float32, a step without clipping and an undivided vocabulary. Of a pipeline's
axis only messages between stages count; its own bookkeeping is a few bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from labkit.measure.virtual.recording import Recording
from labkit.models.config import ModelConfig
from labkit.parallel.sharding.layouts import Layout, blocks_of_stage

VALUE_BYTES = 4


class Count(NamedTuple):
    """How many of one kind, and their payloads together."""

    number: int
    num_bytes: int

    def __add__(self, other: tuple[int, int]) -> Count:
        return Count(self.number + other[0], self.num_bytes + other[1])


Traffic = dict[tuple[str, str], Count]  # by axis and kind, as ("tensor", "all_reduce")


def counted_traffic(recording: Recording, mesh: DeviceMesh) -> Traffic:
    """What one rank's recorded step really sent and joined, by mesh axis.

    Args:
        mesh: the layout's, on the recorded rank.
    """
    axes = {tuple(mesh[name].mesh.flatten().tolist()): name for name in mesh.mesh_dim_names}
    found: Traffic = {}
    for event in recording.events:
        if event.kind == "send":
            key = ("pipeline", "message")
        elif event.kind == "collective" and len(event.ranks) > 1:
            key = (axes.get(event.ranks, "all"), event.name)
            if key[0] == "pipeline":
                continue
        else:
            continue
        found[key] = found.get(key, Count(0, 0)) + (1, event.num_bytes)
    return found


def predict_traffic(config: ModelConfig, layout: Layout, batch: int, *, stage: int = 0) -> Traffic:
    """What one rank of a pipeline stage sends and joins in a step.

    Args:
        batch: rows of the whole batch.
        stage: of the rank; 0 without a pipeline.

    Raises:
        ValueError: the layout does not divide the model or the batch.
    """
    layout.check(config, batch)
    step = _Step(config, layout, batch, stage)
    traffic: Traffic = {}
    for axis, kind, number, num_bytes in step.calls():
        if number:
            traffic[axis, kind] = traffic.get((axis, kind), Count(0, 0)) + (number, num_bytes)
    return traffic


@dataclass(frozen=True)
class _Step:
    """The formulas; ``calls`` yields axis, kind, number and payloads together."""

    config: ModelConfig
    layout: Layout
    batch: int
    stage: int

    def calls(self) -> Iterator[tuple[str, str, int, int]]:
        if self.layout.pipeline > 1:
            cuts = (self.stage > 0) + (self.stage < self.layout.pipeline - 1)
            yield "pipeline", "message", cuts * self.microbatches, cuts * self.activation_bytes
            if self.stage:
                yield "pipeline", "message", 1, VALUE_BYTES  # the loss, beside the last gradient
        if self.layout.tensor > 1:
            yield from self._sequence() if self.layout.sequence else self._tensor()
        if self.layout.data > 1:
            yield from self._copies() if self.layout.data_style == "copies" else self._fsdp()
            yield "data", "all_reduce", 1, VALUE_BYTES  # the loss

    @property
    def microbatches(self) -> int:
        return self.layout.microbatches if self.layout.pipeline > 1 else 1

    @property
    def activation_bytes(self) -> int:
        """Of all this replica's rows and tokens, (B / data, T, D)."""
        rows = self.batch // self.layout.data
        return rows * self.config.context * self.config.width * VALUE_BYTES

    @property
    def blocks(self) -> int:
        return len(blocks_of_stage(self.config.layers, self.layout.pipeline, self.stage))

    @property
    def _units(self) -> list[list[tuple[int, ...]]]:
        return unit_shapes(self.config, self.layout, self.stage)

    def _tensor(self) -> Iterator[tuple[str, str, int, int]]:
        """Attention and MLP of each block: one all-reduce forward and one backward."""
        calls = 4 * self.blocks
        yield "tensor", "all_reduce", calls * self.microbatches, calls * self.activation_bytes

    def _sequence(self) -> Iterator[tuple[str, str, int, int]]:
        """Each all-reduce becomes an all-gather on one side and a reduce-scatter on the other."""
        calls = 4 * self.blocks
        # and the head gathers once forward, the embedding once backward
        yield "tensor", "all_gather", calls + 2, (calls + 2) * self.activation_bytes
        yield "tensor", "reduce_scatter", calls, calls * self.activation_bytes
        # each rank's norms saw its own tokens only: summed together, by FSDP2 one by one
        norms = 4 * self.blocks + 2
        by_fsdp = self.layout.data > 1 and self.layout.data_style == "fsdp"
        num_bytes = norms * self.config.width * VALUE_BYTES
        yield "tensor", "all_reduce", norms if by_fsdp else 1, num_bytes

    def _copies(self) -> Iterator[tuple[str, str, int, int]]:
        values = sum(_values(shape) for unit in self._units for shape in unit)
        yield "data", "all_reduce", 1, values * VALUE_BYTES

    def _fsdp(self) -> Iterator[tuple[str, str, int, int]]:
        """One reduce-scatter for each unit and backward; a block is gathered for its forward and
        again for its backward, the rest once; in a pipeline all is gathered once a microbatch."""
        for place, unit in enumerate(self._units):
            if not unit:
                continue
            padded = sum(_values(shape, self.layout.data) for shape in unit) * VALUE_BYTES
            is_block = place < self.blocks
            gathers = 2 if is_block and self.layout.pipeline == 1 else self.microbatches
            yield "data", "all_gather", gathers, gathers * padded
            yield "data", "reduce_scatter", self.microbatches, self.microbatches * padded


def unit_shapes(config: ModelConfig, layout: Layout, stage: int) -> list[list[tuple[int, ...]]]:
    """Shapes of a rank's parameters before FSDP2: block by block, then embedding and head."""
    D, V, T = config.width, config.vocabulary, config.context
    blocks = len(blocks_of_stage(config.layers, layout.pipeline, stage))
    rest = [(V, D), (T, D)] if stage == 0 else []
    rest += [(D,), (D,), (V, D)] if stage == layout.pipeline - 1 else []
    return [_block_shapes(config, layout.tensor)] * blocks + [rest]


def _block_shapes(config: ModelConfig, t: int) -> list[tuple[int, ...]]:
    D, H = config.width, config.expansion * config.width
    columns = [(D // t, D)] * 3 + [(H // t, D)]
    rows = [(D, D // t), (D, H // t)]
    biases = [(D // t,)] * 3 + [(H // t,)] + [(D,)] * 2
    return columns + rows + biases + [(D,)] * 4  # and the two norms


def _values(shape: tuple[int, ...], ranks: int = 1) -> int:
    """Elements of a shape whose first dim FSDP2 pads to a multiple of ``ranks``."""
    first, *others = shape
    count = -(-first // ranks) * ranks
    for size in others:
        count *= size
    return count

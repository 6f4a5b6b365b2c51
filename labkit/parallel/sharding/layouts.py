"""A layout: how many ranks share layers, batches and matrices, and which of them are neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labkit.models.config import ModelConfig
from labkit.parallel.pipelining.stages import even_ranges
from labkit.parallel.scheduling.schedules import Schedule, one_f_one_b
from labkit.parallel.sharding.tensor_checks import check_tensor_sizes, sharded_sizes

AXES = ("pipeline", "data", "tensor")


@dataclass(frozen=True)
class Layout:
    """Sizes of the three axes; their product is the number of ranks.

    Args:
        pipeline: ranks that hold different blocks.
        data: ranks that see different rows of the batch.
        tensor: ranks that share every matrix.
        sequence: tensor ranks also share the tokens between the layers.
        data_style: ``fsdp``, or ``copies``: whole copies, gradients summed after the backward.
        tensor_style: ``hand`` or ``dtensor``; "" for the faster that goes with the rest.
        microbatches: of a pipeline's 1F1B schedule, per data-parallel rank.
        order: axes from the outermost to the innermost; ranks of the innermost are neighbours
            (0-1, 2-3), those of the outermost lie farthest apart (0-2, 1-3).

    Raises:
        ValueError: a size is below 1, or the combination is none that works.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    sequence: bool = False
    data_style: str = "fsdp"
    tensor_style: str = ""
    microbatches: int = 4
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for name in (*AXES, "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"order={self.order} must name {', '.join(AXES)} once each")
        if self.data_style not in ("fsdp", "copies"):
            raise ValueError(f"data_style={self.data_style!r} must be 'fsdp' or 'copies'")
        self._check_styles()

    @property
    def style(self) -> str:
        """The tensor style in use: what was asked for, else the faster one that is possible."""
        return self.tensor_style or ("dtensor" if self._needs_plan else "hand")

    @property
    def _needs_plan(self) -> bool:
        """FSDP2 shards DTensors along a second axis, and takes the parts held by hand for whole."""
        return self.sequence or (self.data > 1 and self.data_style == "fsdp")

    def _check_styles(self) -> None:
        if self.style not in ("hand", "dtensor"):
            raise ValueError(f"tensor_style={self.tensor_style!r} must be 'hand' or 'dtensor'")
        if self.tensor > 1 and self._needs_plan and self.style == "hand":
            raise ValueError(
                "tensor_style='hand' goes neither with sequence=True nor with data_style='fsdp' "
                "on more than one data-parallel rank; use tensor_style='dtensor'"
            )
        if self.sequence and (self.pipeline > 1 or self.tensor == 1):
            raise ValueError(
                f"sequence=True with pipeline={self.pipeline} and tensor={self.tensor}: it needs "
                "tensor ranks and the whole model on each of them"
            )

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.tensor

    def __str__(self) -> str:
        """As in ``pipeline 2 x tensor 2``."""
        named = {axis: f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1}
        if self.data > 1:
            named["data"] += f" ({self.data_style})"
        if self.sequence:
            named["tensor"] += " with sequence"
        return " x ".join(named.values()) or "one device"

    def check(self, config: ModelConfig, batch: int) -> None:
        """Refuse a model or a batch that the layout cannot divide.

        Raises:
            ValueError: blocks, heads, widths or rows do not divide.
        """
        if self.tensor > 1:
            check_tensor_sizes(self.tensor, sharded_sizes(config, sequence=self.sequence))
        if self.pipeline > config.layers:
            raise ValueError(
                f"pipeline={self.pipeline} ranks need a block each, there are "
                f"layers={config.layers}"
            )
        pieces = self.data * (self.microbatches if self.pipeline > 1 else 1)
        if batch % pieces:
            raise ValueError(
                f"batch={batch} rows must be divisible by data={self.data} times the pipeline's "
                f"microbatches, {pieces} in all; try batch={batch - batch % pieces or pieces}"
            )

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of all ranks, its axes in ``order``; call on every rank.

        Raises:
            ValueError: there are more or fewer ranks than the layout needs.
        """
        if dist.get_world_size() != self.ranks:
            raise ValueError(f"{self} needs {self.ranks} ranks, there are {dist.get_world_size()}")
        sizes = tuple(getattr(self, axis) for axis in self.order)
        return init_device_mesh(device_type, sizes, mesh_dim_names=self.order)

    def schedule(self) -> Schedule:
        return one_f_one_b(self.pipeline, self.microbatches)

    def with_(self, **changes: object) -> Layout:
        """The same layout with some settings changed, validated again."""
        return replace(self, **changes)


def blocks_of_stage(layers: int, stages: int, stage: int) -> range:
    """The blocks of one stage of a pipeline without embedding and head.

    >>> [list(blocks_of_stage(5, 2, stage)) for stage in (0, 1)]
    [[0, 1, 2], [3, 4]]
    """
    return even_ranges(layers, stages)[stage]


def layouts_of(ranks: int, **settings: object) -> list[Layout]:
    """Every layout of so many ranks over one or two axes, settings alike.

    >>> [str(layout) for layout in layouts_of(2)]
    ['pipeline 2', 'data 2 (fsdp)', 'tensor 2']
    """
    sizes = [
        (p, d, ranks // (p * d))
        for p in range(ranks, 0, -1)
        for d in range(ranks, 0, -1)
        if ranks % (p * d) == 0
    ]
    return [
        Layout(p, d, t, **settings)
        for p, d, t in sizes
        if ranks > 1 and sum(size > 1 for size in (p, d, t)) < 3
    ]

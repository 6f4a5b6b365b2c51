"""Divide a decoder's matrices over the ranks of a group, as tensor parallelism does."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.models.decoder import Decoder, DecoderShape
from labkit.parallel.sharding.tensor_checks import check_tensor_sizes
from labkit.parallel.sharding.tensor_layers import ColumnLinear, RowLinear


def check_divisible(shape: DecoderShape, t: int) -> None:
    """Refuse t tensor-parallel ranks for a model whose heads cannot be dealt out evenly.

    Raises:
        ValueError: heads, key-value heads or hidden width are no multiple of t; the message says
            which sizes of t would do.
    """
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "hidden": shape.hidden}
    check_tensor_sizes(t, sizes)


def shard_decoder(decoder: Decoder, group: dist.ProcessGroup) -> Decoder:
    """Keep 1/t of every layer's matrices, in place, and 1/t of the head where it divides.

    Raises:
        ValueError: as ``check_divisible``; or the family cannot be divided.
    """
    if not decoder.column_layers:
        raise ValueError(
            f"family {decoder.shape.family!r} cannot be divided: its query, key and value are one "
            "fused matrix; split it by layers"
        )
    check_divisible(decoder.shape, group.size())
    return shard_over(decoder, DeviceMesh.from_group(group, decoder.device.type))


def shard_over(decoder: Decoder, mesh: DeviceMesh) -> Decoder:
    """What `shard_decoder` does once all is checked, over a mesh of one dimension."""
    for layer in decoder.layers.values():
        for name in decoder.column_layers:
            layer.set_submodule(name, ColumnLinear(layer.get_submodule(name), mesh))
        for name in decoder.row_layers:
            layer.set_submodule(name, RowLinear(layer.get_submodule(name), mesh))
    decoder.kv_heads //= mesh.size()
    if decoder.shape.vocabulary % mesh.size() == 0:
        logits = decoder.head.get_submodule(decoder.logits_layer)
        decoder.head.set_submodule(decoder.logits_layer, GatheredColumns(logits, mesh))
    return decoder


class GatheredColumns(nn.Module):
    """1/t of the head's outputs on each rank, gathered: (B, D) -> (B, V)."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.own, self.group = ColumnLinear(whole, mesh), mesh.get_group()

    def forward(self, x_BD: Tensor) -> Tensor:
        own_BV = self.own(x_BD)
        every = own_BV.new_empty(self.group.size() * len(own_BV), own_BV.shape[1])
        dist.all_gather_single(every, own_BV, group=self.group)
        return torch.cat(every.chunk(self.group.size()), dim=-1)

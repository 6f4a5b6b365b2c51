"""Runs a decoder's steps: on one device, or on several that this process drives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from labkit.measure.regions import region
from labkit.models.decoder import Decoder
from labkit.models.kv_cache import KVCache, Step
from labkit.parallel.pipelining.stages import even_ranges

Draw = Callable[[Tensor], Tensor]  # logits (B, V) -> tokens (B,)
Result = Callable[[], Tensor]  # waits for the tokens (B,)


class Runner(Protocol):
    """Takes the steps of a model, wherever its layers are.

    ``start`` begins a step and returns what waits for its tokens; several groups of sequences, each
    with a cache of its own, may have a step begun. On ranks all call the same in the same order.
    What a device computes for the step runs in a region of the name ``label``.

    Attributes:
        device: where ``start`` wants its ids.
    """

    device: torch.device

    def new_cache(self, rows: int, columns: int) -> Any: ...

    def start(
        self, ids_BT: Tensor, step: Step, cache: Any, draw: Draw, label: str = ""
    ) -> Result: ...

    def finish(self) -> None:
        """Called once after the last step."""


class OneDevice:
    """The whole model where it lies.

    Raises:
        ValueError: it is only a part of a model.
    """

    def __init__(self, decoder: Decoder) -> None:
        need_whole(decoder)
        self.decoder, self.device = decoder, decoder.device

    def new_cache(self, rows: int, columns: int) -> KVCache:
        return self.decoder.new_cache(rows, columns)

    def start(
        self, ids_BT: Tensor, step: Step, cache: KVCache, draw: Draw, label: str = ""
    ) -> Result:
        with region(label, "forward"):
            tokens_B = draw(self.decoder(ids_BT, cache, step))
        return lambda: tokens_B

    def finish(self) -> None:
        pass


class ManyDevices:
    """A model whose layers this process has spread over several devices.

    Kernels are queued, so on real devices two groups of sequences keep two of them busy.

    Args:
        decoder: the whole model; parts on another device than its own are copies.
        devices: in the order of the layers.
        layers: of each device, contiguous; by default as equal as can be.

    Raises:
        ValueError: the layers do not make up the whole model in order, one range per device.
    """

    def __init__(
        self,
        decoder: Decoder,
        devices: Sequence[torch.device | str],
        layers: Sequence[range] | None = None,
    ) -> None:
        need_whole(decoder)
        devices = [torch.device(device) for device in devices]
        layers = even_layers(decoder.shape.layers, len(devices)) if layers is None else layers
        check_cover(layers, decoder.shape.layers, len(devices))
        self.parts = [
            decoder.part(held).on(device) for held, device in zip(layers, devices, strict=True)
        ]
        self.device = devices[0]

    def new_cache(self, rows: int, columns: int) -> list[KVCache]:
        return [part.new_cache(rows, columns) for part in self.parts]

    def start(
        self, ids_BT: Tensor, step: Step, cache: list[KVCache], draw: Draw, label: str = ""
    ) -> Result:
        x = ids_BT
        with region(label, "forward"):
            for part, its_cache in zip(self.parts, cache, strict=True):
                x = part(x.to(part.device), its_cache, step.to(part.device))
            tokens_B = draw(x)
        return lambda: tokens_B.to(self.device)

    def finish(self) -> None:
        pass


def even_layers(layers: int, parts: int) -> list[range]:
    """The ranges of a pipeline's stages, as `Decoder.part` takes them.

    >>> even_layers(5, 2)
    [range(0, 3), range(3, 5)]
    """
    return list(even_ranges(layers, parts))


def check_cover(layers: Sequence[range], total: int, parts: int) -> None:
    """Refuse ranges that are not one per part, contiguous, and together the whole model."""
    edges = [0, *(held.stop for held in layers)]
    fits = len(layers) == parts and edges[-1] == total
    if not fits or any(
        list(held) != list(range(a, held.stop)) or not held
        for a, held in zip(edges, layers, strict=False)
    ):
        raise ValueError(
            f"layers={list(layers)} must be {parts} contiguous ranges that cover 0..{total - 1} "
            f"in order; try {even_layers(total, parts)}"
        )


def need_whole(decoder: Decoder) -> None:
    if decoder.embed is None or decoder.head is None:
        raise ValueError(f"layers {list(decoder.held)} are a part of the model; give all of it")

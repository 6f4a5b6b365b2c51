"""A model of ``transformers`` placed in two ways: ours, and Accelerate's ``device_map="auto"``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.devices.profiles import Profile
from labkit.models.decoder import Decoder
from labkit.models.huggingface import huggingface_decoder
from labkit.models.kv_cache import prefill
from labkit.parallel.generation.inference_placement import (
    PICOSECONDS,
    inference_costs,
    place_decoder,
)
from labkit.parallel.generation.runners import check_cover
from labkit.parallel.placing.placement_plan import Placement


@dataclass(frozen=True, eq=False)
class PlacedTwice:
    """One model, and the two ways of sharing out its layers.

    Attributes:
        model: of ``transformers``; ``decoder`` has the same weights.
        ours: by the time of each layer's decode step, embedding and head included.
        device_map: Accelerate's layers of each device, by bytes of weights; some may be empty.
    """

    model: nn.Module
    decoder: Decoder
    ours: Placement
    device_map: tuple[range, ...]

    @property
    def slowest_ratio(self) -> float:
        """The slowest device's time under ``device_map`` over ours; 1 is as good."""
        return slowest_ratio(self.device_map, self.ours)

    @torch.no_grad()
    def logit_error(self, split: Sequence[range], ids_BT: Tensor) -> float:
        """Largest error of the logits after the last token, over the largest logit.

        The parts of ``split`` run one after the other, against the model's own ``forward``.
        """
        expected_BV = self.model(ids_BT).logits[:, -1]
        rows, tokens = ids_BT.shape
        x, step = ids_BT, prefill([tokens] * rows, ids_BT.device)
        for part in map(self.decoder.part, filter(len, split)):
            x = part(x, part.new_cache(rows, tokens), step)
        return ((x - expected_BV).abs().max() / expected_BV.abs().max()).item()


def place_twice(
    model: nn.Module,
    num_devices: int,
    *,
    rows: int,
    columns: int,
    profile: Profile | None = None,
    decode_width: float = 1.0,
    memory_bytes: int = 1 << 40,
) -> PlacedTwice:
    """Place a causal model of ``transformers`` in both ways over equal devices.

    Args:
        rows, columns, profile, decode_width: as for ``inference_costs``.
        memory_bytes: of each device.

    Raises:
        ValueError: as ``huggingface_decoder``, ``place_decoder`` and ``accelerate_layers``.
    """
    decoder = huggingface_decoder(model)
    costs = inference_costs(
        decoder, rows=rows, columns=columns, profile=profile, decode_width=decode_width
    )
    ours = place_decoder(costs, num_devices, memory_bytes=memory_bytes)
    theirs = accelerate_layers(model, num_devices, memory_bytes=memory_bytes)
    return PlacedTwice(model, decoder, ours, tuple(theirs))


def accelerate_layers(model: nn.Module, num_devices: int, *, memory_bytes: int) -> list[range]:
    """The layers that Accelerate's ``device_map="auto"`` puts on each device, by bytes of weights.

    Args:
        model: a ``transformers`` causal model.
        memory_bytes: that each device offers; Accelerate balances below it.

    Returns:
        One range per device, empty ones included.

    Raises:
        ValueError: it would leave layers on the host.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    keep_whole = list(model._no_split_modules)
    offered = dict.fromkeys(range(num_devices), memory_bytes)
    with _quiet("accelerate.utils.modeling"):  # it warns of devices that this machine lacks
        budget = get_balanced_memory(model, offered, no_split_module_classes=keep_whole)
        found = infer_auto_device_map(model, budget, no_split_module_classes=keep_whole)
    inner = model.get_submodule(
        "transformer.h" if hasattr(model, "transformer") else "model.layers"
    )
    layer_name = {id(layer): name for name, layer in model.named_modules()}
    where = [_device_of(layer_name[id(layer)], found) for layer in inner]
    if any(not isinstance(device, int) for device in where):
        raise ValueError(
            f"{memory_bytes} bytes on each of {num_devices} devices leave layers on the host; "
            "offer more"
        )
    edges = [sum(device < i for device in where) for i in range(num_devices + 1)]
    return [range(a, b) for a, b in zip(edges, edges[1:], strict=False)]


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _device_of(name: str, device_map: dict) -> object:
    """The entry for a module or for the module that holds it."""
    while name not in device_map:
        name = name.rpartition(".")[0]
    return device_map[name]


def slowest_ratio(layers: Sequence[range], placement: Placement) -> float:
    """The slowest device's time with ``layers`` over the placement's; 1 is as good.

    Raises:
        ValueError: ``layers`` do not cover the model in order.
    """
    held = [part for part in layers if part]
    check_cover(held, len(placement.costs), len(held))
    work = [sum(placement.costs[i].forward_flops for i in part) / PICOSECONDS for part in held]
    return max(work) / placement.slowest_stage_s

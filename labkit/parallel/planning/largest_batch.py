"""The largest training batch that a device has room for: predicted, and tried for real."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from labkit.devices.machines import machine
from labkit.measure.virtual.virtual_step import record_step
from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer, next_token_loss
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.layer_chains import LabChain, LayerChain
from labkit.parallel.planning.levers import PLAIN, Levers
from labkit.parallel.planning.memory_plan import DeviceMemory
from labkit.parallel.planning.optimizer_rehearsal import adamw
from labkit.parallel.planning.predictor import predict_training
from labkit.parallel.sharding.layouts import Layout

MOST_ROWS = 1 << 20


def one_device_memory(
    model: ModelConfig | LayerChain, rows: int, levers: Levers = PLAIN
) -> DeviceMemory:
    """What a step of AdamW on one device, its batch in one piece, holds at its largest moment."""
    chain = LabChain(model) if isinstance(model, ModelConfig) else model
    choice = Choice(Layout(microbatches=1), levers=levers)
    return predict_training(chain, choice, machine("lab", 1), rows).memory[0]


def largest_batch(
    model: ModelConfig | LayerChain, memory_bytes: int, levers: Levers = PLAIN
) -> int:
    """Most rows that are predicted to fit; 0 when not even one does.

    Needs two rehearsals for each doubling: what is held grows with the rows, never falls.
    """
    chain = LabChain(model) if isinstance(model, ModelConfig) else model

    def fits(rows: int) -> bool:
        return one_device_memory(chain, rows, levers).peak_bytes <= memory_bytes

    return _last_that_holds(fits, MOST_ROWS)


def _last_that_holds(holds: Callable[[int], bool], most: int) -> int:
    """The largest n in 0..most for which `holds`, which is true up to some n and false above.

    >>> _last_that_holds(lambda n: n <= 37, 1000)
    37
    """
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def training_out_of_memory(
    config: ModelConfig, rows: int, memory_bytes: int, levers: Levers = PLAIN
) -> str | None:
    """Train two steps for real on a virtual device of so much memory.

    Returns:
        The out-of-memory error's words, or None when the batch fits.
    """
    model = Transformer(config)
    levers.apply([model.embed, model.head], model.layers.values())
    optimizer = adamw(model.parameters())
    ids = torch.zeros(rows, config.context, dtype=torch.int64)
    step = partial(_step, model, optimizer, ids)
    try:
        record_step(step, hold=[model], capacity_bytes=memory_bytes, warm_up=0)
        record_step(step, hold=[model, optimizer], capacity_bytes=memory_bytes, warm_up=0)
    except torch.OutOfMemoryError as error:
        return str(error)
    return None


def _step(model: Transformer, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    logits = model(ids)
    next_token_loss(logits, ids).backward()
    optimizer.step()
    optimizer.zero_grad()

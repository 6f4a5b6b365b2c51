"""The largest batch, predicted and then tried to the limit."""

from __future__ import annotations

import pytest

from labkit.models.config import ModelConfig
from labkit.parallel.planning.largest_batch import (
    largest_batch,
    one_device_memory,
    training_out_of_memory,
)
from labkit.parallel.planning.levers import Levers

CONFIG = ModelConfig(layers=2, width=32, heads=2, context=32)
MEMORY_BYTES = 6_000_000


@pytest.mark.parametrize("levers", [Levers(), Levers(checkpointing=True)], ids=["plain", "ckpt"])
def test_the_predicted_batch_fits_and_five_percent_more_does_not(levers):
    rows = largest_batch(CONFIG, MEMORY_BYTES, levers)
    assert training_out_of_memory(CONFIG, int(0.97 * rows), MEMORY_BYTES, levers) is None
    words = training_out_of_memory(CONFIG, int(1.05 * rows) + 1, MEMORY_BYTES, levers)
    assert "is out of memory" in words


def test_checkpointing_makes_room_for_more_and_nothing_fits_into_less_than_the_state():
    plain = largest_batch(CONFIG, MEMORY_BYTES)
    assert largest_batch(CONFIG, MEMORY_BYTES, Levers(checkpointing=True)) > 1.2 * plain
    assert largest_batch(CONFIG, 16 * CONFIG.num_parameters // 2) == 0


def test_the_parts_of_the_memory_add_up_and_the_state_is_exact():
    memory = one_device_memory(CONFIG, rows=4)
    assert memory.peak_bytes == sum(memory.parts.values())
    assert memory.parameters == 4 * CONFIG.num_parameters
    assert memory.optimizer == 8 * CONFIG.num_parameters + 4 * (2 + 16 * CONFIG.layers + 3)

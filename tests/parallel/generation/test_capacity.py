"""The largest batch is predicted from small ones and is the largest one that really fits."""

from __future__ import annotations

import pytest

from labkit.models.config import ModelConfig
from labkit.models.decoder import LabDecoder
from labkit.models.transformer import Transformer
from labkit.parallel.generation.capacity import batch_memory, out_of_memory
from labkit.parallel.generation.runners import even_layers

CONFIG = ModelConfig(layers=4, width=32, heads=4, context=64)
LENGTHS = dict(prompt=16, columns=64)


@pytest.fixture(scope="module")
def whole() -> LabDecoder:
    return LabDecoder(Transformer(CONFIG))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_predicted_batch_fits_and_one_more_does_not(whole, devices):
    memory_bytes = 3 << 20
    for held in even_layers(CONFIG.layers, devices):
        part = whole.part(held)
        memory = batch_memory(part, **LENGTHS)
        rows = memory.largest_batch(memory_bytes)
        assert rows > 8, "the prediction must reach beyond the runs that it is made from"
        assert out_of_memory(part, rows, memory_bytes=memory_bytes, **LENGTHS) is None
        refusal = out_of_memory(part, rows + 1, memory_bytes=memory_bytes, **LENGTHS)
        assert "is out of memory" in refusal


def test_cache_bytes_are_those_of_the_real_cache(whole):
    memory = batch_memory(whole, **LENGTHS)
    assert memory.cache_bytes == whole.new_cache(rows=1, columns=64).bytes
    assert memory.weight_bytes == whole.parameter_bytes


def test_a_model_that_is_larger_than_the_device_fits_no_sequence(whole):
    memory_bytes = whole.parameter_bytes // 2
    assert batch_memory(whole, **LENGTHS).largest_batch(memory_bytes) == 0
    refusal = out_of_memory(whole, 1, memory_bytes=memory_bytes, **LENGTHS)
    assert "holding a LabDecoder" in refusal

"""Predicted waits and memory of generation, against virtual GPUs."""

from __future__ import annotations

import pytest
from spawned import run_ranks

from labkit.devices.machines import LAB_WIDTH, machine
from labkit.measure.virtual.virtual_clock import play
from labkit.measure.virtual.virtual_step import record_step
from labkit.models.config import ModelConfig
from labkit.models.decoder import LabDecoder
from labkit.models.transformer import Transformer
from labkit.parallel.generation.capacity import batch_memory
from labkit.parallel.generation.generate import generate
from labkit.parallel.generation.prediction import predict_generation
from labkit.parallel.generation.rank_runners import LayersOnRanks, TensorOnRanks
from labkit.parallel.generation.reading import widened
from labkit.parallel.generation.runners import OneDevice, even_layers
from labkit.parallel.generation.times import timeline_times

CONFIG = ModelConfig(layers=4, width=128, heads=4, context=64)
NEW = 6
SIZES = {"prompt": 16, "new_tokens": NEW, "decode_width": LAB_WIDTH}


def recorded(runner, rows, groups=1):
    """A recording of one generate, and what it made."""
    made = []
    prompts = [[(7 * i + j) % 256 for j in range(16)] for i in range(rows)]

    def step():
        made.append(generate(runner, prompts, new_tokens=NEW, groups=groups))

    return record_step(step, warm_up=0), made[0]


def on_ranks(rank, size):
    part = LabDecoder(Transformer(CONFIG)).part(even_layers(CONFIG.layers, size)[rank])
    layers = LayersOnRanks(part)
    shards = TensorOnRanks(LabDecoder(Transformer(CONFIG)))
    ways = {"1 group": (layers, 1), "all in flight": (layers, size), "tensor": (shards, 1)}
    return {
        (way, rows): recorded(runner, rows, groups)
        for way, (runner, groups) in ways.items()
        for rows in (4, 64)
    }


def test_one_device_waits_and_holds_as_predicted():
    predicted = predict_generation(CONFIG, machine("lab", 1), rows=8, **SIZES)
    recording, made = recorded(OneDevice(LabDecoder(Transformer(CONFIG))), 8)
    ran = timeline_times(play([widened(recording)], machine("lab", 1)), made)
    assert predicted.first_token_s == pytest.approx(ran.first_token_s, rel=0.05)
    assert predicted.per_token_s == pytest.approx(ran.per_token_s, rel=0.05)
    assert predicted.tokens_per_s == pytest.approx(ran.tokens_per_s, rel=0.05)
    real = batch_memory(LabDecoder(Transformer(CONFIG)), prompt=16, columns=16 + NEW - 1)
    assert predicted.memory == (real,)
    memory_bytes = machine("lab", 1).profiles[0].memory_bytes
    assert predicted.largest_batch == real.largest_batch(memory_bytes)


def test_layers_groups_and_tensor_parallelism_on_two_devices_are_as_predicted():
    found = run_ranks(on_ranks, 2, 2)
    ways = {
        "1 group": {"layers_over": 2},
        "all in flight": {"layers_over": 2, "groups": 2},
        "tensor": {"tensor": 2},
    }
    for (way, rows), (_, made) in found[0].items():
        recordings = [widened(by_rank[way, rows][0]) for by_rank in found]
        ran = timeline_times(play(recordings, machine("lab", 2)), made)
        predicted = predict_generation(CONFIG, machine("lab", 2), rows=rows, **SIZES, **ways[way])
        assert predicted.tokens_per_s == pytest.approx(ran.tokens_per_s, rel=0.05), (way, rows)
        assert max(predicted.first_token_s) == pytest.approx(max(ran.first_token_s), rel=0.05)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"layers_over": 2, "tensor": 2}, "no engine here divides both ways"),
        ({"tensor": 3}, "heads=4 .* must be divisible by t=3"),
        ({"groups": 3}, "rows=8 must be divisible by groups=3"),
        ({"layers_over": 4}, "has 2"),
    ],
)
def test_what_is_not_predicted_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        predict_generation(CONFIG, machine("lab", 2), rows=8, **SIZES, **settings)

"""On virtual GPUs prefill is bound by FLOPs and decode by bytes, and splits behave accordingly."""

from __future__ import annotations

from statistics import median

import pytest
from spawned import run_ranks

from labkit.devices.inventory import virtual_devices
from labkit.devices.machines import machine
from labkit.measure.virtual.virtual_clock import play
from labkit.measure.virtual.virtual_step import record_step
from labkit.models.config import ModelConfig
from labkit.models.decoder import LabDecoder
from labkit.models.transformer import Transformer
from labkit.parallel.generation.generate import generate
from labkit.parallel.generation.generation_trace import trace_generation
from labkit.parallel.generation.rank_runners import LayersOnRanks, TensorOnRanks
from labkit.parallel.generation.reading import read_generation, widened
from labkit.parallel.generation.runners import OneDevice, even_layers
from labkit.parallel.generation.times import timeline_times

CONFIG = ModelConfig(layers=4, width=128, heads=4, context=64)
NEW = 6


def prompts(count: int, length: int = 16) -> list[list[int]]:
    return [[(7 * i + j) % 256 for j in range(length)] for i in range(count)]


def recorded(runner, batch: int, length: int = 16, groups: int = 1):
    """A recording of one generate, and what it made."""
    made = []
    given = prompts(batch, length)

    def step():
        made.append(generate(runner, given, new_tokens=NEW, groups=groups))

    return record_step(step, warm_up=0), made[0]


def one_device_times(batch: int, length: int = 16):
    recording, made = recorded(OneDevice(LabDecoder(Transformer(CONFIG))), batch, length)
    return timeline_times(play([widened(recording)], machine("lab", 1)), made)


def test_decode_time_hardly_depends_on_a_small_batch_and_follows_a_large_one():
    one, eight, large, twice = (
        one_device_times(batch).per_token_s[0] for batch in (1, 8, 128, 256)
    )
    assert eight < 1.6 * one, "bound by the bytes of the weights, which 8 sequences share"
    assert twice > 1.7 * large, "the KV cache, which nobody shares, and the FLOPs have taken over"


def test_prefill_time_follows_the_tokens_of_the_prompts():
    shorter, longer = (one_device_times(32, length).first_token_s[0] for length in (16, 48))
    assert longer == pytest.approx(3 * shorter, rel=0.25)


def on_ranks(rank: int, size: int):
    part = LabDecoder(Transformer(CONFIG)).part(even_layers(CONFIG.layers, size)[rank])
    layers = LayersOnRanks(part)
    shards = TensorOnRanks(LabDecoder(Transformer(CONFIG)))
    ways = {"1 group": (layers, 1), "all in flight": (layers, size), "tensor": (shards, 1)}
    return {
        (way, batch): recorded(runner, batch, groups=groups)
        for way, (runner, groups) in ways.items()
        for batch in (4, 64)
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_splits_behave_as_on_cards(ranks):
    per_rank = run_ranks(on_ranks, ranks, ranks)
    timelines = {
        key: play([widened(found[key][0]) for found in per_rank], machine("lab", ranks))
        for key in per_rank[0]
    }
    times = {key: timeline_times(timelines[key], per_rank[0][key][1]) for key in timelines}
    alone = {batch: one_device_times(batch) for batch in (4, 64)}
    # one request in flight leaves all devices but one idle
    assert timelines["1 group", 4].bubble > 1 - 1.1 / ranks
    assert times["1 group", 4].tokens_per_s < alone[4].tokens_per_s
    # groups in flight fill them: at a small batch every group reads the weights again
    assert timelines["all in flight", 64].bubble < 0.35
    gain = {b: times["all in flight", b].tokens_per_s / alone[b].tokens_per_s for b in (4, 64)}
    assert gain[64] > 0.5 * ranks and gain[64] > gain[4]
    # tensor parallel is the split that makes one sequence faster
    assert median(times["tensor", 4].per_token_s) < 0.9 * median(alone[4].per_token_s)


def test_a_traced_generate_is_read_with_decode_steps_as_wide_as_the_lab_machine_means():
    devices, decoder = virtual_devices("lab", 1), LabDecoder(Transformer(CONFIG))
    found = {0: trace_generation(decoder, prompts(2), new_tokens=NEW, devices=devices)}
    reading = read_generation(found, devices)
    assert reading.times == one_device_times(2)
    assert reading.peak_bytes[0] > decoder.parameter_bytes
    plain = play([found[0].step.recording], machine("lab", 1))
    assert timeline_times(plain, found[0].made).per_token_s < reading.times.per_token_s


def traced_ways(rank: int, size: int):
    devices, decoder = virtual_devices("lab", size), LabDecoder(Transformer(CONFIG))
    uneven = [range(0, 1), range(1, CONFIG.layers)]
    ways = {"layers": {}, "pipelined": {"groups": size}, "tensor": {"tensor": True}}
    ways["uneven"] = {"layers": uneven}
    with pytest.raises(ValueError, match="choose one of the two ways"):
        trace_generation(decoder, [], new_tokens=1, devices=devices, tensor=True, layers=uneven)
    return {
        way: trace_generation(decoder, prompts(4), new_tokens=NEW, devices=devices, **settings)
        for way, settings in ways.items()
    }


def test_traces_of_every_way_give_the_same_tokens_and_leave_the_model_whole():
    per_rank, devices = run_ranks(traced_ways, 2, 2), virtual_devices("lab", 2)
    readings = {
        way: read_generation({r: found[way] for r, found in enumerate(per_rank)}, devices)
        for way in per_rank[0]
    }
    alone, _ = recorded(OneDevice(LabDecoder(Transformer(CONFIG))), 4)
    expected = generate(
        OneDevice(LabDecoder(Transformer(CONFIG))), prompts(4), new_tokens=NEW
    ).tokens
    assert [reading.tokens for reading in readings.values()] == [expected] * 4
    first, second = readings.pop("uneven").peak_bytes
    assert second > 2 * first, "three layers and the head beside one layer and the embedding"
    assert all(max(r.peak_bytes) < alone.peak_bytes for r in readings.values())
    assert len(readings["pipelined"].times.first_token_s) == 2

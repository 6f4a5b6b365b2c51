"""Every split of a model gives the tokens of one device; ranks are started once for all of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from spawned import run_ranks

from labkit.devices.simulated.simulated import devices
from labkit.models.config import ModelConfig
from labkit.models.decoder import LabDecoder
from labkit.models.transformer import Transformer
from labkit.parallel.generation.generate import generate
from labkit.parallel.generation.rank_runners import LayersOnRanks, TensorOnRanks
from labkit.parallel.generation.runners import ManyDevices, OneDevice, check_cover, even_layers
from labkit.parallel.generation.sampling import GREEDY, Sampling
from labkit.parallel.generation.tensor_shards import check_divisible

CONFIG = ModelConfig(layers=4, width=32, heads=4, context=32, vocabulary=64)
PROMPTS = [(1, 2, 3, 4, 5), (9, 8), (10, 20, 30), (7,), (63, 1, 63)]
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=3)
WAYS = (GREEDY, SAMPLED)


def whole_decoder() -> LabDecoder:
    return LabDecoder(Transformer(CONFIG))


def continued(runner, sampling, groups=1, **settings):
    return generate(
        runner, PROMPTS, new_tokens=7, sampling=sampling, groups=groups, **settings
    ).tokens


def expected(**settings):
    return [continued(OneDevice(whole_decoder()), sampling, **settings) for sampling in WAYS]


def everything_on_ranks(rank: int, stop: tuple[int, ...]) -> dict:
    size = dist.get_world_size()
    part = whole_decoder().part(even_layers(CONFIG.layers, size)[rank])
    layers, tensor = LayersOnRanks(part), TensorOnRanks(whole_decoder())
    found = {f"layers, {n} in flight": [continued(layers, w, n) for w in WAYS] for n in (1, 2, 5)}
    found["tensor, 2 in flight"] = [continued(tensor, w, groups=2) for w in WAYS]
    found["stopped"] = [continued(r, w, 2, stop=stop) for r in (layers, tensor) for w in WAYS]
    cache = tensor.new_cache(rows=2, columns=8)
    found["tensor cache bytes"] = cache.bytes
    found["layers cache bytes"] = layers.new_cache(rows=2, columns=8).bytes
    found["refusals"] = [str(refused(LayersOnRanks, whole_decoder()))]
    return found


def refused(function, *args) -> ValueError:
    with pytest.raises(ValueError) as caught:
        function(*args)
    return caught.value


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_split_over_ranks_gives_the_tokens_of_one_device(ranks):
    reference = expected()
    stop = (reference[0][0][3], reference[1][1][2])
    stopped = expected(stop=stop) * 2
    whole = OneDevice(whole_decoder()).new_cache(rows=2, columns=8).bytes
    for found in run_ranks(everything_on_ranks, ranks, stop):
        for way in (key for key in found if key.endswith("in flight")):
            assert found[way] == reference, way
        assert found["stopped"] == stopped
        assert found["tensor cache bytes"] == whole // ranks
        assert found["layers cache bytes"] == whole // ranks
        assert f"must be {ranks} contiguous ranges" in found["refusals"][0]


@pytest.mark.parametrize("groups", [1, 5])
@pytest.mark.parametrize("layers", [None, [range(0, 1), range(1, 3), range(3, 4)]])
def test_one_process_with_many_devices_gives_the_tokens_of_one(groups, layers):
    many = ManyDevices(whole_decoder(), ["cpu"] * 3, layers)
    assert [continued(many, way, groups) for way in WAYS] == expected()


def test_parts_and_caches_lie_on_their_devices_where_tensors_of_two_must_not_meet():
    where = devices(3, "cpu")
    many = ManyDevices(whole_decoder(), where)
    assert [part.device for part in many.parts] == where
    caches = many.new_cache(rows=2, columns=8)
    held = [{t.device for t in cache.keys.values()} for cache in caches]
    assert held == [{device} for device in where]
    assert [continued(many, way, groups=2) for way in WAYS] == expected()


def test_layers_that_leave_a_gap_are_refused_with_a_split_that_would_do():
    with pytest.raises(ValueError, match=r"cover 0..3 in order; try \[range\(0, 2\)"):
        check_cover([range(0, 2), range(3, 4)], 4, 2)
    with pytest.raises(ValueError, match="2 contiguous ranges"):
        ManyDevices(whole_decoder(), ["cpu", "cpu"], [range(0, 4), range(4, 4)])


def test_heads_that_cannot_be_dealt_out_are_refused_with_the_sizes_that_could():
    with pytest.raises(ValueError, match="heads=4 .* must be divisible by t=3"):
        check_divisible(whole_decoder().shape, 3)


def test_a_part_is_refused_where_the_whole_model_is_needed():
    with pytest.raises(ValueError, match="are a part of the model"):
        OneDevice(whole_decoder().part(range(0, 2)))


def test_greedy_tokens_are_those_of_the_model_without_a_cache():
    model = Transformer(CONFIG)
    for prompt, tokens in zip(PROMPTS, expected()[0], strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(7):
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        assert tuple(ids[len(prompt) :]) == tokens

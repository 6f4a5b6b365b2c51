"""Models of transformers over ranks: the tokens of one device, whichever way they are split."""

from __future__ import annotations

import pytest
from spawned import run_ranks

from labkit.models.huggingface import FAMILIES, huggingface_decoder, random_model
from labkit.parallel.generation.generate import generate
from labkit.parallel.generation.rank_runners import LayersOnRanks, TensorOnRanks
from labkit.parallel.generation.runners import OneDevice, even_layers
from labkit.parallel.generation.sampling import GREEDY, Sampling
from labkit.parallel.generation.tensor_shards import shard_decoder

pytest.importorskip("transformers", reason="needs the extra: pip install '.[pretrained]'")
PROMPTS = [(1, 2, 3, 4), (5, 6), (7, 8, 9)]


def decoder_of(family: str):
    return huggingface_decoder(random_model(family))


def tokens(runner, groups: int = 1):
    return [
        generate(runner, PROMPTS, new_tokens=6, sampling=sampling, groups=groups).tokens
        for sampling in (GREEDY, Sampling(temperature=0.8, top_k=10))
    ]


def on_ranks(rank: int):
    found = {}
    for family in FAMILIES:
        layers = LayersOnRanks(decoder_of(family).part(even_layers(4, 2)[rank]))
        found[family, "layers"], found[family, "pipeline"] = tokens(layers), tokens(layers, 3)
        if family != "gpt2":
            found[family, "tensor"] = tokens(TensorOnRanks(decoder_of(family)))
    return found


def test_every_family_gives_the_same_tokens_over_two_ranks():
    expected = {family: tokens(OneDevice(decoder_of(family))) for family in FAMILIES}
    for found in run_ranks(on_ranks, 2):
        for (family, way), made in found.items():
            assert made == expected[family], (family, way)


def test_a_fused_matrix_is_not_divided_and_the_refusal_says_what_to_do():
    with pytest.raises(ValueError, match="'gpt2' cannot be divided.*split it by layers"):
        shard_decoder(decoder_of("gpt2"), None)

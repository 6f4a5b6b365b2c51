"""Models of transformers over ranks: the tokens of one device, whichever way they are split."""

from __future__ import annotations

import pytest
import torch
from spawned import run_ranks

from labkit.models.huggingface import huggingface_decoder
from labkit.parallel.generation.generate import generate
from labkit.parallel.generation.rank_runners import LayersOnRanks, TensorOnRanks
from labkit.parallel.generation.runners import OneDevice, even_layers
from labkit.parallel.generation.sampling import GREEDY, Sampling
from labkit.parallel.generation.tensor_shards import shard_decoder

transformers = pytest.importorskip(
    "transformers", reason="needs the extra: pip install '.[pretrained]'"
)
FAMILIES = ("llama", "mistral", "qwen2", "gpt2")
PROMPTS = [(1, 2, 3, 4), (5, 6), (7, 8, 9)]


def decoder_of(family: str):
    sizes = dict(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    if family == "gpt2":
        sizes = dict(
            vocab_size=50,
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=0,
        )
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return huggingface_decoder(model)


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

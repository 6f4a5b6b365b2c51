"""Models of transformers placed by their step times, beside Accelerate's map of the same model."""

from __future__ import annotations

import pytest
import torch

from labkit.devices.machines import CARDS
from labkit.models.config import ModelConfig
from labkit.models.decoder import LabDecoder
from labkit.models.huggingface import huggingface_decoder
from labkit.models.transformer import Transformer
from labkit.parallel.generation.generate import generate
from labkit.parallel.generation.inference_placement import (
    accelerate_layers,
    inference_costs,
    place_decoder,
    slowest_ratio,
)
from labkit.parallel.generation.runners import ManyDevices, OneDevice

LAB = LabDecoder(Transformer(ModelConfig(layers=6, width=32, heads=4, context=64)))
SIZES = dict(rows=4, columns=32)
CARD = CARDS["a6000"]


def random_model(family: str):
    """A model with a vocabulary so large that its head weighs as much as several layers."""
    transformers = pytest.importorskip(
        "transformers", reason="needs the extra: pip install '.[pretrained]'"
    )
    sizes = dict(
        vocab_size=4000,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    if family == "gpt2":
        sizes = dict(
            vocab_size=4000,
            n_embd=64,
            n_layer=8,
            n_head=4,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
        )
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_costs_hold_weights_and_cache_and_the_ends_hold_embedding_and_head():
    costs = inference_costs(LAB, profile=CARD, **SIZES)
    cache = LAB.new_cache(**SIZES)
    assert sum(cost.parameter_bytes for cost in costs) == LAB.parameter_bytes
    assert sum(cost.activation_bytes for cost in costs) == cache.bytes
    middle = [cost.forward_flops for cost in costs[1:-1]]
    assert len(set(middle)) == 1 and costs[0].forward_flops > middle[0] < costs[-1].forward_flops


def test_a_measured_prefill_costs_more_than_a_decode_step():
    step, whole = (inference_costs(LAB, prompt=p, **SIZES) for p in (None, 31))
    assert sum(c.forward_flops for c in whole) > sum(c.forward_flops for c in step)


def test_groups_in_flight_hold_their_caches_on_every_device():
    costs = inference_costs(LAB, profile=CARD, **SIZES)
    one, three = (place_decoder(costs, 2, groups=groups).memory_bytes for groups in (1, 3))
    assert sum(three) - sum(one) == 2 * LAB.new_cache(**SIZES).bytes


def test_a_model_that_does_not_fit_is_refused_with_what_would_do():
    costs = inference_costs(LAB, profile=CARD, **SIZES)
    with pytest.raises(ValueError, match="6 layers do not fit on 2 devices"):
        place_decoder(costs, 2, memory_bytes=LAB.parameter_bytes // 4)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gpt2"])
@pytest.mark.parametrize("devices", [2, 3])
def test_our_placement_is_never_slower_than_accelerates_and_gives_the_same_tokens(family, devices):
    pytest.importorskip("accelerate", reason="needs the extra: pip install '.[pretrained]'")
    model = random_model(family)
    decoder = huggingface_decoder(model)
    costs = inference_costs(decoder, profile=CARD, **SIZES)
    placement = place_decoder(costs, devices)
    theirs = accelerate_layers(model, devices, memory_bytes=1 << 30)
    assert slowest_ratio(placement.ranges, placement) == pytest.approx(1.0)
    assert slowest_ratio(theirs, placement) >= 1.0
    prompts = [(1, 2, 3), (4, 5)]
    ours = generate(ManyDevices(decoder, ["cpu"] * devices, placement.ranges), prompts).tokens
    assert ours == generate(OneDevice(decoder), prompts).tokens


@torch.no_grad()
def test_accelerates_dispatch_gives_the_tokens_of_our_split():
    accelerate = pytest.importorskip(
        "accelerate", reason="needs the extra: pip install '.[pretrained]'"
    )
    model = random_model("llama")
    split = ManyDevices(huggingface_decoder(model), ["cpu", "cpu"])
    ours = generate(split, [(1, 2, 3)], new_tokens=6).tokens[0]
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    names += [f"model.layers.{i}" for i in range(8)]
    theirs = accelerate.dispatch_model(
        model, dict.fromkeys(names, "cpu"), main_device="cpu", force_hooks=True
    )
    made = theirs.generate(
        torch.tensor([[1, 2, 3]]),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert tuple(made[0, 3:].tolist()) == ours


def test_layers_left_on_the_host_are_refused():
    pytest.importorskip("accelerate", reason="needs the extra: pip install '.[pretrained]'")
    with pytest.raises(ValueError, match="leave layers on the host"):
        accelerate_layers(random_model("llama"), 2, memory_bytes=300_000)

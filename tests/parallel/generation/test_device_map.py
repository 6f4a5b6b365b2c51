"""Models of transformers placed by their step times, beside Accelerate's map of the same model."""

from __future__ import annotations

import pytest
import torch

from labkit.devices.machines import CARDS
from labkit.models.huggingface import FAMILIES, huggingface_decoder, random_model
from labkit.parallel.generation.device_map import accelerate_layers, place_twice, slowest_ratio
from labkit.parallel.generation.generate import generate
from labkit.parallel.generation.runners import ManyDevices, OneDevice

accelerate = pytest.importorskip(
    "accelerate", reason="needs the extra: pip install '.[pretrained]'"
)
PROMPTS = [(1, 2, 3), (4, 5)]


def big_headed(family: str):
    """A model with a vocabulary so large that its head weighs as much as several layers."""
    return random_model(family, layers=8, width=64, hidden=96, vocabulary=4000, context=64)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("devices", [2, 3])
def test_both_placements_keep_logits_and_tokens_and_ours_is_never_slower(family, devices):
    placed = place_twice(
        big_headed(family), devices, rows=4, columns=32, profile=CARDS["a6000"], decode_width=32
    )
    assert slowest_ratio(placed.ours.ranges, placed.ours) == pytest.approx(1.0)
    assert placed.slowest_ratio > 1.2, "the embedding is many bytes and no work"
    ids = torch.tensor([[1, 2, 3], [9, 8, 7]])
    for split in (placed.ours.ranges, placed.device_map):
        assert placed.logit_error(split, ids) < 1e-5
    ours = ManyDevices(placed.decoder, ["cpu"] * devices, placed.ours.ranges)
    assert generate(ours, PROMPTS).tokens == generate(OneDevice(placed.decoder), PROMPTS).tokens


def test_a_layer_that_is_left_out_shows_in_the_logits():
    placed = place_twice(big_headed("llama"), 2, rows=4, columns=32, profile=CARDS["a6000"])
    assert placed.logit_error([range(0, 4), range(5, 8)], torch.tensor([[1, 2, 3]])) > 1e-2


@torch.no_grad()
def test_accelerates_dispatch_gives_the_tokens_of_our_split():
    model = big_headed("llama")
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
    with pytest.raises(ValueError, match="leave layers on the host"):
        accelerate_layers(big_headed("llama"), 2, memory_bytes=300_000)

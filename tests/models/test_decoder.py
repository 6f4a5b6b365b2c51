"""The lab's decoder gives the logits of its transformer, in one piece, in parts, step by step."""

from __future__ import annotations

import pytest
import torch

from labkit.models.config import ModelConfig
from labkit.models.decoder import LabDecoder
from labkit.models.kv_cache import decode, prefill
from labkit.models.transformer import Transformer

CONFIG = ModelConfig(layers=3, width=16, heads=2, context=12, vocabulary=20)
CPU = torch.device("cpu")


@pytest.fixture
def model() -> Transformer:
    return Transformer(CONFIG)


@torch.no_grad()
def test_prefill_and_decode_give_the_logits_of_the_whole_forward(model):
    ids = torch.randint(0, 20, (2, 6))
    decoder = LabDecoder(model)
    cache = decoder.new_cache(rows=2, columns=6)
    for length in (4, 5, 6):
        step = prefill([4, 4], CPU) if length == 4 else decode([length - 1] * 2, CPU)
        new = ids[:, :4] if length == 4 else ids[:, length - 1 : length]
        torch.testing.assert_close(decoder(new, cache, step), model(ids[:, :length])[:, -1])


@torch.no_grad()
def test_parts_one_after_the_other_are_the_whole(model):
    ids, step = torch.randint(0, 20, (2, 6)), prefill([6, 6], CPU)
    whole = LabDecoder(model)
    x = ids
    for held in (range(0, 1), range(1, 3)):
        part = whole.part(held)
        x = part(x, part.new_cache(2, 6), step)
    assert torch.equal(x, whole(ids, whole.new_cache(2, 6), step))


def test_a_part_of_the_transformer_is_the_same_part_of_the_decoder(model):
    part = LabDecoder(Transformer(CONFIG, layers=range(1, 3)))
    cut = LabDecoder(model).part(range(1, 3))
    assert part.held == cut.held == (1, 2) and part.embed is None and cut.embed is None
    assert part.parameter_bytes == cut.parameter_bytes


def test_making_a_part_leaves_the_model_whole_and_trainable(model):
    decoder = LabDecoder(model)
    decoder.part(range(0, 1))
    assert decoder.held == (0, 1, 2) and decoder.head is model.head
    assert all(p.requires_grad for p in model.parameters())


def test_more_tokens_than_the_context_are_refused(model):
    with pytest.raises(ValueError, match="columns=13 .* context of 12"):
        LabDecoder(model).new_cache(rows=1, columns=13)


def test_layers_that_are_not_held_are_refused(model):
    with pytest.raises(ValueError, match=r"\[2, 3\] are not all among those held, \[0, 1, 2\]"):
        LabDecoder(model).part(range(2, 4))

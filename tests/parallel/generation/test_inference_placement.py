"""Layers placed by what their steps take and hold."""

from __future__ import annotations

import pytest

from labkit.devices.machines import CARDS
from labkit.models.config import ModelConfig
from labkit.models.decoder import LabDecoder
from labkit.models.transformer import Transformer
from labkit.parallel.generation.inference_placement import inference_costs, place_decoder

LAB = LabDecoder(Transformer(ModelConfig(layers=6, width=32, heads=4, context=64)))
SIZES = dict(rows=4, columns=32)
CARD = CARDS["a6000"]


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


def test_a_modelled_decode_step_of_a_wider_model_moves_more_bytes():
    plain, wider = (
        inference_costs(LAB, profile=CARD, decode_width=width, **SIZES) for width in (1.0, 32.0)
    )
    assert all(a.forward_flops < b.forward_flops for a, b in zip(plain, wider, strict=True))
    read = [inference_costs(LAB, profile=CARD, prompt=31, decode_width=w, **SIZES) for w in (1, 32)]
    assert read[0] == read[1], "a prefill stays as it is"

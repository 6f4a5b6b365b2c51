"""Predicted and measured layer costs: by hand, and each against the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer, next_token_loss
from labkit.parallel.placing.costs import LayerCost, predict_layer_costs, total
from labkit.parallel.placing.layer_probe import measure_layer_costs, named_layers

CONFIGS = [
    (ModelConfig(layers=1, width=8, heads=2, context=16, vocabulary=10), 1, 16),
    (ModelConfig(layers=3, width=32, heads=4, context=24, vocabulary=40), 3, 24),
    (ModelConfig(layers=2, width=48, heads=3, context=64, vocabulary=256, expansion=2), 2, 40),
]


def test_a_block_is_the_sum_done_by_hand():
    # B = 1, T = 2, D = 4: four 2x4x4 products, 4x the width up and down, two 2x2 scores
    config = ModelConfig(layers=1, width=4, heads=1, context=2, vocabulary=10)
    block = predict_layer_costs(config, batch=1)[1]
    linear = 2 * (4 * 2 * 4 * 4 + 2 * 2 * 4 * 16)
    scores = 2 * 2 * 2 * 4
    assert block.forward_flops == linear + 2 * scores == 24 * 2 * 16 + 4 * 4 * 4
    assert block.backward_flops == 2 * linear + 5 * scores
    # q k v out 4 (16 + 4); up 64 + 16; down 64 + 4; norms 4 * 4
    assert block.parameter_bytes == 4 * (80 + 80 + 68 + 16)
    assert block.optimizer_bytes == 2 * block.parameter_bytes
    assert block.output_bytes == 2 * 4 * 4


@pytest.mark.parametrize("config, batch, tokens", CONFIGS)
def test_prediction_and_measurement_of_the_lab_model_agree_in_every_figure(config, batch, tokens):
    ids = torch.randint(config.vocabulary, (batch, tokens))
    layers = named_layers(Transformer(config))
    measured = measure_layer_costs(layers, ids, loss=lambda logits: next_token_loss(logits, ids))
    assert measured == predict_layer_costs(config, batch, tokens=tokens)


@pytest.mark.parametrize("config, batch, tokens", CONFIGS)
def test_the_layers_add_up_to_the_whole_model(config, batch, tokens):
    whole = total(predict_layer_costs(config, batch, tokens=tokens))
    assert whole.parameter_bytes == 4 * config.num_parameters


def test_half_precision_halves_weights_gradients_and_activations_but_not_statistics():
    config, batch, tokens = CONFIGS[1]
    full = predict_layer_costs(config, batch)[1]
    half = predict_layer_costs(config, batch, bytes_per_value=2)[1]
    assert 2 * half.parameter_bytes == full.parameter_bytes
    assert half.optimizer_bytes == full.optimizer_bytes
    statistics = batch * tokens * (2 * 2 + config.heads) * 4
    assert 2 * (half.activation_bytes - statistics) == full.activation_bytes - statistics


def test_a_first_layer_computes_no_gradient_for_its_input():
    layers = {"first": nn.Linear(4, 4, bias=False), "second": nn.Linear(4, 4, bias=False)}
    first, second = measure_layer_costs(layers, torch.randn(2, 4))
    assert first.forward_flops == second.forward_flops == 2 * 2 * 4 * 4
    assert first.backward_flops == first.forward_flops
    assert second.backward_flops == 2 * second.forward_flops


def test_frozen_weights_have_no_gradient_and_no_optimizer_state():
    layer = nn.Linear(4, 4).requires_grad_(False)
    (cost,) = measure_layer_costs({"frozen": layer}, torch.randn(2, 4))
    assert (cost.parameter_bytes, cost.gradient_bytes, cost.optimizer_bytes) == (80, 0, 0)
    assert (cost.backward_flops, cost.activation_bytes) == (0, 0)


def test_measuring_leaves_gradients_and_buffers_alone():
    layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    measure_layer_costs({"norm": layer}, torch.randn(8, 4))
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_a_part_of_the_model_names_its_layers_as_the_whole_does():
    config = CONFIGS[1][0]
    assert list(named_layers(Transformer(config, layers=[1, 2]))) == [
        "layers.1",
        "layers.2",
        "head",
    ]


def test_sizes_out_of_range_are_refused():
    config = CONFIGS[0][0]
    with pytest.raises(ValueError, match="tokens=17 within 1..context=16"):
        predict_layer_costs(config, 1, tokens=17)
    with pytest.raises(ValueError, match="batch=0 must be >= 1"):
        predict_layer_costs(config, 0)
    with pytest.raises(ValueError, match="layers is empty"):
        measure_layer_costs({}, torch.zeros(1))
    with pytest.raises(ValueError, match="forward_flops=-1 of layer 'x' must be >= 0"):
        LayerCost("x", -1, 0, 0, 0, 0, 0, 0)

"""Layer costs from a rehearsal: against formulas, against real layers, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit.measure.virtual.recorder import Recorder
from labkit.models.config import ModelConfig
from labkit.models.transformer import Block, Embed, Head
from labkit.parallel.pipelining.losses import BatchLoss, token_losses
from labkit.parallel.placing.costs import LayerCost, total
from labkit.parallel.planning.layer_chains import LabChain
from labkit.parallel.planning.layer_costs import layer_costs
from labkit.parallel.planning.own_chain import OwnChain

CONFIGS = [
    (ModelConfig(layers=1, width=8, heads=2, context=16, vocabulary=10), 1, 16),
    (ModelConfig(layers=3, width=32, heads=4, context=24, vocabulary=40), 3, 24),
    (ModelConfig(layers=2, width=48, heads=3, context=64, vocabulary=256, expansion=2), 2, 40),
]


@pytest.mark.parametrize("config, rows, tokens", CONFIGS)
def test_a_block_costs_what_the_published_formulas_say(config, rows, tokens):
    """24 B T D^2 + 4 B T^2 D for an expansion of 4 (Kaplan et al. 2020, "Scaling Laws for Neural
    Language Models", table 1). Fused attention computes Q K^T once more in its backward."""
    block = layer_costs(LabChain(config, tokens), rows)[1]
    B, T, D, f = rows, tokens, config.width, config.expansion
    linear, scores = 2 * B * T * D * D * (4 + 2 * f), 2 * B * T * T * D
    if f == 4:
        assert linear + 2 * scores == 24 * B * T * D**2 + 4 * B * T**2 * D
    assert block.forward_flops == linear + 2 * scores
    assert block.backward_flops == 2 * linear + 5 * scores
    parameters = (4 + 2 * f) * D * D + (9 + f) * D
    assert block.parameter_bytes == block.gradient_bytes == 4 * parameters
    assert block.optimizer_bytes == 8 * parameters + 16 * 4  # and each tensor counts its steps
    assert block.output_bytes == 4 * B * T * D


@pytest.mark.parametrize("config, rows, tokens", CONFIGS)
def test_a_block_keeps_what_is_counted_by_hand(config, rows, tokens):
    """Korthikanti et al. 2022, section 4.1, without dropout and with fused attention."""
    block = layer_costs(LabChain(config, tokens), rows)[1]
    # two norms' inputs and outputs, q k v, attention's output, both sides of the GELU
    values = rows * tokens * config.width * (8 + 2 * config.expansion)
    statistics = rows * tokens * (2 * 2 + config.heads)
    assert block.activation_bytes == 4 * (values + statistics)


def run_for_real(layer, x, loss=None):
    """FLOPs of each direction, and bytes that autograd keeps beside weights."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept, recorder = {}, Recorder(rank=0)

    def remember(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with recorder, torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        y = layer(x)
        end = y if loss is None else loss(y)
    forward = recorder.take().flops
    with recorder:
        end.backward(torch.ones_like(end))
    return forward, recorder.take().flops, sum(kept.values())


@pytest.mark.parametrize("config, rows, tokens", CONFIGS)
def test_rehearsed_layers_cost_what_real_ones_do(config, rows, tokens):
    ids = torch.randint(config.vocabulary, (rows, tokens))
    x = torch.randn(rows, tokens, config.width, requires_grad=True)
    loss = BatchLoss(token_losses, [(ids, None)], divide_by=rows).of(0)
    found = layer_costs(LabChain(config, tokens), rows)
    embed, block, head = found[0], found[1], found[-1]
    real = [
        run_for_real(Embed(config), ids),
        run_for_real(Block(config), x),
        run_for_real(Head(config), x, loss),
    ]
    for cost, (forward, backward, kept) in zip((embed, block, head), real, strict=True):
        assert (cost.forward_flops, cost.backward_flops) == (forward, backward)
        assert cost.activation_bytes == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("config, rows, tokens", CONFIGS)
def test_the_layers_add_up_to_the_whole_model(config, rows, tokens):
    whole = total(layer_costs(LabChain(config, tokens), rows))
    assert whole.parameter_bytes == 4 * config.num_parameters


def own_costs(blocks, features=4):
    chain = OwnChain(blocks, torch.zeros(2, features), torch.zeros(2, 4), nn.MSELoss())
    return layer_costs(chain, 2)


def test_a_first_layer_computes_no_gradient_for_its_input():
    first, second = own_costs(
        {"first": nn.Linear(4, 4, bias=False), "second": nn.Linear(4, 4, bias=False)}
    )
    assert first.forward_flops == second.forward_flops == 2 * 2 * 4 * 4
    assert first.backward_flops == first.forward_flops
    assert second.backward_flops == 2 * second.forward_flops


def test_frozen_weights_have_no_gradient_and_no_optimizer_state():
    cost, _ = own_costs({"frozen": nn.Linear(4, 4).requires_grad_(False), "head": nn.Linear(4, 4)})
    assert (cost.parameter_bytes, cost.gradient_bytes, cost.optimizer_bytes) == (80, 0, 0)
    assert cost.backward_flops == 0


def test_sizes_out_of_range_are_refused():
    with pytest.raises(ValueError, match="rows=0 of a microbatch must be at least 1"):
        layer_costs(LabChain(CONFIGS[0][0]), 0)
    with pytest.raises(ValueError, match="forward_flops=-1 of layer 'x' must be >= 0"):
        LayerCost("x", -1, 0, 0, 0, 0, 0, 0)

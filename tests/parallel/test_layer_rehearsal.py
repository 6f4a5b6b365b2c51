"""A rehearsal on fake tensors sees what a real run does, operator by operator and byte by byte."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.measure.virtual.recorder import Recorder
from labkit.models.config import ModelConfig
from labkit.models.transformer import Block
from labkit.parallel.planning.layer_rehearsal import rehearse_layer
from labkit.parallel.planning.levers import Levers
from labkit.parallel.planning.optimizer_rehearsal import adamw, rehearse_optimizer

CONFIG = ModelConfig(layers=1, width=32, heads=2, context=16)
ALL_LEVERS = [Levers(), Levers(True), Levers(False, True), Levers(True, True)]


def rehearsed(layer_of, shape):
    with FakeTensorMode():
        return rehearse_layer(layer_of(), lambda: torch.empty(shape))


def levered(levers):
    def block():
        made = Block(CONFIG)
        levers.apply([], [made])
        return made

    return block


def names(events):
    return [(event.name, event.flops, event.num_bytes) for event in events]


@pytest.mark.parametrize("levers", ALL_LEVERS, ids=str)
def test_a_rehearsed_block_runs_the_operators_of_a_real_one(levers):
    block, x = levered(levers)(), torch.randn(2, 16, 32, requires_grad=True)
    recorder = Recorder(rank=0)
    with recorder:
        y = block(x)
    forward = recorder.take().events
    gradient = torch.ones_like(y)
    with recorder:
        y.backward(gradient)
    profile = rehearsed(levered(levers), (2, 16, 32))
    assert names(profile.forward.events) == names(forward)
    assert names(profile.first_backward.events) == names(recorder.take().events)


def test_a_linear_layer_keeps_its_input_and_a_sigmoid_its_output():
    linear = rehearsed(lambda: nn.Linear(8, 4), (3, 8))
    assert (linear.keeps_input, linear.keeps_output, linear.kept_bytes) == (True, False, 0)
    assert (linear.input_bytes, linear.output_bytes) == (3 * 8 * 4, 3 * 4 * 4)
    assert linear.gradient_bytes == linear.parameter_bytes == (8 * 4 + 4) * 4
    sigmoid = rehearsed(nn.Sigmoid, (3, 8))
    assert (sigmoid.keeps_input, sigmoid.keeps_output, sigmoid.kept_bytes) == (False, True, 0)


def test_what_lies_between_two_layers_counts_as_kept_once():
    pair = rehearsed(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4)), (3, 8)
    )
    assert pair.kept_bytes == 3 * 16 * 4  # the sigmoid's output, not its input


def test_a_view_of_the_input_has_no_bytes_of_its_own():
    flat = rehearsed(lambda: nn.Flatten(), (3, 2, 4))
    assert (flat.passes_input, flat.output_bytes, flat.message_bytes) == (True, 0, 3 * 8 * 4)


def test_checkpointing_keeps_the_input_of_a_block_alone():
    profile = rehearsed(levered(Levers(checkpointing=True)), (2, 16, 32))
    assert (profile.keeps_input, profile.kept_bytes) == (True, 0)


@pytest.mark.parametrize("levers", ALL_LEVERS[1:], ids=str)
def test_a_lever_leaves_the_gradients_as_they_are(levers):
    torch.manual_seed(0)
    plain = Block(CONFIG)
    block = levered(levers)()
    block.load_state_dict(plain.state_dict())
    x = torch.randn(2, 16, 32)
    for each in (plain, block):
        each(x).square().mean().backward()
    tolerance = 2e-2 if levers.autocast else 1e-6  # bfloat16 has 8 bits of mantissa
    for (name, a), b in zip(plain.named_parameters(), block.parameters(), strict=True):
        error = (a.grad - b.grad).norm() / a.grad.norm().clamp_min(1e-6)
        assert error < tolerance or a.grad.norm() < 1e-6, name


def test_adamw_keeps_two_moments_and_a_step_count_of_each_parameter():
    profile = rehearse_optimizer(adamw)
    assert profile.state_of([10, 1000]) == 8 * 1010 + 2 * 4
    assert profile.temporary_of([10, 1000]) == 2 * 4 * 1000

"""PyTorch's tracker and Accelerate's estimate beside ours, on one model."""

from __future__ import annotations

import pytest
import torch

from labkit.devices.machines import machine
from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer, next_token_loss
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.layer_chains import LabChain
from labkit.parallel.planning.other_estimates import accelerate_training_bytes, tracked_peak_bytes
from labkit.parallel.planning.predictor import predict_training
from labkit.parallel.sharding.layouts import Layout

CONFIG = ModelConfig(layers=2, width=32, heads=2, context=32)
ROWS = 8


def forward_and_backward(model):
    ids = torch.zeros(ROWS, CONFIG.context, dtype=torch.int64)
    logits = model(ids)  # has a name here as in the program, so it lives until the end
    next_token_loss(logits, ids).backward()


def test_pytorchs_memory_tracker_comes_to_the_same_peak_without_an_optimizer():
    choice = Choice(Layout(microbatches=1))
    memory = predict_training(LabChain(CONFIG), choice, machine("lab", 1), ROWS).memory[0]
    ours = memory.peak_bytes - memory.optimizer
    theirs = tracked_peak_bytes(Transformer(CONFIG), forward_and_backward)
    assert ours == pytest.approx(theirs, rel=0.05)


def test_accelerates_estimate_is_four_times_the_weights_and_knows_no_activations():
    model = Transformer(CONFIG)
    theirs = accelerate_training_bytes(model)
    if theirs is None:
        pytest.skip("accelerate is not installed")
    assert theirs["weights"] == pytest.approx(4 * CONFIG.num_parameters, rel=0.05)
    assert theirs["training"] == pytest.approx(16 * CONFIG.num_parameters, rel=0.05)

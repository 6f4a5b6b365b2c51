import torch
from torch import nn

from labkit.measure.memory import held_bytes, storage_bytes


def test_a_linear_layer_with_adamw_counted_by_hand():
    layer = nn.Linear(3, 2)  # 6 + 2 float32 values = 32 bytes
    optimizer = torch.optim.AdamW(layer.parameters())
    assert vars(held_bytes(layer, optimizer)) == dict(parameters=32, gradients=0, optimizer=0)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    held = held_bytes(layer, optimizer)
    # two moments of 32 bytes each, and a step counter of 4 bytes for each of two parameters
    assert vars(held) == dict(parameters=32, gradients=32, optimizer=72)
    assert held.total == 136


def test_tied_weights_and_views_count_once():
    weight = torch.zeros(10)
    assert storage_bytes([weight, weight, weight[2:4], weight.view(2, 5)]) == 40


def test_buffers_count_as_parameters():
    norm = nn.BatchNorm1d(4)  # weight, bias, mean, variance: 4 x 16 bytes; counter: 8
    assert held_bytes(norm).parameters == 72

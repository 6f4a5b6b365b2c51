"""What is carried between the notebook and its ranks arrives as what it was."""

from __future__ import annotations

import torch
from torch import nn

from labkit.devices.ranks.rank_values import dump, load


def carried(value, tmp_path):
    file = tmp_path / "value"
    file.write_bytes(dump(value, "push"))
    return load(file, "push")


def test_a_module_that_is_carried_can_still_be_trained_and_keeps_tied_and_frozen_weights(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    there = carried(model, tmp_path)
    assert [name for name, _ in there.named_parameters()] == [
        n for n, _ in model.named_parameters()
    ]
    assert there[1].weight is there[0].weight
    assert [p.requires_grad for p in there.parameters()] == [True, True, True, False, False]
    there(torch.ones(1, 4)).sum().backward()
    assert there[0].weight.grad is not None


def test_a_view_is_carried_without_the_storage_behind_it_and_without_its_graph(tmp_path):
    rows = torch.ones(1000, 100, requires_grad=True)
    there = carried((rows * 2)[0], tmp_path)
    assert torch.equal(there, torch.full((100,), 2.0))
    assert there.untyped_storage().nbytes() == 400 and not there.requires_grad

"""Cutting a model: names, weights, and what cannot be cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer
from labkit.parallel.pipelining.stages import cut, even_block_ranges, even_ranges, layer_names
from labkit.parallel.pipelining.traced_stages import cut_at
from labkit.parallel.placing.placement import place
from labkit.parallel.placing.placement_plan import PlacementDevice
from labkit.parallel.planning.layer_chains import LabChain
from labkit.parallel.planning.layer_costs import layer_costs

CONFIG = ModelConfig(layers=3, width=8, heads=2, context=8)
IDS = torch.arange(16).reshape(2, 8)


def run(stages, x):
    for stage in stages.values():
        x = stage(x)
    return x


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_stages_hold_the_whole_models_weights_under_their_names_and_compute_the_same(num_stages):
    whole = Transformer(CONFIG)
    stages = cut(CONFIG, even_ranges(5, num_stages))
    weights = {n: p for stage in stages.values() for n, p in stage.named_parameters()}
    assert weights.keys() == dict(whole.named_parameters()).keys()
    for name, weight in whole.named_parameters():
        assert torch.equal(weight, weights[name])
    assert torch.equal(run(stages, IDS), whole(IDS))


def test_a_placement_is_cut_as_it_was_placed():
    costs = layer_costs(LabChain(CONFIG), 2)
    placement = place(costs, [PlacementDevice(name, 1.0) for name in "ab"])
    stages = cut(CONFIG, placement.ranges)
    assert tuple(stages[i].names for i in range(2)) == placement.layer_names
    assert layer_names(CONFIG) == tuple(cost.name for cost in costs)


def test_only_held_stages_are_built():
    assert list(cut(CONFIG, even_ranges(5, 5), held=[1, 4])) == [1, 4]


def test_blocks_may_come_as_list_or_mapping():
    blocks = [nn.Linear(2, 3), nn.Linear(3, 1)]
    assert cut(blocks, even_ranges(2, 2))[1].names == ("1",)
    named = {"encoder.up": blocks[0], "decoder": blocks[1]}
    (first, second) = cut(named, even_ranges(2, 2)).values()
    assert [n for n, _ in first.named_parameters()] == ["encoder.up.weight", "encoder.up.bias"]
    assert second.get_submodule("decoder") is blocks[1]


def test_a_stage_remembers_which_weights_the_whole_model_ties():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    assert cut(model, even_ranges(3, 2), held=[0])[0].tied == (("0.weight", "2.weight"),)


def test_embedding_and_head_go_with_the_ends_when_blocks_are_shared_out():
    assert even_block_ranges(CONFIG, 3) == (range(0, 2), range(2, 3), range(3, 5))
    assert even_block_ranges(CONFIG, 1) == (range(0, 5),)


@pytest.mark.parametrize(
    "ranges", [[range(0, 2)], [range(0, 3), range(2, 5)], [range(0, 5), range(5, 5)]]
)
def test_ranges_that_leave_out_repeat_or_are_empty_are_refused(ranges):
    with pytest.raises(ValueError, match="must cover layers 0 to 4 in order"):
        cut(CONFIG, ranges)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="3 layers in 4 stages"):
        even_ranges(3, 4)


class Skip(nn.Module):
    def forward(self, x, residual):
        return x + residual


class Optional(nn.Module):
    def forward(self, x, scale=1.0):
        return x * scale


def test_a_block_that_needs_more_than_the_previous_output_is_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), Skip())
    with pytest.raises(ValueError, match=r"block 1 \(Skip\) takes \(x, residual\)"):
        cut(model, even_ranges(2, 2))
    cut(nn.Sequential(nn.Linear(2, 2), Optional()), even_ranges(2, 2))


class Net(nn.Module):
    """Two residual blocks, a bare parameter, and functions between the modules."""

    def __init__(self, skip_over_all=False):
        super().__init__()
        self.skip_over_all = skip_over_all
        self.enter, self.left = nn.Linear(4, 4), nn.Linear(4, 4)
        self.right = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.leave, self.shift = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = torch.relu(self.enter(x))
        y = x + self.left(x)
        y = y + self.right(y) + self.shift
        return self.leave(y) + (x if self.skip_over_all else 0)


def test_a_model_of_ordinary_code_is_cut_where_one_value_crosses():
    model, x = Net(), torch.randn(2, 4)
    stages = cut_at(model, ["right", "leave"])
    assert torch.equal(run(stages, x), model(x))
    names = [[n for n, _ in stage.named_parameters()] for stage in stages.values()]
    assert names == [
        ["enter.weight", "enter.bias", "left.weight", "left.bias"],
        ["shift", "right.0.weight", "right.0.bias"],
        ["leave.weight", "leave.bias"],
    ]
    assert stages[2].get_submodule("leave").weight is model.leave.weight


def test_a_skip_connection_across_a_cut_is_refused_by_name():
    with pytest.raises(ValueError, match="2 values cross the cut before right .relu is read by"):
        cut_at(Net(skip_over_all=True), ["right"])
    with pytest.raises(ValueError, match="2 values cross the cut before left"):
        cut_at(BranchFirst(), ["left"])


class BranchFirst(Net):
    def forward(self, x):
        return self.enter(x) + self.left(x)


class Looks(Net):
    def forward(self, x):
        return self.enter(x) if x.sum() > 0 else self.leave(x)


class TwoInputs(Net):
    def forward(self, x, mask):
        return self.enter(x) * mask


class ReadsTwice(Net):
    def forward(self, x):
        return self.leave(self.enter(x) + self.shift) + self.shift


def test_models_that_cannot_be_traced_or_shared_out_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="Looks cannot be traced .TraceError"):
        cut_at(Looks(), ["leave"])
    with pytest.raises(ValueError, match=r"TwoInputs takes \(x, mask\)"):
        cut_at(TwoInputs(), ["leave"])
    with pytest.raises(ValueError, match=r"shift is read in stages \[0, 1\]"):
        cut_at(ReadsTwice(), ["leave"])
    with pytest.raises(ValueError, match="no module 'enter' runs after leave"):
        cut_at(Net(), ["leave", "enter"])
    with pytest.raises(ValueError, match="Net does not say in which order"):
        cut(Net(), even_ranges(4, 2))

"""Your own model: planned, run on ranks with parity, refused with the layer's name."""

from __future__ import annotations

import copy

import pytest
import torch
from spawned import run_ranks
from torch import nn

from labkit.devices.inventory import virtual_devices
from labkit.devices.machines import machine
from labkit.models.huggingface import random_model
from labkit.parallel.pipelining.stages import Chain
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.levers import Levers
from labkit.parallel.planning.own_model import own_model
from labkit.parallel.planning.own_parity import OwnRun, differences, run_alone, run_choice
from labkit.parallel.planning.plan_training import trace_choice, train_choice
from labkit.parallel.planning.planner import plan
from labkit.parallel.planning.predictor import predict_training
from labkit.parallel.sharding.layouts import Layout

DEVICES = virtual_devices("lab", 4)


def squared_error(outputs, targets):
    """One loss per target."""
    return (outputs - targets).square()


def blocks():
    torch.manual_seed(0)
    widths = [12, 96, 192, 96, 12]
    pairs = zip(widths, widths[1:], strict=False)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairs))


def batch():
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, 12, generator=draw) for _ in range(2))


def chain_of(model):
    return own_model(model, *batch(), squared_error)


def _run(rank, choices):
    runs, peaks = [], []
    for choice in choices:
        chain = chain_of(blocks())
        runs.append(run_choice(chain, choice, torch.device("cpu")))
        # gloo's thread lets go of what was sent, on a busy machine late: the leaner of two counts
        traced = (
            trace_choice(chain.blocks, choice, *batch(), devices=DEVICES, loss_fn=squared_error)
            for _ in range(2)
        )
        peaks.append(min(trace.peak_bytes for trace in traced))
    return runs, peaks


@pytest.mark.parametrize("count", [1, 2, 4])
def test_blocks_of_your_own_are_planned_and_run_like_one_device(count):
    chain, its_machine = chain_of(blocks()), machine("lab", count)
    found = plan(chain, its_machine, batch=8)
    choices = [p.choice for p in found.ranked if p.choice.layout.ranks == count][:6]
    assert choices
    by_rank, alone = run_ranks(_run, count, choices), run_alone(chain)
    for i, choice in enumerate(choices):
        off = differences(alone, {rank: runs[i] for rank, (runs, _) in enumerate(by_rank)})
        assert off.keys() == {"loss", "gradient", "parameter", "later losses"}
        assert max(off.values()) < 1e-5, (choice, off)
        predicted = predict_training(chain, choice, its_machine, 8)
        for rank, (_, peaks) in enumerate(by_rank):
            assert predicted.memory_of(rank).peak_bytes == pytest.approx(peaks[i], rel=0.05), choice
    assert any("your own blocks" in r.reason for r in found.rejected) == (count > 1)


class Needs(nn.Module):
    def forward(self, x, earlier):
        return x + earlier


class LeftBehind(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(12)

    def forward(self, x):
        return x * self.scale


class InList(LeftBehind):
    def __init__(self):
        super().__init__()
        self.scale, self.pair = 1.0, {"two": [1, torch.ones(12)]}


class Unseen(LeftBehind):
    def __init__(self):
        super().__init__()
        self.scale, self.layers = 1.0, (nn.Linear(12, 12),)


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x):
        return self.b(self.a(x)) + x


@pytest.mark.parametrize(
    "model, message",
    [
        (nn.Sequential(nn.Linear(12, 12), Needs()), r"block 1 \(Needs\) takes \(x, earlier\)"),
        (nn.Sequential(nn.Linear(12, 12), LeftBehind()), r"1.scale is a plain tensor \(12,\)"),
        (nn.Sequential(nn.Linear(12, 12), InList()), r"1.pair\['two'\]\[1\] is a plain tensor"),
        (nn.Sequential(nn.Linear(12, 12), Unseen()), r"1.layers\[0\].weight is a plain tensor"),
        (
            nn.Sequential(nn.Linear(12, 12), nn.ReLU(inplace=True)),
            r"block 1 \(ReLU\) writes into its input.*inplace=False",
        ),
        (nn.Sequential(Pair(), nn.Linear(12, 12)), r"block 0 \(Pair\) returns a tuple"),
        (nn.Sequential(nn.Linear(12, 12), nn.Linear(7, 12)), r"block 1 \(Linear\) does not take"),
        (Branches(), "Branches does not say in which order its blocks run"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_layer_and_the_reason(model, message):
    with pytest.raises(ValueError, match=message):
        chain_of(model)


def test_layers_that_mix_rows_rule_out_microbatches_and_copies():
    model = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 12))
    found = plan(chain_of(model), machine("lab", 2), batch=8)
    assert {str(p.choice) for p in found.ranked} == {"one device"}
    assert any(r"1 (BatchNorm1d) takes its statistics" in r.reason for r in found.rejected)


def test_statistics_are_not_updated_twice_by_checkpointing():
    model = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 12))
    found = plan(chain_of(model), machine("lab", 1), batch=8, levers=[Levers(checkpointing=True)])
    assert found.ranked == () and "checkpointing runs it twice" in found.rejected[0].reason
    frozen = plan(
        chain_of(model.eval()), machine("lab", 1), batch=8, levers=[Levers(checkpointing=True)]
    )
    assert frozen.best.choice.levers.checkpointing


class Backwardless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no way back")


class OneWay(nn.Module):
    def forward(self, x):
        return Backwardless.apply(x)


def test_a_block_that_fails_in_its_rehearsal_is_named():
    chain = chain_of(nn.Sequential(nn.Linear(12, 12), OneWay(), nn.Linear(12, 12)))
    with pytest.raises(ValueError, match=r"block 1 \(OneWay\) cannot be rehearsed.*no way back"):
        plan(chain, machine("lab", 1), batch=8)


def _dropped(rank):
    model = nn.Sequential(nn.Linear(12, 12), nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5)))
    model.append(nn.Linear(12, 12))
    found = []
    for checkpointing in (False, True):
        choice = Choice(Layout(microbatches=2), levers=Levers(checkpointing))
        blocks = copy.deepcopy(chain_of(model).blocks)
        training = train_choice(blocks, choice, torch.device("cpu"), loss_fn=squared_error)
        torch.manual_seed(2)
        training.backward(*batch())
        found.append(training.full_gradients())
    return found


def test_checkpointing_drops_out_the_same_numbers_again():
    [(plain, recomputed)] = run_ranks(_dropped, 1)
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient)


def _tiny_llama(**sizes):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=16,
        **sizes,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def test_a_hugging_face_model_by_path_is_planned_and_equals_its_own_forward(tmp_path):
    model = _tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    ids = torch.randint(32, (4, 16))
    chain = own_model(tmp_path, ids, ids)
    logits = Chain(chain.blocks)(ids)
    torch.testing.assert_close(logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-5)
    assert chain.tied_bytes == 32 * 24 * 4
    found = plan(chain, machine("lab", 2), batch=4)
    assert found.best.step_time_s > 0
    reasons = [r.reason for r in found.rejected if r.what.startswith("tensor 2")]
    assert "heads=3" in reasons[0] and "tensor sizes 1" in reasons[0]


def test_a_hugging_face_model_that_would_drop_out_is_refused_with_the_setting():
    pytest.importorskip("transformers")
    ids = torch.randint(32, (4, 16))
    model = random_model("gpt2", layers=2, vocabulary=32, context=16, resid_pdrop=0.2)
    assert own_model(model.eval(), ids, ids).names
    with pytest.raises(ValueError, match=r"attn_pdrop=0.1 of a model in train\(\) mode.*eval\(\)"):
        own_model(model.train(), ids, ids)
    model.config.attn_pdrop = model.config.embd_pdrop = 0.0
    with pytest.raises(ValueError, match="resid_pdrop=0.2"):
        own_model(model, ids, ids)
    model.config.resid_pdrop = 0.0
    assert own_model(model, ids, ids).names


SPLITS = [
    Choice(Layout(pipeline=2, microbatches=2)),
    Choice(Layout(pipeline=2, microbatches=4), "GPipe"),
]


def _run_tied(rank, folder, ids):
    chain = own_model(folder, ids, ids)
    return [run_choice(chain, choice, torch.device("cpu")) for choice in SPLITS]


def test_a_hugging_face_model_whose_tied_ends_are_on_two_ranks_trains_like_one_device(tmp_path):
    _tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    ids = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(2))
    alone = run_alone(own_model(tmp_path, ids, ids))
    tied = [name for name in alone.snapshot if name.startswith("parameter head.part.head.1")]
    assert len(tied) == 1
    by_rank = run_ranks(_run_tied, 2, tmp_path, ids)
    for i, choice in enumerate(SPLITS):
        off = differences(alone, {rank: runs[i] for rank, runs in enumerate(by_rank)})
        assert max(off.values()) < 1e-5, (choice, off)


def test_a_tensor_that_no_rank_holds_is_named():
    weight = {"loss": torch.tensor(1.0), "gradient of 0.weight": torch.ones(2)}
    alone, lost = OwnRun(weight, (1.0,)), OwnRun({"loss": weight["loss"]}, (1.0,))
    with pytest.raises(ValueError, match="1 tensors are on no rank, the first is gradient of 0.w"):
        differences(alone, {0: lost})
    wrong = OwnRun(weight | {"gradient of 0.weight": 2 * torch.ones(2)}, (1.5,))
    off = differences(alone, {0: alone, 1: wrong})
    assert off == {"loss": 0.0, "gradient": 1.0, "later losses": 0.5}

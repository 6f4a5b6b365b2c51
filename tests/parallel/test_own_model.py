"""Your own model: planned, run on ranks with parity, refused with the layer's name."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from spawned import run_ranks
from torch import nn

from labkit.devices.machines import machine
from labkit.measure.virtual.virtual_step import record_step
from labkit.parallel.parity import compare
from labkit.parallel.pipelining.stages import Chain
from labkit.parallel.planning.own_model import own_model
from labkit.parallel.planning.plan_training import train_choice
from labkit.parallel.planning.planner import plan
from labkit.parallel.planning.predictor import predict_training


def squared_error(outputs, targets):
    """One loss per target."""
    return (outputs - targets).square()


def blocks():
    torch.manual_seed(0)
    widths = [12, 24, 48, 24, 12]
    pairs = zip(widths, widths[1:], strict=False)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairs))


def batch():
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, 12, generator=draw) for _ in range(2))


def chain_of(model):
    return own_model(model, *batch(), squared_error)


def reference():
    """Gradients of one device."""
    whole = Chain(dict(blocks().named_children()))
    squared_error(whole(batch()[0]), batch()[1]).mean().backward()
    return {name: p.grad for name, p in whole.named_parameters()}


def _run(rank, choices):
    errors, peaks = [], []
    for choice in choices:
        chain = chain_of(blocks())
        training = train_choice(chain.blocks, choice, torch.device("cpu"), loss_fn=squared_error)
        training.backward(*batch())
        errors.append(compare(reference(), training.full_gradients()).max_rel_error)
        training.optimizer.zero_grad()
        step = partial(training.step, *batch())
        step()
        peaks.append(record_step(step, hold=[training.model, training.optimizer]).peak_bytes)
    return errors, peaks


@pytest.mark.parametrize("count", [1, 2])
def test_blocks_of_your_own_are_planned_and_run_like_one_device(count):
    chain, its_machine = chain_of(blocks()), machine("lab", count)
    found = plan(chain, its_machine, batch=8)
    choices = [p.choice for p in found.ranked if p.choice.layout.ranks == count]
    assert choices
    for rank, (errors, peaks) in enumerate(run_ranks(_run, count, choices)):
        assert max(errors) < 1e-5
        for choice, peak in zip(choices, peaks, strict=True):
            predicted = predict_training(chain, choice, its_machine, 8).memory_of(rank)
            assert predicted.peak_bytes == pytest.approx(peak, rel=0.05), choice
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

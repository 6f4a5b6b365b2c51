"""Batches of every kind on two ranks against one device: short, masked, accumulated, evaluated."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from spawned import run_ranks

from labkit.models.config import ModelConfig
from labkit.models.text import load_text
from labkit.models.transformer import Transformer
from labkit.parallel.parity import compare, gradients, joined
from labkit.parallel.pipelining.losses import (
    IGNORED,
    BatchLoss,
    check_per_target,
    count_valid,
    valid_targets,
)
from labkit.parallel.pipelining.microbatches import (
    Batch,
    BatchRule,
    Given,
    split_inputs,
    split_targets,
)
from labkit.parallel.pipelining.pipeline import Pipeline
from labkit.parallel.pipelining.stages import cut, even_block_ranges
from labkit.parallel.scheduling.schedules import one_f_one_b

CONFIG = ModelConfig(layers=2, width=8, heads=2, context=8)
M = 4


def batch(rows=8):
    return load_text().batch(rows, CONFIG.context, step=0)


def uneven_targets():
    """Targets of which microbatch 1 (rows 2 and 3) has none that counts, and row 4 has three."""
    targets = batch()[1].clone()
    targets[2:4] = IGNORED
    targets[4, 3:] = IGNORED
    return targets


def first_half_counts():
    valid = torch.zeros(8, CONFIG.context, dtype=torch.bool)
    valid[:, :4] = True
    return valid


def mean_loss(model, inputs, targets, valid=None):
    targets = targets if valid is None else targets.masked_fill(~valid, IGNORED)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


@cache
def on_one_device():
    """By case, the loss and the gradients; the pipeline's cases have the same names."""
    inputs, targets = batch()
    cases = {
        "whole batch": [(inputs, targets)],
        "short batch": [(inputs[:5], targets[:5])],
        "fewer rows than microbatches": [(inputs[:2], targets[:2])],
        "ignored targets": [(inputs, uneven_targets())],
        "valid mask": [(inputs, targets, first_half_counts())],
        "two calls": [(inputs, targets), (inputs[:4], targets[4:])],
        "two calls as one batch": [
            (torch.cat([inputs, inputs[:4]]), torch.cat([uneven_targets(), targets[4:]]))
        ],
    }
    found = {}
    for name, calls in cases.items():
        model = Transformer(CONFIG)
        losses = [mean_loss(model, *call) for call in calls]
        sum(losses).backward()
        found[name] = (sum(losses).item(), gradients(model))
    return found


def _cases(rank):
    inputs, targets = batch()
    schedule = one_f_one_b(2, M)
    stages = cut(CONFIG, even_block_ranges(CONFIG, 2), held=[rank])
    pipe = Pipeline(stages, schedule)
    found = {}

    def case(name, *calls, **options):
        stages[rank].zero_grad()
        loss = sum(pipe.step(*call, **options) for call in calls)
        found[name] = (loss, gradients(stages[rank]))

    case("whole batch", (inputs, targets))
    case("short batch", (inputs[:5], targets[:5]))
    case("fewer rows than microbatches", (inputs[:2], targets[:2]))
    case("ignored targets", (inputs, uneven_targets()))
    case("valid mask", (inputs, targets), valid=first_half_counts())
    case("two calls", (inputs, targets), (inputs[:4], targets[4:]))
    calls = [(inputs, uneven_targets()), (inputs[:4], targets[4:])]
    total = sum(count_valid(call[1]) for call in calls)
    case("two calls as one batch", *calls, divide_by=total)
    before = gradients(stages[rank])
    found["evaluate"] = pipe.evaluate(inputs[:5], targets[:5])
    found["outputs"] = pipe.outputs(inputs[:5])
    found["untouched"] = compare(before, gradients(stages[rank])).max_abs_error
    return found


@cache
def on_two_ranks():
    return run_ranks(_cases, 2)


@pytest.mark.parametrize("name", list(on_one_device()))
def test_loss_and_gradients_are_those_of_one_device(name):
    (loss, expected), parts = on_one_device()[name], [found[name] for found in on_two_ranks()]
    assert [part[0] for part in parts] == pytest.approx([loss, loss], rel=1e-6)
    parity = compare(expected, joined({rank: part[1] for rank, part in enumerate(parts)}))
    assert parity.max_rel_error < 1e-5, str(parity)


def test_evaluation_gives_every_rank_the_loss_and_leaves_the_gradients():
    expected = on_one_device()["short batch"][0]
    for found in on_two_ranks():
        assert found["evaluate"] == pytest.approx(expected, rel=1e-6)
        assert found["untouched"] == 0


def test_outputs_come_without_the_padding_from_the_last_rank():
    first, last = (found["outputs"] for found in on_two_ranks())
    inputs, _ = batch()
    assert first is None
    torch.testing.assert_close(last, Transformer(CONFIG)(inputs[:5]).detach())


def test_one_process_runs_a_pipeline_without_a_process_group():
    model, (inputs, targets) = Transformer(CONFIG), batch()
    loss = Pipeline(model, one_f_one_b(1, M)).step(inputs, targets)
    expected, reference = on_one_device()["whole batch"]
    assert loss == pytest.approx(expected, rel=1e-6)
    assert compare(reference, gradients(model)).max_rel_error < 1e-5


def test_padding_repeats_the_first_row_and_never_counts():
    inputs, targets = torch.arange(5).reshape(5, 1), torch.arange(10, 15).reshape(5, 1)
    assert [part.flatten().tolist() for part in split_inputs(inputs, 2, 4)] == [
        [0, 1],
        [2, 3],
        [4, 0],
        [0, 0],
    ]
    masks = [mask.flatten().tolist() for _, mask in split_targets(targets, None, 2, 4)]
    assert masks == [[True, True], [True, True], [True, False], [False, False]]


def test_a_microbatch_of_which_nothing_counts_adds_zero_and_no_nan():
    targets, nothing = torch.tensor([[1, 2]]), torch.zeros(1, 2, dtype=torch.bool)
    outputs = torch.full((1, 2), torch.inf, requires_grad=True)
    loss = BatchLoss(lambda o, t: o * t, [(targets, nothing)], divide_by=2)
    loss.of(0)(outputs).backward()
    assert loss.total.item() == 0 and outputs.grad.tolist() == [[0, 0]]


def test_losses_divide_by_what_counts_in_the_whole_batch_not_by_microbatch():
    parts = [
        (torch.tensor([1.0, 1.0]), None),
        (torch.tensor([4.0, 9.0]), torch.tensor([True, False])),
    ]
    loss = BatchLoss(lambda outputs, targets: targets, parts, divide_by=3)
    for i in range(2):
        loss.of(i)(torch.zeros(2))
    assert loss.total.item() == 2.0  # (1 + 1 + 4) / 3; the mean of the means would be 2.5


def test_a_mask_over_rows_spreads_over_the_tokens():
    targets = torch.tensor([[1, 2], [IGNORED, 3]])
    assert valid_targets(targets, torch.tensor([False, True])).tolist() == [
        [False, False],
        [False, True],
    ]
    with pytest.raises(ValueError, match=r"valid has shape \(3,\) and targets \(2, 2\)"):
        valid_targets(targets, torch.ones(3, dtype=torch.bool))


def test_a_loss_function_that_returns_a_mean_is_refused():
    with pytest.raises(ValueError, match="one loss per target"):
        check_per_target(torch.tensor(1.0), torch.tensor([1, 2]))


FULL = ((8, 4), "torch.int64")


def given(inputs=FULL, targets=FULL, has_valid=True, fault=None, needs_targets=True):
    return Given(inputs, targets, needs_targets, has_valid, fault)


def rows(n):
    return ((n, 4), "torch.int64")


@pytest.mark.parametrize(
    "one, message",
    [
        (given(inputs=None), "rank 0 holds the first stage and got no inputs"),
        (given(targets=None), "rank 0 holds the last stage and got no targets"),
        (given(targets=rows(6)), "have 8 rows and targets on rank 0 have 6"),
        (given(has_valid=False), "none of the targets .* is valid"),
        (given(rows(10), rows(10)), "10 rows must divide into num_microbatches=4; try 8 or 12"),
        (given(rows(3), rows(3)), "3 rows must divide into num_microbatches=4; try 4 rows"),
        (given(rows(0), rows(0)), "no rows"),
        (given(fault="scaler is wrong"), "rank 0: scaler is wrong"),
    ],
)
def test_a_batch_that_breaks_the_rule_is_refused_with_figures(one, message):
    with pytest.raises(ValueError, match=message):
        BatchRule(num_microbatches=4, first_rank=0, last_rank=0).check([one])


def test_only_a_batch_smaller_than_those_before_is_padded():
    after_eight = BatchRule(num_microbatches=4, first_rank=0, last_rank=0, full_rows=8)
    assert after_eight.check([given(rows(5), rows(5))]) == 2
    assert after_eight.check([given(rows(4), rows(4))]) == 1
    with pytest.raises(ValueError, match="must divide"):
        after_eight.check([given(rows(9), rows(9))])


def test_padding_is_refused_where_a_layer_would_count_it():
    rule = BatchRule(4, 0, 0, full_rows=8, batch_dependent=("1 (BatchNorm1d, stage 0)",))
    with pytest.raises(ValueError, match="BatchNorm1d.* would count the padding"):
        rule.check([given(rows(5), rows(5))])


def test_ranks_that_call_different_methods_are_told():
    with pytest.raises(ValueError, match="call the same method"):
        BatchRule(4, 0, 1).check([given(), given(needs_targets=False)])


def test_a_divisor_below_one_is_a_fault():
    assert "divide_by=0" in Batch(None, torch.tensor([1]), divide_by=0).given().fault

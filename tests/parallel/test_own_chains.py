"""What is proposed for random chains of your own runs, and trains like one device."""

from __future__ import annotations

import random

import pytest
import torch
from spawned import run_ranks
from torch import nn

from labkit.devices.machines import machine
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.own_model import own_model
from labkit.parallel.planning.own_parity import differences, run_alone, run_choice
from labkit.parallel.planning.planner import plan
from labkit.parallel.planning.predictor import check_choice
from labkit.parallel.sharding.layouts import Layout

WIDTH, ROWS = 8, 8


def squared_error(outputs, targets):
    """One loss per target."""
    return (outputs - targets).square()


def frozen():
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


KINDS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "gelu": nn.GELU,
    "same": nn.Identity,
    "frozen": frozen,
}


def chain_of(kinds):
    torch.manual_seed(0)
    model = nn.Sequential(*(KINDS[kind]() for kind in kinds))
    draw = torch.Generator().manual_seed(1)
    batch = (torch.randn(ROWS, WIDTH, generator=draw) for _ in range(2))
    return own_model(model, *batch, squared_error)


def random_kinds(seed):
    """Chains of which a good part has nothing to train; the first two are known to be hard."""
    draw = random.Random(seed)
    yield "linear", "gelu", "linear", "gelu"
    yield "frozen", "linear", "gelu", "linear", "frozen"
    for _ in range(4):
        kinds = draw.choices(list(KINDS), k=draw.randint(2, 8))
        if {"linear", "norm"} & set(kinds):
            yield tuple(kinds)


def proposed(count):
    """(chain, choice): for each chain the best layout of each schedule."""
    cases = []
    for kinds in random_kinds(seed=0):
        found = plan(chain_of(kinds), machine("lab", count), batch=ROWS)
        choices = [p.choice for p in found.ranked if p.choice.layout.ranks == count]
        kind_of = {(c.schedule, c.layout.pipeline, c.layout.data): c for c in reversed(choices)}
        cases += [(kinds, choice) for choice in kind_of.values()]
    return cases


def _run(rank, cases):
    return [run_choice(chain_of(kinds), choice, torch.device("cpu")) for kinds, choice in cases]


@pytest.mark.parametrize("count", [2, 4])
def test_what_is_proposed_for_random_chains_trains_like_one_device(count):
    cases = proposed(count)
    assert {choice.schedule for _, choice in cases} >= {"1F1B", "zero bubble"}
    by_rank = run_ranks(_run, count, cases)
    for i, (kinds, choice) in enumerate(cases):
        runs = {rank: its[i] for rank, its in enumerate(by_rank)}
        off = differences(run_alone(chain_of(kinds)), runs)
        assert max(off.values()) < 1e-4, (kinds, choice, off)


def test_a_rank_with_nothing_to_train_is_a_reason():
    chain = chain_of(("linear", "gelu", "linear", "gelu"))
    interleaved = Choice(Layout(pipeline=2, microbatches=2), "interleaved")
    with pytest.raises(ValueError, match="rank 1 of the pipeline would hold 1, 3 and nothing to"):
        check_choice(chain, interleaved, ROWS)
    check_choice(chain, Choice(Layout(pipeline=2, microbatches=2)), ROWS)

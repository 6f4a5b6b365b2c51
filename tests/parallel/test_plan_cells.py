"""The cells that a plan prints run as they are: in a notebook's namespace, and on ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit.devices.machines import machine
from labkit.models.config import ModelConfig
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.levers import Levers
from labkit.parallel.planning.own_model import own_model
from labkit.parallel.planning.plan_view import _constructor
from labkit.parallel.planning.planner import plan
from labkit.parallel.sharding.layouts import Layout

CONFIG = ModelConfig(layers=4, width=32, heads=4, context=32)


def of_the_lab():
    ids = torch.randint(CONFIG.vocabulary, (8, CONFIG.context))
    return CONFIG, {"config": CONFIG, "inputs": ids, "targets": ids}


def of_your_own():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    chain = own_model(model, *torch.randn(2, 64, 256), nn.MSELoss(reduction="none"))
    return chain, {"chain": chain}


@pytest.mark.parametrize("given", [of_the_lab, of_your_own])
def test_the_cells_of_the_best_layout_run_and_print_a_loss(given, capsys):
    model, names = given()
    found = plan(model, machine("lab", 2), batch=8 if "config" in names else 64)
    here, on_ranks = found.cells
    magic, _, code = on_ranks.partition("\n")
    assert magic == "%%ranks"
    exec(here, names)
    with names["ranks"] as ranks:
        assert (
            names["choice"] == found.best.choice and ranks.count == found.best.choice.layout.ranks
        )
        ranks.run(code)
        losses = ranks.pull("loss")
    assert len(losses) == ranks.count and 0 < min(losses.values())
    assert f"{losses[0]}"[:6] in capsys.readouterr().out


def test_a_choice_is_written_as_the_call_that_makes_it():
    choice = Choice(Layout(pipeline=2, microbatches=2), "zero bubble", Levers(autocast=True))
    written = _constructor(choice)
    assert written.startswith("Choice(layout=Layout(pipeline=2, microbatches=2), schedule='zero")
    assert eval(written) == choice

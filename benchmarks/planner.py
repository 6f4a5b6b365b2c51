"""How true the planner is: predicted against run, on virtual GPUs and on this machine's cores.

Virtual: every layout that `plan` ranks for the tiny preset on 1, 2 and 4 devices is run and timed
by the virtual clock; step time and peak bytes are compared, and the first choice with the best.
Cores: operators' rates are learnt on a model of three layers, and CPU seconds of a step of the
whole preset predicted, one process. Wall-clock time of several ranks is left to `virtual_clock.py`.
"""

from __future__ import annotations

from functools import partial

import torch
from _on_ranks import on_ranks

from labkit.devices.inventory import virtual_devices
from labkit.measure.step_trace import read_traces
from labkit.measure.virtual.calibration import calibrate, with_measured_costs
from labkit.measure.virtual.operator_rates import learn_rates
from labkit.measure.virtual.virtual_step import record_step
from labkit.models.config import preset
from labkit.parallel.planning.back_test import back_test
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.layer_chains import LabChain
from labkit.parallel.planning.levers import Levers
from labkit.parallel.planning.plan_training import trace_choice, train_choice
from labkit.parallel.planning.planner import plan
from labkit.parallel.planning.predictor import predict_training
from labkit.parallel.sharding.layouts import Layout

CONFIG, BATCH = preset("tiny").model, 16
ONE = Choice(Layout(microbatches=1))
ON_CORES = [ONE, Choice(Layout(microbatches=1), levers=Levers(checkpointing=True))]


def main() -> None:
    for count in (1, 2, 4):
        show_virtual(count)
    show_cores()


def show_virtual(count: int) -> None:
    devices = virtual_devices("lab", count)
    found = plan(CONFIG, devices, batch=BATCH)
    choices = [p.choice for p in found.ranked if p.choice.layout.ranks == count]
    by_rank = on_ranks(count, traced, choices, devices)
    readings = {
        choice: read_traces({rank: traces[i] for rank, traces in enumerate(by_rank)}, devices)
        for i, choice in enumerate(choices)
    }
    tested = back_test(found, readings)
    for cells in tested.cells:
        print("  ".join(cells))
    print(
        f"{count} virtual: time within {tested.worst_time_error:.1%}, memory within "
        f"{tested.worst_memory_error:.1%}, first choice {tested.first_choice_loss:.1%} behind best"
    )


def show_cores() -> None:
    [(learnt, ran, here)] = on_ranks(1, recorded)
    rates = learn_rates(map(with_measured_costs, learnt))
    for choice, recording in zip(ON_CORES, ran, strict=True):
        predicted_s = predict_training(
            LabChain(CONFIG), choice, here, BATCH, cost=rates.cost
        ).step_time_s
        measured_s = recording.unrecorded.main_s
        print(
            f"cores, {choice}: predicted {predicted_s * 1e3:.1f} ms, measured "
            f"{measured_s * 1e3:.1f} ms of CPU time, {predicted_s / measured_s - 1:+.1%}"
        )


def traced(rank: int, choices: list[Choice], devices) -> list:
    ids = batch(BATCH)
    return [trace_choice(CONFIG, choice, ids, ids, devices=devices) for choice in choices]


def recorded(rank: int) -> tuple:
    learnt = [with_seconds(CONFIG.with_(layers=3), ONE, rows) for rows in (2, 4, 8, 16)]
    return learnt, [with_seconds(CONFIG, choice, BATCH) for choice in ON_CORES], calibrate()


def with_seconds(config, choice: Choice, rows: int):
    training = train_choice(config, choice, torch.device("cpu"))
    ids = batch(rows)
    held = [training.model, training.optimizer]
    return record_step(partial(training.step, ids, ids), hold=held, timed=5, warm_up=2)


def batch(rows: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(CONFIG.vocabulary, (rows, CONFIG.context), generator=draw)


if __name__ == "__main__":
    main()

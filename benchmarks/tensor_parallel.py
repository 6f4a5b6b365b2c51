"""Training tokens/s of the layouts of two CPU ranks over one process with one thread.

Run with `make bench` or `python benchmarks/tensor_parallel.py [rounds]`. All ways train the same
model on the same text in one pair of processes with one thread each. In every round each way makes
one step, in alternating order, each after a wait for a quiet machine; the median of the rounds'
ratios counts. On a loud machine look at the CPU time of both ranks, which waiting lengthens little.
What is looked for: whether layers by hand beat torch's plan of DTensors, for the
faster one is the default (`labkit.parallel.sharding.layouts.Layout.style`).
"""

from __future__ import annotations

import sys

import torch
from _on_ranks import on_ranks
from _training_turns import Step, Turns, take_turns

from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer, next_token_loss
from labkit.parallel.sharding.layout_training import LayoutTraining, adamw
from labkit.parallel.sharding.layouts import Layout

RANKS, ROWS = 2, 16
CONFIG = ModelConfig(layers=8, width=256, heads=4, context=128)
LONGEST_WAIT_S = 1.0
YARDSTICK = "one process, one thread"
LAYOUTS = {
    "tensor parallel, by hand": Layout(tensor=2),
    "tensor parallel, torch's plan": Layout(tensor=2, tensor_style="dtensor"),
    "tensor and sequence, torch's plan": Layout(tensor=2, sequence=True),
    "FSDP2": Layout(data=2),
    "whole copies": Layout(data=2, data_style="copies"),
    "pipeline, 1F1B, m=8": Layout(pipeline=2, microbatches=8),
}


def main(rounds: int = 15) -> None:
    print(f"{CONFIG.num_parameters:,} parameters, {ROWS} rows of {CONFIG.context} tokens")
    on_ranks(RANKS, run_rank, rounds)[0].show(YARDSTICK, ROWS * CONFIG.context)


def run_rank(rank: int, rounds: int) -> Turns:
    ways = {YARDSTICK: one_process()} if rank == 0 else {}
    for name, layout in LAYOUTS.items():
        ways[name] = LayoutTraining(CONFIG, layout, layout.mesh("cpu"), torch.device("cpu")).step
    size = dict(rows=ROWS, tokens=CONFIG.context)
    return take_turns(ways, rounds, **size, longest_wait_s=LONGEST_WAIT_S)


def one_process() -> Step:
    model = Transformer(CONFIG)
    optimizer = adamw(model.parameters())

    def step(ids: torch.Tensor, targets: torch.Tensor) -> float:
        loss = next_token_loss(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

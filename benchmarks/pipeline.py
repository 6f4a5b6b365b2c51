"""Training tokens/s of our pipeline over torch's own and others, on two CPU ranks.

Run with `make bench` or `python benchmarks/pipeline.py [rounds]`. All ways train the same model on
the same text in one pair of processes with one thread each. In every round each way makes one step,
in alternating order, each after a wait for a quiet machine; the median of the rounds' ratios
counts. The processor time of both ranks stands beside, which other programs disturb less.

torchgpipe and Accelerate are compared where they are installed; they run in one process, with two
parts of the model on the one CPU.
"""

from __future__ import annotations

import sys

import torch
from _on_ranks import on_ranks
from _training_turns import Step, Turns, take_turns
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer, next_token_loss
from labkit.parallel.pipelining.pipeline import Pipeline
from labkit.parallel.pipelining.stages import cut, even_block_ranges, layer_names
from labkit.parallel.pipelining.torch_runtime import torch_runtime
from labkit.parallel.scheduling.schedules import one_f_one_b

RANKS, M, ROWS = 2, 8, 16
CONFIG = ModelConfig(layers=8, width=256, heads=4, context=128)
RATE = 3e-4
LONGEST_WAIT_S = 3.0
YARDSTICK = "torch Schedule1F1B"


def main(rounds: int = 9) -> None:
    print(f"{CONFIG.num_parameters:,} parameters, {ROWS} rows of {CONFIG.context} tokens, m={M}")
    on_ranks(RANKS, run_rank, rounds)[0].show(YARDSTICK, ROWS * CONFIG.context)


def run_rank(rank: int, rounds: int) -> Turns:
    size = dict(rows=ROWS, tokens=CONFIG.context)
    return take_turns(make_ways(rank), rounds, **size, longest_wait_s=LONGEST_WAIT_S)


def make_ways(rank: int) -> dict[str, Step]:
    """By name, what each rank does for one training step; ways of one process run on rank 0."""
    ways = {
        YARDSTICK: torch_schedule(rank),
        "our Pipeline, 1F1B": our_pipeline(rank),
        "torch's runtime, our 1F1B actions": torch_with_our_actions(rank),
    }
    alone = {
        "one process, one thread": lambda: one_process(threads=1),
        "one process, two threads": lambda: one_process(threads=2),
        "torchgpipe, without recomputing": torchgpipe,
        "hooks of Accelerate's dispatch": accelerate_hooks,
    }
    for name, make in alone.items():
        try:
            ways |= {name: make()} if rank == 0 else {}
        except ImportError as error:
            print(f"  {name}: not compared, {error}")
    return ways


def own_stage(rank: int) -> nn.Module:
    return cut(CONFIG, even_block_ranges(CONFIG, RANKS), held=[rank])[rank]


def stepping(model: nn.Module, backward: Step) -> Step:
    """`backward`, then an AdamW step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> object:
        loss = backward(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def our_pipeline(rank: int) -> Step:
    stage = own_stage(rank)
    return stepping(stage, Pipeline(stage, one_f_one_b(RANKS, M)).step)


def torch_schedule(rank: int) -> Step:
    stage = own_stage(rank)
    built = PipelineStage(stage, rank, RANKS, torch.device("cpu"))
    return stepping(stage, by_rank(Schedule1F1B(built, M, loss_fn=next_token_loss), rank))


def torch_with_our_actions(rank: int) -> Step:
    stage = own_stage(rank)
    schedule, count = one_f_one_b(RANKS, M), ROWS * CONFIG.context
    runtime = torch_runtime({rank: stage}, schedule, num_targets=count, device=torch.device("cpu"))
    return stepping(stage, by_rank(runtime, rank))


def by_rank(schedule, rank: int) -> Step:
    """Torch's step, with the loss read where it is known, as a training loop does."""

    def first(inputs, targets):
        schedule.step(inputs, return_outputs=False)

    def last(inputs, targets):
        losses = []
        schedule.step(target=targets, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().item()

    return first if rank == 0 else last


def one_process(threads: int) -> Step:
    model = Transformer(CONFIG)

    def backward(inputs, targets):
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        return loss.item()

    step = stepping(model, backward)

    def with_threads(inputs, targets):
        torch.set_num_threads(threads)
        loss = step(inputs, targets)
        torch.set_num_threads(1)
        return loss

    return with_threads


def torchgpipe() -> Step:
    from torchgpipe import GPipe

    model = Transformer(CONFIG)
    chain = nn.Sequential(model.embed, *model.layers.values(), model.head)
    balance = [len(held) for held in even_block_ranges(CONFIG, RANKS)]
    pipe = GPipe(chain, balance, devices=["cpu"] * RANKS, chunks=M, checkpoint="never")

    def backward(inputs, targets):
        loss = next_token_loss(pipe(inputs), targets)
        loss.backward()
        return loss.item()

    return stepping(pipe, backward)


def accelerate_hooks() -> Step:
    from accelerate.hooks import attach_align_device_hook_on_blocks

    model = Transformer(CONFIG)
    # what dispatch_model attaches for two GPUs; with "cpu" in its map it would offload the weights
    parts = layer_names(CONFIG)
    attach_align_device_hook_on_blocks(
        model, dict.fromkeys(parts, torch.device("cpu")), offload=dict.fromkeys(parts, False)
    )

    def backward(inputs, targets):
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        return loss.item()

    return stepping(model, backward)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))

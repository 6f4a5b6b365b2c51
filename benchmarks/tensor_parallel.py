"""Training tokens/s of the layouts of two CPU ranks over one process with one thread.

Run with `make bench` or `python benchmarks/tensor_parallel.py [rounds]`. All ways train the same
model on the same text in one pair of processes with one thread each. In every round each way makes
one step, in alternating order, each after a wait for a quiet machine; the median of the rounds'
ratios counts. On a loud machine look at the CPU time of rank 0's own thread, which waiting does not
lengthen. What is looked for: whether layers by hand beat torch's plan of DTensors, for the
faster one is the default (`labkit.parallel.sharding.layouts.Layout.style`).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _quiet import wait_for_quiet

from labkit.models.config import ModelConfig
from labkit.models.text import load_text
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
Step = Callable[[torch.Tensor, torch.Tensor], object]


def main(rounds: int = 15) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (folder, rounds), nprocs=RANKS)
        seconds, cpu, quiet = torch.load(Path(folder, "result"))
    print(
        f"{CONFIG.num_parameters:,} parameters, {ROWS} rows of {CONFIG.context} tokens; "
        f"{quiet} of {(rounds + 1) * len(seconds)} steps began on a quiet machine"
    )
    for way, own in seconds.items():
        ratios = [y / s for y, s in zip(seconds[YARDSTICK], own, strict=True)]
        rate = ROWS * CONFIG.context / median(own)
        print(
            f"  {way:34} {rate:8.0f} tokens/s   x {median(ratios):.2f} of {YARDSTICK} "
            f"({min(ratios):.2f} to {max(ratios):.2f}), CPU {1e3 * median(cpu[way]):.0f} ms"
        )


def run_rank(rank: int, folder: str, rounds: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    ways = {YARDSTICK: one_process() if rank == 0 else lambda ids, targets: None}
    for name, layout in LAYOUTS.items():
        ways[name] = LayoutTraining(CONFIG, layout, layout.mesh("cpu"), torch.device("cpu")).step
    found = time_ways(ways, rounds, rank)
    if rank == 0:
        torch.save(found, Path(folder, "result"))
    dist.barrier()
    dist.destroy_process_group()


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


def time_ways(
    ways: dict[str, Step], rounds: int, rank: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], int]:
    """Wall and own CPU seconds of each way's steps, the first round left out; quiet starts."""
    text = load_text()
    wall: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    quiet = 0
    for turn in range(rounds + 1):
        batch = text.batch(ROWS, CONFIG.context, turn)
        for way in list(ways) if turn % 2 else reversed(ways):
            if rank == 0:
                quiet += wait_for_quiet(LONGEST_WAIT_S)
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.thread_time()
            ways[way](*batch)
            cpu_s = time.thread_time() - start_cpu_s
            dist.barrier()
            if turn:
                wall[way].append(time.perf_counter() - start_s)
                cpu[way].append(cpu_s)
    return wall, cpu, quiet


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

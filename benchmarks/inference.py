"""Tokens/s of the lab's generation over transformers' ``generate`` on the same weights.

Two ranks with one thread each take turns; each round runs every way once, in alternating order, and
the median of the rounds' ratios counts, so that a machine busy with other things does not decide.
On one that is very busy it still does; so the ratio of CPU seconds stands beside it, of the rank
that needs most: what a quiet machine would show if no message ever had to be waited for.
Tensor parallelism runs twice: with threads that go where the system puts them, and with each rank
kept to a core of its own, as a device is one. For its many small messages that is what counts: else
the threads that pass one on wake on a core that sleeps.

Accelerate's dispatch is one process that goes through all devices; over two ranks it cannot run,
and two devices in one process are not here. So its hooks run with every module on one CPU: what
they cost, not what a second device gains. Its placement, ``device_map="auto"``, is compared with
ours on models of four families, each split both ways over the two ranks, two groups in flight.

Fails below the limits. Needs the extra: pip install '.[pretrained]'.

    python benchmarks/inference.py [rounds]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from _on_ranks import on_ranks

from labkit.models.huggingface import FAMILIES, huggingface_decoder, random_model
from labkit.parallel.generation.device_map import place_twice
from labkit.parallel.generation.generate import generate
from labkit.parallel.generation.rank_runners import LayersOnRanks, TensorOnRanks
from labkit.parallel.generation.runners import OneDevice, even_layers
from labkit.parallel.peers import Peers

RANKS = 2
PROMPT, NEW = 64, 48
SIZES = dict(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=512,
)
PLACED = dict(layers=8, width=256, heads=4, kv_heads=4, hidden=688, vocabulary=8192, context=128)
LIMITS = {  # by batch: way -> least ratio to transformers' generate
    8: {"one device": 1.0, "pipelined, 2 groups": 1.3, "tensor parallel, own cores": 1.0},
    32: {"one device": 1.0, "pipelined, 2 groups": 1.5, "tensor parallel, own cores": 1.35},
}


class Row(NamedTuple):
    """A way's rate, and its speed over the first way's."""

    what: str
    way: str
    rate: float
    ratio: float
    by_cpu: float
    limit: float | None

    def __str__(self) -> str:
        wanted = f"at least {self.limit}" if self.limit else ""
        ratios = f"x {self.ratio:.2f} (by CPU {self.by_cpu:.2f})"
        return f"{self.what:24} {self.way:27} {self.rate:7.1f} tokens/s  {ratios}  {wanted}"


def main(rounds: int = 7) -> None:
    rows = on_ranks(RANKS, run_rank, rounds)[0]
    print("Accelerate's dispatch: its hooks alone, with every module on one CPU and one core")
    print(*rows, sep="\n")
    missed = [row for row in rows if row.limit and row.ratio < row.limit]
    if missed:
        said = (f"{row.way}, {row.what}: {row.ratio:.2f} < {row.limit}" for row in missed)
        raise SystemExit("below the limit: " + "; ".join(said))


def run_rank(rank: int, rounds: int) -> list[Row]:
    rows, ways = [], make_ways(rank)
    for batch, limits in LIMITS.items():
        seconds = time_ways(ways, random_ids(batch), rounds, rank)
        rows += rows_of(f"batch {batch}", seconds, batch, limits)
    del ways
    for family in FAMILIES:
        ways, slower = placed_ways(family, rank)
        seconds = time_ways(ways, random_ids(8), rounds, rank)
        del seconds["transformers' generate"]  # the reference is the other placement
        rows += rows_of(f"{family}, slowest / {slower:.2f}", seconds, 8, {"our placement": 1.0})
    return rows


@contextmanager
def own_core(rank: int) -> Iterator[None]:
    """Keep all threads of this process to one core; where the system cannot (macOS), nothing."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    keep_threads({cores[rank % len(cores)]})
    yield
    keep_threads(set(cores))


def keep_threads(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def random_ids(batch: int):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, SIZES["vocab_size"], (batch, PROMPT), generator=generator)


def new_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


def make_ways(rank: int) -> dict:
    """Name -> ids -> new tokens; the ways of one device run on rank 0 alone."""
    model = new_model()
    whole = OneDevice(huggingface_decoder(model))
    part = huggingface_decoder(model).part(even_layers(SIZES["num_hidden_layers"], RANKS)[rank])
    layers, shards = LayersOnRanks(part), TensorOnRanks(huggingface_decoder(new_model()))
    dispatched = dispatch(new_model())
    ways = {
        "transformers' generate": lambda ids: by_transformers(model, ids),
        "one device": lambda ids: generated(whole, ids),
        "Accelerate's hooks, 1 device": lambda ids: by_transformers(dispatched, ids),
    }
    ways = {name: way if rank == 0 else nothing for name, way in ways.items()}

    def tensor_on_own_cores(ids):
        with own_core(rank):
            return generated(shards, ids)

    return ways | {
        "layer split, 1 group": lambda ids: generated(layers, ids),
        "pipelined, 2 groups": lambda ids: generated(layers, ids, groups=2),
        "tensor parallel": lambda ids: generated(shards, ids),
        "tensor parallel, own cores": tensor_on_own_cores,
    }


def placed_ways(family: str, rank: int) -> tuple[dict, float]:
    """Both placements of a family's model; and the slowest device of the other over that of ours.

    The layers' times are measured, so what rank 0 finds counts for both.
    """
    placed = place_twice(random_model(family, **PLACED), RANKS, rows=4, columns=PROMPT + NEW)
    found = placed.slowest_ratio, {"device_map": placed.device_map, "ours": placed.ours.ranges}
    slower, splits = Peers().tell(found, source=0)
    theirs, ours = (LayersOnRanks(placed.decoder.part(split[rank])) for split in splits.values())
    whole = (lambda ids: by_transformers(placed.model, ids)) if rank == 0 else nothing
    return {
        "transformers' generate": whole,
        "device_map's placement": lambda ids: generated(theirs, ids, groups=2),
        "our placement": lambda ids: generated(ours, ids, groups=2),
    }, slower


def nothing(ids):
    return None


def by_transformers(model, ids):
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
    )
    return out[:, ids.shape[1] :].tolist()


def generated(runner, ids, groups: int = 1):
    result = generate(runner, ids.tolist(), new_tokens=NEW, groups=groups)
    return [list(tokens) for tokens in result.tokens]


def dispatch(model):
    """The model with Accelerate's hooks; all of it stays on the one CPU."""
    from accelerate import dispatch_model

    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    names += [f"model.layers.{i}" for i in range(SIZES["num_hidden_layers"])]
    return dispatch_model(model, dict.fromkeys(names, "cpu"), main_device="cpu", force_hooks=True)


def time_ways(ways: dict, ids, rounds: int, rank: int) -> dict[str, list[tuple[float, float]]]:
    """By way and round, wall seconds and the busiest rank's CPU seconds.

    A round before them only checks that the tokens are the same.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    expected = None
    for number in range(rounds + 1):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            tokens, wall_s, cpu_s = timed(ways[name], ids)
            if number:
                seconds[name].append((wall_s, cpu_s))
            elif rank == 0:
                expected = expected or tokens
                if tokens != expected:
                    raise SystemExit(f"{name} gives other tokens than transformers' generate")
    return seconds


def timed(way, ids) -> tuple[object, float, float]:
    dist.barrier()
    begun_s, cpu_begun_s = time.perf_counter(), time.process_time()
    tokens = way(ids)
    cpu_s = torch.tensor(time.process_time() - cpu_begun_s)
    dist.barrier()
    wall_s = time.perf_counter() - begun_s
    dist.all_reduce(cpu_s, dist.ReduceOp.MAX)
    return tokens, wall_s, cpu_s.item()


def rows_of(
    what: str,
    seconds: dict[str, list[tuple[float, float]]],
    batch: int,
    limits: Mapping[str, float],
) -> list[Row]:
    base, rows = next(iter(seconds.values())), []
    for name, own in seconds.items():
        wall, cpu = (
            round(median(b[i] / s[i] for b, s in zip(base, own, strict=True)), 2) for i in (0, 1)
        )
        rate = batch * NEW / median(wall_s for wall_s, _ in own)
        rows.append(Row(what, name, rate, wall, cpu, limits.get(name)))
    return rows


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

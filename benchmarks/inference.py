"""Tokens/s of the lab's generation over transformers' ``generate`` on the same weights.

Two ranks with one thread each take turns; each round runs every way once, in alternating order, and
the median of the rounds' ratios counts, so that a machine busy with other things does not decide.
On one that is very busy it still does; so the ratio of CPU seconds stands beside it, of the rank
that needs most: what a quiet machine would show if no message ever had to be waited for.
Accelerate's dispatch runs its hooks over two parts on one CPU: what it costs without a GPU.
Fails below the limits. Needs the extra: pip install '.[pretrained]'.

    python benchmarks/inference.py [rounds]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from labkit.models.huggingface import huggingface_decoder
from labkit.parallel.generation.generate import generate
from labkit.parallel.generation.rank_runners import LayersOnRanks, TensorOnRanks
from labkit.parallel.generation.runners import OneDevice, even_layers

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
LIMITS = {  # by batch: way -> least ratio to transformers' generate
    8: {"one device": 1.0, "pipelined, 2 groups": 1.3, "tensor parallel": 1.0},
    32: {"one device": 1.0, "pipelined, 2 groups": 1.5, "tensor parallel": 1.35},
}


def main(rounds: int = 7) -> None:
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (folder, rounds), nprocs=RANKS)
        lines = open(f"{folder}/results").read().splitlines()
    for line in lines:
        batch, way, rate, ratio, by_cpu = line.split("\t")
        limit = LIMITS[int(batch)].get(way)
        missed = limit is not None and float(ratio) < limit
        failures += [f"{way}, batch {batch}: {ratio} < {limit}"] if missed else []
        wanted = f"at least {limit}" if limit else ""
        rate = f"{float(rate):7.1f} tokens/s"
        print(f"batch {batch:>2}  {way:24} {rate}  x {ratio} (by CPU {by_cpu})  {wanted}")
    if failures:
        raise SystemExit("below the limit: " + "; ".join(failures))


def run_rank(rank: int, folder: str, rounds: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    ways = make_ways(rank)
    for batch in LIMITS:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(1, SIZES["vocab_size"], (batch, PROMPT), generator=generator)
        seconds = time_ways(ways, ids, rounds, rank)
        if rank == 0:
            write(folder, batch, seconds)
    dist.barrier()
    dist.destroy_process_group()


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
        "one device": lambda ids: ours(whole, ids),
        "Accelerate's dispatch": lambda ids: by_transformers(dispatched, ids),
    }
    ways = {name: way if rank == 0 else nothing for name, way in ways.items()}
    return ways | {
        "layer split, 1 group": lambda ids: ours(layers, ids),
        "pipelined, 2 groups": lambda ids: ours(layers, ids, groups=2),
        "tensor parallel": lambda ids: ours(shards, ids),
    }


def nothing(ids):
    return None


def by_transformers(model, ids):
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
    )
    return out[:, ids.shape[1] :].tolist()


def ours(runner, ids, groups: int = 1):
    result = generate(runner, ids.tolist(), new_tokens=NEW, groups=groups)
    return [list(tokens) for tokens in result.tokens]


def dispatch(model):
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


def write(folder: str, batch: int, seconds: dict[str, list[tuple[float, float]]]) -> None:
    base = seconds["transformers' generate"]
    with open(f"{folder}/results", "a") as file:
        for name, own in seconds.items():
            wall, cpu = (
                median(b[i] / s[i] for b, s in zip(base, own, strict=True)) for i in (0, 1)
            )
            rate = batch * NEW / median(wall_s for wall_s, _ in own)
            file.write(f"{batch}\t{name}\t{rate}\t{wall:.2f}\t{cpu:.2f}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

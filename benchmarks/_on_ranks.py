"""Runs a benchmark's function on ranks of this machine: one process, one thread each, and gloo."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
LIMIT = timedelta(seconds=120)  # of a collective: some benchmarks wait a minute for quiet


def on_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(rank, *args)`` returns on each of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (count, folder, function, args), nprocs=count)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(count)]


def _rank(rank: int, count: int, folder: str, function: Callable, args: tuple) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=LIMIT)
    Path(folder, str(rank)).write_bytes(pickle.dumps(function(rank, *args)))
    dist.barrier()
    dist.destroy_process_group()

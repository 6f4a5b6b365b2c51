"""Ways to train that take turns, so that what else the machine does meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from _quiet import wait_for_quiet

from labkit.models.text import load_text

Step = Callable[[torch.Tensor, torch.Tensor], object]  # (ids, targets) of a batch


class Turns(NamedTuple):
    """By way and round: seconds from one barrier to the next, CPU seconds of all ranks.

    ``quiet``: share of the steps that began on a quiet machine.
    """

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    quiet: float

    def show(self, yardstick: str, tokens: int) -> None:
        """A line a way; ratios are to the yardstick of the same round, medians of them count."""
        print(f"{self.quiet:.0%} of the steps began on a quiet machine")
        for way, own in self.seconds.items():
            ratios = [y / s for y, s in zip(self.seconds[yardstick], own, strict=True)]
            print(
                f"  {way:34} {tokens / median(own):7.0f} tokens/s  x {median(ratios):.2f} of "
                f"{yardstick} ({min(ratios):.2f} to {max(ratios):.2f}), "
                f"{median(self.cpu_seconds[way]):.3f} s of CPU"
            )


def take_turns(
    ways: Mapping[str, Step], rounds: int, *, rows: int, tokens: int, longest_wait_s: float
) -> Turns:
    """One step of each way in every round, in alternating order; call it on all ranks.

    The first round warms up and is left out. A way that only one rank knows runs on that one.

    Args:
        longest_wait_s: before each step, for a quiet machine.
    """
    names, text = _of_first_rank(list(ways)), load_text()
    found = Turns({name: [] for name in names}, {name: [] for name in names}, 0.0)
    quiet = []
    for turn in range(rounds + 1):
        batch = text.batch(rows, tokens, step=turn)
        for name in names if turn % 2 else reversed(names):
            quiet.append(dist.get_rank() > 0 or wait_for_quiet(longest_wait_s))
            seconds, cpu_s = _timed(ways.get(name, _nothing), batch)
            if turn:
                found.seconds[name].append(seconds)
                found.cpu_seconds[name].append(cpu_s)
    return found._replace(quiet=sum(quiet) / len(quiet))


def _timed(step: Step, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    dist.barrier()
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    step(*batch)
    dist.barrier()
    spent = torch.tensor([time.process_time() - cpu_began_s])
    seconds = time.perf_counter() - began_s
    dist.all_reduce(spent)
    return seconds, spent.item()


def _of_first_rank(names: list[str]) -> list[str]:
    """Only the first rank has tried to import what others wrote."""
    box = [names]
    dist.broadcast_object_list(box)
    return box[0]


def _nothing(ids: torch.Tensor, targets: torch.Tensor) -> None:
    """What the other ranks do while one process works alone."""

"""What an optimizer keeps, needs for a moment, and takes, by the number of elements of a parameter.

An element-wise optimizer's operators move so many bytes for each element. Two parameters of
different sizes tell how many, and the line through them holds for any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.optim import Optimizer

from labkit.devices.profiles import Profile
from labkit.measure.memory import held_bytes
from labkit.measure.virtual.recorder import Recorder
from labkit.measure.virtual.recording import Event
from labkit.measure.virtual.virtual_program import OperatorCost

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
_SMALL, _LARGE = 1 << 10, 1 << 11  # elements; large enough that every operator's bytes grow


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class OptimizerProfile:
    """An optimizer's step for a parameter, at two sizes.

    Attributes:
        state_bytes: (at the small size, per further element).
        temporary_bytes: likewise.
        small, large: the operators of a step at each size.
    """

    state_bytes: tuple[int, float]
    temporary_bytes: tuple[int, float]
    small: tuple[Event, ...]
    large: tuple[Event, ...]

    def state_of(self, sizes: Iterable[int]) -> int:
        """Bytes kept for parameters of so many elements each."""
        return sum(round(_at(self.state_bytes, size)) for size in sizes)

    def temporary_of(self, sizes: Iterable[int]) -> int:
        """Most bytes alive for a moment in a step, beside what is kept."""
        return max((round(_at(self.temporary_bytes, size)) for size in sizes), default=0)

    def step_s(self, sizes: Iterable[int], profile: Profile, cost: OperatorCost) -> float:
        """Seconds of a step on a device."""
        counted: dict[int, int] = {}
        for size in sizes:
            counted[size] = counted.get(size, 0) + 1
        return sum(n * self._one_s(size, profile, cost) for size, n in counted.items())

    def _one_s(self, size: int, profile: Profile, cost: OperatorCost) -> float:
        seconds = 0.0
        for small, large in zip(self.small, self.large, strict=True):
            line = small.num_bytes, (large.num_bytes - small.num_bytes) / (_LARGE - _SMALL)
            event = small._replace(num_bytes=max(0, round(_at(line, size))))
            seconds += cost(event, profile)
        return seconds


def _at(line: tuple[float, float], size: int) -> float:
    return line[0] + line[1] * (size - _SMALL)


@cache
def rehearse_optimizer(make: MakeOptimizer = adamw) -> OptimizerProfile:
    """Take two real steps of two small parameters, and look at the second ones."""
    found = [_step_of(make, size) for size in (_SMALL, _LARGE)]
    state, temporary = (
        (small, (large - small) / (_LARGE - _SMALL))
        for small, large in zip(found[0][:2], found[1][:2], strict=True)
    )
    return OptimizerProfile(state, temporary, found[0][2], found[1][2])


def _step_of(make: MakeOptimizer, size: int) -> tuple[int, int, tuple[Event, ...]]:
    parameter = nn.Parameter(torch.ones(size))
    holder = nn.ParameterList([parameter])
    optimizer = make([parameter])
    parameter.grad = torch.ones(size)
    optimizer.step()
    recorder = Recorder(rank=0)
    recorder.hold(holder, optimizer)
    before = recorder.storages.bytes
    with recorder:
        optimizer.step()
    recording = recorder.take()
    return held_bytes(holder, optimizer).optimizer, recording.peak_bytes - before, recording.events

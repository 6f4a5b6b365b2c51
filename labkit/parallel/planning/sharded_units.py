"""What FSDP2 runs to gather a unit's weights and to scatter its gradients, found by a rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from labkit.measure.virtual.recorder import Recorder
from labkit.measure.virtual.recording import Event
from labkit.parallel.planning.layer_chains import Division, LayerChain
from labkit.parallel.planning.levers import PLAIN
from labkit.parallel.planning.pretended_ranks import pretended_mesh


@dataclass(frozen=True)
class UnitTraffic:
    """One unit's events: copies into and out of flat buffers, and collectives.

    Attributes:
        gather: of its weights; what is not on the communication stream comes when they are used.
        first_scatter: of gradients where there were none.
        scatter: of gradients that are added to those there.
    """

    gather: tuple[Event, ...]
    first_scatter: tuple[Event, ...]
    scatter: tuple[Event, ...]


def rehearse_unit(
    chain: LayerChain, layers: Sequence[int], division: Division, data: int
) -> UnitTraffic:
    """Rehearse a unit of so many layers over ``data`` pretended ranks."""
    with pretended_mesh(data, division.tensor) as mesh:
        mode = FakeTensorMode()
        shared = mesh["tensor"] if division.tensor > 1 else None
        divided = [chain.divided_layer(i, division, shared, PLAIN, mode) for i in layers]
        unit = _AllWeights(divided)
        fully_shard(unit, mesh=mesh["data"], reshard_after_forward=False)
        recorder = Recorder(rank=0)
        recorder.hold(unit)
        with mode:
            gather, first_scatter = _forward_and_backward(unit, recorder)
            _, scatter = _forward_and_backward(unit, recorder)
    return UnitTraffic(gather, first_scatter, scatter)


class _AllWeights(nn.Module):
    """Uses every weight once, since a unit is gathered for what uses it."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return sum((_local(weight).sum() for weight in self.parameters()), x)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _forward_and_backward(unit: nn.Module, recorder: Recorder) -> tuple[tuple[Event, ...], ...]:
    with recorder:
        y = unit(torch.zeros(()))
    gather = recorder.take().events
    with recorder:
        y.backward()
    return _of_fsdp(gather), _of_fsdp(recorder.take().events)


def _of_fsdp(events: Sequence[Event]) -> tuple[Event, ...]:
    return tuple(e for e in events if e.stream == "communication" or e.name.startswith("fsdp::"))

"""What the ranks of a pipeline compare before its first step."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from labkit.parallel.peers import Peers
from labkit.parallel.pipelining.tied import Names
from labkit.parallel.scheduling.schedules import Schedule


def stages_of(
    given: Mapping[int, nn.Module] | nn.Module, schedule: Schedule, rank: int
) -> dict[int, nn.Module]:
    """The stages of `rank` by number; a single module is its only stage."""
    if not isinstance(given, nn.Module):
        return dict(given)
    held = schedule.stages_of_rank(rank) if rank < schedule.num_ranks else ()
    return {held[0]: given} if len(held) == 1 else {-1: given}


def device_of(stages: Mapping[int, nn.Module]) -> torch.device:
    """Where the first parameter is; the CPU without any."""
    parameters = (p.device for module in stages.values() for p in module.parameters())
    return next(parameters, torch.device("cpu"))


def agree_on_setup(
    stages: Mapping[int, nn.Module], schedule: Schedule, tied: Sequence[Names], peers: Peers
) -> tuple[Names, ...]:
    """Check that all ranks fit together; returns the tied groups of the whole model.

    Raises:
        ValueError: (on every rank) stages, schedules or devices do not fit.
    """
    own_tied = {tuple(names) for names in tied}
    for module in stages.values():
        own_tied |= set(getattr(module, "tied", ()))
    told = (_fault(stages, schedule, peers), zlib.crc32(repr(schedule).encode()), own_tied)
    faults, plans, groups = zip(*peers.gather(told), strict=True)
    for rank, fault in enumerate(faults):
        if fault is not None:
            raise ValueError(f"rank {rank}: {fault}")
    if len(set(plans)) > 1:
        raise ValueError(
            f"the ranks were given different schedules (on rank {peers.rank}: {schedule.name}, "
            f"m={schedule.num_microbatches}); build the same one on every rank"
        )
    return tuple(sorted(set().union(*groups)))


def _fault(stages: Mapping[int, nn.Module], schedule: Schedule, peers: Peers) -> str | None:
    if schedule.num_ranks != peers.size:
        return (
            f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks and the group has "
            f"{peers.size}; build it for {peers.size}"
        )
    due = schedule.stages_of_rank(peers.rank)
    if tuple(sorted(stages)) != due:
        held = "a single module" if -1 in stages else f"stages {sorted(stages)}"
        return f"was given {held}, and the schedule gives it stages {list(due)}; cut those"
    for stage, module in stages.items():
        wrapped = _wrapper_fault(stage, module, schedule)
        if wrapped is not None:
            return wrapped
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.device != peers.device:
                return (
                    f"{name} of stage {stage} is on {tensor.device} and the rank computes on "
                    f"{peers.device}; move the stage there first"
                )
    return None


def _wrapper_fault(stage: int, module: nn.Module, schedule: Schedule) -> str | None:
    """Data-parallel wrappers whose hooks a pipeline's backwards would upset."""
    if isinstance(module, DistributedDataParallel):
        return (
            f"stage {stage} is wrapped in DDP, whose reducer expects one backward a step; pass its "
            "module, and add up the gradients after the step: data_parallel.sum_gradients"
        )
    splits = any(action.kind == "W" for action in schedule)
    if splits and any(isinstance(layer, FSDPModule) for layer in module.modules()):
        return (
            f"stage {stage} is sharded by FSDP2, whose hooks lose gradients when schedule "
            f"{schedule.name!r} takes the backward apart; use 1F1B or GPipe, or whole copies"
        )
    return None

"""Agrees among the ranks on what a batch will be cut into, once for each shape of batch."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from labkit.parallel.peers import Peers
from labkit.parallel.pipelining.losses import LossFunction, check_per_target, total_dtype
from labkit.parallel.pipelining.microbatches import Batch, BatchRule, Given
from labkit.parallel.pipelining.shape_probe import Form, probe
from labkit.parallel.scheduling.messages import Message
from labkit.parallel.scheduling.schedules import Schedule


class BatchPlan(NamedTuple):
    """What the ranks agreed on for batches of one shape."""

    rows: int
    rows_each: int
    forms: tuple[Form, ...]  # what each stage returns
    device: torch.device

    def buffer(self, message: Message) -> Tensor:
        """An empty tensor of the message's shape; a gradient has that of its stage's input."""
        if message.kind == "loss":
            dtype = total_dtype(self.forms[-1].dtype)
            return torch.empty((), dtype=dtype, device=self.device)
        form = self.forms[message.stage - (message.kind == "B")]
        return torch.empty(form.shape, dtype=form.dtype, device=self.device)


class Planner:
    """Makes and remembers the plans. Every step costs one gather of 8 bytes per rank.

    Args:
        batch_dependent: names of layers, of all ranks, that mix the rows of a batch.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        peers: Peers,
        batch_dependent: tuple[str, ...],
    ) -> None:
        self._stages, self._schedule, self._peers = stages, schedule, peers
        self._batch_dependent = batch_dependent
        self._full_rows = 0
        self._known: dict[tuple[int, ...], BatchPlan] = {}

    def plan(self, batch: Batch, given: Given, loss_fn: LossFunction) -> tuple[BatchPlan, bool]:
        """The plan for this batch, and whether it is new.

        Raises:
            ValueError: (on every rank, before any data moves) the batch or a stage does not fit.
        """
        key = self._peers.gather_number(zlib.crc32(repr(given).encode()))
        if key in self._known:
            return self._known[key], False
        everywhere = self._peers.gather(given)
        m, ranks = self._schedule.num_microbatches, self._schedule.rank_of_stage
        rule = BatchRule(m, ranks[0], ranks[-1], self._full_rows, self._batch_dependent)
        rows_each = rule.check(everywhere)
        forms = self._probe(batch, rows_each, loss_fn)
        rows = everywhere[ranks[0]].inputs[0][0]
        self._full_rows = max(self._full_rows, rows)
        self._known[key] = BatchPlan(rows, rows_each, forms, self._peers.device)
        return self._known[key], True

    def _probe(self, batch: Batch, rows_each: int, loss_fn: LossFunction) -> tuple[Form, ...]:
        m, device = self._schedule.num_microbatches, self._peers.device
        first = check = None
        if 0 in self._stages:
            first = batch.inputs_on(device, rows_each, m)[0]
        if self._schedule.num_stages - 1 in self._stages and batch.needs_targets:
            targets = batch.targets_on(device, rows_each, m)[0][0]

            def check(outputs: Tensor) -> None:
                check_per_target(loss_fn(outputs, targets), targets)

        return probe(self._stages, first, check, self._schedule.rank_of_stage, self._peers)

"""A batch cut into microbatches: checked before anything moves, a short last one padded and masked.

Each rank describes what it was given; the descriptions of all ranks are checked together, so that
every rank raises the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from labkit.parallel.pipelining.losses import count_valid, valid_targets

ShapeAndType = tuple[tuple[int, ...], str]


class Given(NamedTuple):
    """What one rank was given for a step, in words that can be told to the others.

    Attributes:
        inputs, targets: shape and dtype; None where it got none.
        needs_targets: a loss is wanted, not outputs alone.
        has_valid: whether any target counts.
        fault: what is wrong with it by itself.
    """

    inputs: ShapeAndType | None
    targets: ShapeAndType | None
    needs_targets: bool
    has_valid: bool
    fault: str | None


@dataclass(frozen=True)
class Batch:
    """What one rank was given: see `Pipeline.step` for its parts."""

    inputs: Tensor | None
    targets: Tensor | None = None
    valid: Tensor | None = None
    divide_by: int | None = None
    needs_targets: bool = True

    def given(self, further_fault: str | None = None) -> Given:
        """Its description."""
        fault, has_valid = further_fault, True
        try:
            has_valid = self.targets is None or self.num_valid > 0
        except ValueError as error:
            fault = str(error)
        if self.divide_by is not None and self.divide_by < 1:
            fault = f"divide_by={self.divide_by} must be at least 1: the number of valid targets"
        forms = (shape_and_type(self.inputs), shape_and_type(self.targets))
        return Given(*forms, self.needs_targets, has_valid, fault)

    @cached_property
    def num_valid(self) -> int:
        return count_valid(self.targets, self.valid)

    def inputs_on(self, device: torch.device, rows_each: int, m: int) -> tuple[Tensor, ...]:
        """The inputs of each of `m` microbatches."""
        return split_inputs(self.inputs.to(device), rows_each, m)

    def targets_on(
        self, device: torch.device, rows_each: int, m: int
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Of each microbatch the targets, and which of them count."""
        parts = split_targets(self.targets, self.valid, rows_each, m)
        return [(t.to(device), None if v is None else v.to(device)) for t, v in parts]

    @property
    def divisor(self) -> int:
        """What the sum of losses is divided by."""
        return self.divide_by or self.num_valid


def shape_and_type(tensor: Tensor | None) -> ShapeAndType | None:
    return None if tensor is None else (tuple(tensor.shape), str(tensor.dtype))


@dataclass(frozen=True)
class BatchRule:
    """What a batch has to obey.

    Attributes:
        num_microbatches: m.
        first_rank, last_rank: who needs the inputs, and who the targets.
        full_rows: rows of the largest batch so far; only a smaller one may be padded.
        batch_dependent: names of layers that mix the rows of a batch.
    """

    num_microbatches: int
    first_rank: int
    last_rank: int
    full_rows: int = 0
    batch_dependent: tuple[str, ...] = ()

    def check(self, given: Sequence[Given]) -> int:
        """The number of rows in a microbatch, from what all ranks were given.

        Raises:
            ValueError: the batch breaks the rule; the message has the figures and what would do.
        """
        for rank, one in enumerate(given):
            if one.fault is not None:
                raise ValueError(f"rank {rank}: {one.fault}")
        if len({one.needs_targets for one in given}) > 1:
            raise ValueError("some ranks train and others only want outputs; call the same method")
        if given[self.first_rank].inputs is None:
            raise ValueError(
                f"rank {self.first_rank} holds the first stage and got no inputs; pass them there"
            )
        rows = _rows(given[self.first_rank].inputs)
        if given[self.last_rank].needs_targets:
            self._check_targets(rows, given[self.last_rank])
        return self._rows_per_microbatch(rows)

    def _check_targets(self, rows: int, given: Given) -> None:
        if given.targets is None:
            raise ValueError(
                f"rank {self.last_rank} holds the last stage and got no targets; pass them there"
            )
        if _rows(given.targets) != rows:
            raise ValueError(
                f"inputs on rank {self.first_rank} have {rows} rows and targets on rank "
                f"{self.last_rank} have {_rows(given.targets)}; pass the same batch on both"
            )
        if not given.has_valid:
            raise ValueError(
                f"none of the targets of this batch of {rows} rows is valid, so its loss is 0/0; "
                "leave the batch out"
            )

    def _rows_per_microbatch(self, rows: int) -> int:
        m = self.num_microbatches
        if rows == 0:
            raise ValueError("the batch has no rows; leave it out")
        if rows % m == 0:
            return rows // m
        lower = rows - rows % m
        if rows >= self.full_rows:
            raise ValueError(
                f"a batch of {rows} rows must divide into num_microbatches={m}; try "
                f"{f'{lower} or ' if lower else ''}{lower + m} rows (only a last batch, smaller "
                "than those before it, is padded)"
            )
        if self.batch_dependent:
            raise ValueError(
                f"a batch of {rows} rows needs padding to divide into num_microbatches={m}, and "
                f"{self.batch_dependent[0]} would count the padding; leave the last batch out"
            )
        return lower // m + 1


def _rows(form: ShapeAndType) -> int:
    return form[0][0] if form[0] else 0


def padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with its first row repeated at the end until there are `rows`.

    >>> padded(torch.tensor([[1], [2]]), rows=4).tolist()
    [[1], [2], [1], [1]]
    """
    lacking = rows - len(tensor)
    if lacking == 0:
        return tensor
    return torch.cat([tensor, tensor[:1].expand(lacking, *tensor.shape[1:])])


def split_inputs(inputs: Tensor, rows_each: int, num_microbatches: int) -> tuple[Tensor, ...]:
    """The microbatches of a batch, padded to equal size: m tensors (rows_each, ...)."""
    return padded(inputs, rows_each * num_microbatches).split(rows_each)


def split_targets(
    targets: Tensor, valid: Tensor | None, rows_each: int, num_microbatches: int
) -> list[tuple[Tensor, Tensor | None]]:
    """Per microbatch its targets and which of them count (None: all); padding never counts."""
    mask = valid_targets(targets, valid)
    total = rows_each * num_microbatches
    if total > len(targets):
        mask = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
        mask = torch.cat([mask, mask.new_zeros(total - len(targets), *mask.shape[1:])])
    parts = padded(targets, total).split(rows_each)
    masks = [None] * num_microbatches if mask is None else mask.split(rows_each)
    return list(zip(parts, masks, strict=True))

"""Keys and values of the tokens seen so far, and where the tokens of one step go among them.

A row of the cache belongs to one sequence, and column c of it to that sequence's token c, whatever
the other rows hold. A batch of unequal prompts is padded on the right: no real token attends to a
later pad, and the first generated token overwrites the first pad.

        column   0  1  2  3  4
        row 0    a  b  c  d  .      4 tokens: the next one goes to column 4
        row 1    e  f  .  .  .      2 tokens: the next one goes to column 2

Shapes: B sequences, T new tokens each, H key-value heads, S columns, K width of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """Where T new tokens of each of B sequences stand. Made by ``prefill`` and ``decode``.

    Attributes:
        positions_BT: of the new tokens; the cache's columns, too.
        start: column of every row's first new token; None where rows differ.
        columns: how many columns the attention reads, S.
        mask: (B, 1, T, S), True where attention may look; None where causality says it all.
        last_B: which of the T tokens is each row's last real one; None for T - 1 in all.
        rows_B: rows of the cache; None for 0 .. B - 1.
    """

    positions_BT: Tensor
    start: int | None
    columns: int
    mask: Tensor | None = None
    last_B: Tensor | None = None
    rows_B: Tensor | None = None

    def to(self, device: torch.device) -> Step:
        """The same step with its tensors on ``device``."""
        moved = {
            name: value.to(device) for name, value in vars(self).items() if torch.is_tensor(value)
        }
        return replace(self, **moved)


def prefill(
    lengths: Sequence[int], device: torch.device, rows: Sequence[int] | None = None
) -> Step:
    """The step that reads whole prompts of ``lengths`` tokens, padded on the right.

    Args:
        rows: of the cache, for prompts that join sequences already there.
    """
    tokens = max(lengths)
    positions_BT = torch.arange(tokens, device=device).expand(len(lengths), tokens)
    last_B = torch.tensor(lengths, device=device) - 1 if min(lengths) < tokens else None
    rows_B = None if rows is None else torch.tensor(rows, device=device)
    return Step(positions_BT, 0, tokens, None, last_B, rows_B)


def decode(lengths: Sequence[int], device: torch.device) -> Step:
    """The step that adds a token to each of the rows 0 .. B - 1, which hold ``lengths`` tokens."""
    positions_B1 = torch.tensor(lengths, device=device)[:, None]
    columns = max(lengths) + 1
    if min(lengths) + 1 == columns:
        return Step(positions_B1, lengths[0], columns)
    mask_B11S = torch.arange(columns, device=device) <= positions_B1[:, None, None]
    return Step(positions_B1, None, columns, mask_B11S)


class KVCache:
    """Keys and values of a part of a model, allocated once.

    Args:
        layers: numbers of the layers that the part holds.
        rows: sequences at once, >= 1.
        columns: most tokens of a sequence, prompt and continuation together, >= 1.
        heads: key-value heads that this device holds.
        head_width: K.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(
        self,
        layers: Iterable[int],
        *,
        rows: int,
        columns: int,
        heads: int,
        head_width: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(rows, columns, heads, head_width) < 1:
            raise ValueError(
                f"rows={rows}, columns={columns}, heads={heads} and head_width={head_width} "
                "must be at least 1"
            )
        shape = (rows, heads, columns, head_width)
        self.rows, self.columns = rows, columns
        # zeros: what was never written is masked, and a mask does not hide a NaN
        self.keys = {i: torch.zeros(shape, dtype=dtype, device=device) for i in layers}
        self.values = {i: torch.zeros(shape, dtype=dtype, device=device) for i in layers}

    @property
    def bytes(self) -> int:
        """What the cache holds on its device."""
        return sum(t.nbytes for part in (self.keys, self.values) for t in part.values())

    def update(self, layer: int, key: Tensor, value: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Write the new keys and values (B, H, T, K), and return all that attention reads.

        Returns:
            Keys and values (B, H, S, K): views of the cache, or the new ones where those are all.
        """
        for kept, new in ((self.keys[layer], key), (self.values[layer], value)):
            if step.start is None:
                everyone_B = torch.arange(len(new), device=new.device)
                kept[everyone_B, :, step.positions_BT[:, 0]] = new[:, :, 0]
            elif step.rows_B is None:
                kept[: len(new), :, step.start : step.columns] = new
            else:
                kept[step.rows_B, :, step.start : step.columns] = new
        if step.start == 0:
            return key, value
        return tuple(
            kept[: len(key), :, : step.columns] for kept in (self.keys[layer], self.values[layer])
        )


def kv_bytes(
    *, layers: int, rows: int, columns: int, heads: int, head_width: int, bytes_per_value: int = 4
) -> int:
    """Exact bytes of a ``KVCache``: a key and a value of each head, layer, row and column.

    >>> kv_bytes(layers=8, rows=2, columns=64, heads=4, head_width=32)
    1048576
    """
    return 2 * layers * rows * columns * heads * head_width * bytes_per_value

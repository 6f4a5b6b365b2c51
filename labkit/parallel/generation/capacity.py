"""How many sequences a device has room for, predicted from two small runs, and tried for real."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit.measure.virtual.recorder import Recorder
from labkit.models.decoder import Decoder
from labkit.models.kv_cache import decode, kv_bytes, prefill


@dataclass(frozen=True)
class BatchMemory:
    """Bytes on one device that generates for B sequences: fixed + B (cache + working).

    Attributes:
        weight_bytes: of the layers held here.
        fixed_bytes: the rest of what does not depend on B.
        cache_bytes: of one sequence, by the formula of ``kv_bytes``.
        working_bytes: activations of one sequence at the peak.
    """

    weight_bytes: int
    fixed_bytes: float
    cache_bytes: int
    working_bytes: float

    def largest_batch(self, memory_bytes: int) -> int:
        """Most sequences that fit; 0 when not even one does.

        >>> BatchMemory(100, 0.0, 20, 5.0).largest_batch(memory_bytes=180)
        3
        """
        left = memory_bytes - self.weight_bytes - self.fixed_bytes
        return max(0, int(left // (self.cache_bytes + self.working_bytes)))


def batch_memory(part: Decoder, *, prompt: int, columns: int, batch: int = 4) -> BatchMemory:
    """What a part of a model holds for prompts of ``prompt`` tokens that grow to ``columns``.

    The cache is computed; what the step works in is counted in two runs, with ``batch`` and twice
    as many sequences, and is linear in the batch.
    """
    few, many = (_peak_bytes(part, rows, prompt, columns, None) for rows in (batch, 2 * batch))
    cache = kv_bytes(
        layers=len(part.held),
        rows=1,
        columns=columns,
        heads=part.kv_heads,
        head_width=part.shape.head_width,
        bytes_per_value=part.dtype.itemsize,
    )
    per_row = (many - few) / batch
    fixed = few - part.parameter_bytes - batch * per_row
    return BatchMemory(part.parameter_bytes, fixed, cache, per_row - cache)


def out_of_memory(
    part: Decoder, rows: int, *, prompt: int, columns: int, memory_bytes: int | None = None
) -> str | None:
    """Try a batch: a prefill and the last decode step, on this part alone, without messages.

    Args:
        memory_bytes: of the virtual device; None for the real one's own.

    Returns:
        The out-of-memory error's words, or None when ``rows`` sequences fit.
    """
    try:
        _peak_bytes(part, rows, prompt, columns, memory_bytes)
    except torch.OutOfMemoryError as error:
        return str(error)
    return None


@torch.no_grad()
def _peak_bytes(
    part: Decoder, rows: int, prompt: int, columns: int, memory_bytes: int | None
) -> int:
    recorder = Recorder(capacity_bytes=memory_bytes)
    recorder.hold(part)
    with recorder:
        cache = part.new_cache(rows, columns)
        for tokens, step in (
            (prompt, prefill([prompt] * rows, part.device)),
            (1, decode([columns - 1] * rows, part.device)),
        ):
            # made in the call, so that nothing here keeps the input alive while layers run
            part(_inputs(part, rows, tokens), cache, step)
    return recorder.take().peak_bytes


def _inputs(part: Decoder, rows: int, tokens: int) -> torch.Tensor:
    """Ids or activations, as the part takes them."""
    if part.embed is not None:
        return torch.zeros(rows, tokens, dtype=torch.int64, device=part.device)
    size = (rows, tokens, part.shape.width)
    return torch.zeros(size, dtype=part.dtype, device=part.device)

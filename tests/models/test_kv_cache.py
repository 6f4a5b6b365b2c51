"""Where tokens go in a KV cache, for a batch of equal and of unequal lengths."""

from __future__ import annotations

import pytest
import torch

from labkit.models.kv_cache import KVCache, decode, kv_bytes, prefill

CPU = torch.device("cpu")


def small_cache(rows: int = 2) -> KVCache:
    return KVCache([3], rows=rows, columns=4, heads=1, head_width=1)


def numbers(*rows: list[float]) -> torch.Tensor:
    """Keys (B, 1, T, 1) with these values."""
    return torch.tensor(rows)[:, None, :, None]


def test_a_batch_of_unequal_prompts_writes_its_next_tokens_behind_each_prompt():
    cache = small_cache()
    new = numbers([1.0, 2.0, 3.0], [4.0, 0.0, 0.0])
    cache.update(3, new, new, prefill([3, 1], CPU))
    step = decode([3, 1], CPU)
    key, _ = cache.update(3, numbers([7.0], [8.0]), numbers([7.0], [8.0]), step)
    assert key.flatten(1).tolist() == [[1, 2, 3, 7], [4, 8, 0, 0]]
    assert step.mask.flatten(1).tolist() == [[True] * 4, [True, True, False, False]]
    assert step.positions_BT.tolist() == [[3], [1]]


def test_a_batch_of_equal_prompts_needs_no_mask_and_no_choice_of_last_token():
    assert prefill([2, 2], CPU).last_B is None
    step = decode([2, 2], CPU)
    assert (step.mask, step.start, step.columns) == (None, 2, 3)


def test_the_logits_of_a_shorter_prompt_are_those_of_its_own_last_token():
    assert prefill([3, 1], CPU).last_B.tolist() == [2, 0]


def test_a_prompt_that_joins_later_writes_only_its_own_row():
    cache = small_cache(rows=3)
    cache.update(3, numbers([5.0, 6.0]), numbers([5.0, 6.0]), prefill([2], CPU, rows=[1]))
    assert cache.keys[3].flatten(1).tolist() == [[0] * 4, [5, 6, 0, 0], [0] * 4]


def test_a_prefill_reads_its_own_keys_and_copies_nothing_back():
    key = numbers([5.0, 6.0])
    assert small_cache(1).update(3, key, key, prefill([2], CPU))[0] is key


def test_bytes_are_those_of_the_formula():
    cache = KVCache(range(3), rows=2, columns=5, heads=4, head_width=8, dtype=torch.bfloat16)
    sizes = dict(rows=2, columns=5, heads=4, head_width=8)
    assert cache.bytes == kv_bytes(layers=3, bytes_per_value=2, **sizes) == 3 * 2 * 2 * 2 * 160


def test_a_size_below_one_is_refused():
    with pytest.raises(ValueError, match="rows=0"):
        KVCache([0], rows=0, columns=5, heads=4, head_width=8)

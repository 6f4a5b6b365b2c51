"""Each fault that generation is prone to, seeded once: the comparison with one device sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from spawned import run_ranks

from labkit.models import kv_cache
from labkit.models.config import ModelConfig
from labkit.models.decoder import LabDecoder
from labkit.models.transformer import Transformer
from labkit.parallel.generation import generate as generating
from labkit.parallel.generation.rank_runners import TensorOnRanks
from labkit.parallel.generation.runners import OneDevice
from labkit.parallel.generation.sampling import Sampling

CONFIG = ModelConfig(layers=2, width=32, heads=4, context=32, vocabulary=64)
PROMPTS = [(1, 2, 3, 4, 5), (9, 8), (10, 20, 30)]


def tokens(runner=None, **settings):
    runner = runner or OneDevice(LabDecoder(Transformer(CONFIG)))
    return generating.generate(runner, PROMPTS, new_tokens=6, **settings).tokens


def one_column_early(lengths, device):
    return kv_cache.decode([length - 1 for length in lengths], device)


def without_mask(lengths, device):
    return replace(kv_cache.decode(lengths, device), mask=None)


@pytest.mark.parametrize("fault", [one_column_early, without_mask])
def test_a_wrong_cache_column_and_a_dropped_mask_change_the_tokens(monkeypatch, fault):
    right = tokens()
    monkeypatch.setattr(generating, "decode", fault)
    assert tokens() != right


class DrawsForItself(TensorOnRanks):
    """Every rank draws with a chance of its own and tells nobody."""

    def start(self, ids_BT, step, cache, draw, label=""):
        logits_BV = self.decoder(ids_BT, cache, step)
        torch.manual_seed(self.peers.rank)
        drawn_B = torch.multinomial(logits_BV.softmax(-1), 1)[:, 0]
        return lambda: drawn_B


def texts(rank: int):
    sampled = Sampling(temperature=1.0)
    runners = [kind(LabDecoder(Transformer(CONFIG))) for kind in (TensorOnRanks, DrawsForItself)]
    return [tokens(runner, sampling=sampled) for runner in runners]


def test_ranks_that_draw_for_themselves_write_different_texts():
    (right, wrong), (right_too, wrong_too) = run_ranks(texts, 2)
    assert right == right_too == tokens(sampling=Sampling(temperature=1.0))
    assert wrong != wrong_too

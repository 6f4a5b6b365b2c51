"""Tokens are chosen by hand-checkable rules and draws depend on nothing but seed and sequence."""

from __future__ import annotations

import pytest
import torch

from labkit.parallel.generation.sampling import Sampling, chances, choose

# chances 0.5, 0.25, 0.125, 0.125 for the tokens 2, 0, 1, 3
LOGITS = torch.tensor([[0.25, 0.125, 0.5, 0.125]]).log()


def drawn(chance: float, **settings) -> int:
    return int(choose(LOGITS, Sampling(temperature=1.0, **settings), torch.tensor([chance])))


@pytest.mark.parametrize(
    "chance, token", [(0.0, 2), (0.49, 2), (0.51, 0), (0.74, 0), (0.76, 1), (0.88, 3), (0.999, 3)]
)
def test_a_chance_picks_the_token_whose_share_it_falls_into(chance, token):
    assert drawn(chance) == token


def test_top_k_keeps_the_k_likeliest():
    assert {drawn(c / 100, top_k=2) for c in range(100)} == {2, 0}


def test_top_p_keeps_the_fewest_that_reach_p():
    assert {drawn(c / 100, top_p=0.5) for c in range(100)} == {2}
    assert {drawn(c / 100, top_p=0.6) for c in range(100)} == {2, 0}


def test_shares_of_many_draws_are_the_models_chances():
    uniform = torch.tensor(chances(Sampling(1.0), sequence=0, tokens=4000))
    tokens = choose(LOGITS.expand(4000, 4), Sampling(temperature=1.0), uniform)
    shares = tokens.bincount(minlength=4) / 4000
    torch.testing.assert_close(shares, LOGITS[0].exp(), atol=0.03, rtol=0)


def test_a_low_temperature_comes_down_to_greedy():
    assert int(choose(LOGITS, Sampling(temperature=0.01), torch.tensor([0.99]))) == 2


def test_draws_depend_on_seed_and_sequence():
    first = chances(Sampling(1.0, seed=1), 0, 3)
    assert first == chances(Sampling(0.5, seed=1), 0, 5)[:3]
    assert first != chances(Sampling(1.0, seed=1), 1, 3)
    assert first != chances(Sampling(1.0, seed=2), 0, 3)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(temperature=-1), "temperature=-1"),
        (dict(temperature=1, top_p=0), "top_p=0"),
        (dict(temperature=1, top_k=0), "top_k=0"),
        (dict(top_k=5), "do nothing at temperature=0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)

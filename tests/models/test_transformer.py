import pytest
import torch

from labkit.models.config import ModelConfig
from labkit.models.sample import sample_text
from labkit.models.transformer import Transformer, next_token_loss

CONFIG = ModelConfig(layers=4, width=16, heads=2, context=8, vocabulary=256)


def ids(batch=2):
    return torch.randint(256, (batch, 8), generator=torch.Generator().manual_seed(0))


def test_any_split_starts_from_the_weights_of_the_whole():
    whole = Transformer(CONFIG).state_dict()
    parts = [Transformer(CONFIG, layers=held) for held in ([0], [1, 2], [3])]
    split = {k: v for part in parts for k, v in part.state_dict().items()}
    assert split.keys() == whole.keys()
    assert all(torch.equal(split[name], whole[name]) for name in whole)


def test_parts_in_a_row_compute_what_the_whole_computes():
    x = ids()
    for part in (Transformer(CONFIG, layers=[0, 1]), Transformer(CONFIG, layers=[2, 3])):
        x = part(x)
    assert torch.equal(x, Transformer(CONFIG)(ids()))


def test_equal_layers_under_different_names_and_seeds_start_differently():
    model, other = Transformer(CONFIG), Transformer(CONFIG, seed=1)
    first, second = model.layers["0"].mlp.up.weight, model.layers["1"].mlp.up.weight
    assert not torch.equal(first, second)
    assert not torch.equal(first, other.layers["0"].mlp.up.weight)


def test_a_token_never_sees_those_after_it():
    model, x = Transformer(CONFIG), ids()
    changed = x.clone()
    changed[:, 5:] = 0
    assert torch.allclose(model(x)[:, :5], model(changed)[:, :5], atol=1e-6)
    assert not torch.allclose(model(x)[:, 5:], model(changed)[:, 5:], atol=1e-6)


def test_an_untrained_model_is_about_as_good_as_guessing_one_of_256_bytes():
    loss = next_token_loss(Transformer(CONFIG)(ids(8)), ids(8))
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), rel=0.15)


@pytest.mark.parametrize("held", [[], [0, 2], [1, 0], [3, 4], [-1, 0]])
def test_layers_that_are_no_contiguous_run_are_refused(held):
    with pytest.raises(ValueError, match="contiguous"):
        Transformer(CONFIG, layers=held)


def test_the_same_seed_continues_a_text_in_the_same_way():
    model = Transformer(CONFIG)
    first, again = (sample_text(model, "The", 12, seed=3) for _ in range(2))
    assert first == again and first.startswith("The") and len(first) > 3
    assert sample_text(model, "The", 12, seed=4) != first


@pytest.mark.parametrize("wrong", [dict(prompt=""), dict(length=0), dict(temperature=0)])
def test_sampling_names_what_is_wrong(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        sample_text(Transformer(CONFIG), **(dict(prompt="a", length=1) | wrong))

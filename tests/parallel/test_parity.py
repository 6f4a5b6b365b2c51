import pytest
import torch
from torch import nn

from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer, next_token_loss
from labkit.parallel.parity import compare, gradients, joined


def test_equal_tensors_have_no_error():
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    parity = compare(tensors, {name: t.clone() for name, t in tensors.items()})
    assert (parity.max_abs_error, parity.max_rel_error, parity.compared) == (0, 0, 2)


def test_the_worst_is_named_by_its_relative_error():
    reference = {"large": torch.tensor([1000.0]), "small": torch.tensor([0.01])}
    candidate = {"large": torch.tensor([1001.0]), "small": torch.tensor([0.02])}
    parity = compare(reference, candidate)
    assert parity.worst == "small" and parity.max_rel_error == pytest.approx(1.0)
    assert parity.max_abs_error == pytest.approx(1.0)
    assert "worst small" in str(parity)


@pytest.mark.parametrize("wrong", [0.0, -2e-7, 2e-6])
def test_a_wrong_gradient_of_a_small_tensor_does_not_hide_behind_a_large_one(wrong):
    reference = {"large": torch.ones(2), "small": torch.full((2,), 2e-7)}
    parity = compare(reference, {**reference, "small": torch.full((2,), wrong)})
    assert parity.worst == "small" and parity.max_rel_error >= 1 and parity.noise == ()


def test_what_rounding_leaves_of_a_zero_is_named_and_what_is_no_rounding_is_not_taken_for_it():
    reference = {"large": torch.ones(2), "zero": torch.full((2,), 3e-9)}
    parity = compare(reference, {**reference, "zero": torch.full((2,), -5e-9)})
    assert parity.noise == ("zero",) and parity.max_rel_error < 1e-8
    assert str(parity).endswith("; 1 of them 0 but for rounding, as zero")
    grown = compare(reference, {**reference, "zero": torch.full((2,), 5e-6)})
    assert grown.noise == () and grown.worst == "zero" and grown.max_rel_error > 1000


def test_in_float64_the_same_small_gradient_is_told_from_zero():
    reference = {"large": torch.ones(2).double(), "small": torch.full((2,), 3e-9).double()}
    parity = compare(reference, {**reference, "small": torch.zeros(2).double()})
    assert parity.noise == () and parity.max_rel_error == pytest.approx(1.0)


def test_only_the_key_biases_of_the_model_are_rounding_and_float64_proves_them_zero():
    config = ModelConfig(layers=2, width=32, heads=4, context=16)
    ids = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(1))
    found = {}
    for dtype in (torch.float32, torch.float64):
        model = Transformer(config).to(dtype)
        next_token_loss(model(ids), ids.roll(1, 1)).backward()
        found[dtype] = gradients(model)
    parity = compare(found[torch.float64], found[torch.float32])
    names = tuple(f"layers.{i}.attention.key.bias" for i in range(2))
    assert parity.noise == names and parity.max_rel_error < 1e-5
    zeros = {name: torch.zeros_like(t) for name, t in found[torch.float64].items() if t.ndim == 1}
    exact = compare({n: found[torch.float64][n] for n in zeros}, zeros)  # to 1e-16 of the largest
    assert exact.noise == names


def test_a_counter_among_the_buffers_is_compared_exactly():
    steps = {"weight": torch.ones(1), "num_batches_tracked": torch.tensor(5)}
    parity = compare(steps, {**steps, "num_batches_tracked": torch.tensor(6)})
    assert parity.worst == "num_batches_tracked" and parity.max_abs_error == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_never_pass_for_equal(bad):
    good, broken = {"a": torch.ones(2)}, {"a": torch.tensor([1.0, bad])}
    assert compare(good, broken).max_abs_error == float("inf")
    assert compare(broken, broken).max_rel_error == float("inf")


def test_a_missing_an_extra_or_a_misshapen_tensor_is_named():
    one, two = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}
    with pytest.raises(ValueError, match=r"missing \['b'\]"):
        compare(two, one)
    with pytest.raises(ValueError, match=r"extra \['b'\]"):
        compare(one, two)
    with pytest.raises(ValueError, match=r"a has shape \(3,\), the reference \(2,\)"):
        compare(one, {"a": torch.ones(3)})
    with pytest.raises(ValueError, match="holds no tensor"):
        compare({}, {})


def test_a_lost_gradient_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="2 parameters have no gradient, the first is 1.weight"):
        gradients(model)


def test_gradients_are_copies():
    layer = nn.Linear(1, 1)
    layer(torch.ones(1, 1)).sum().backward()
    kept = gradients(layer)
    layer.zero_grad(set_to_none=False)
    assert kept["weight"].item() == 1


def test_ranks_join_to_one_model_and_a_name_held_twice_is_refused():
    assert joined({0: {"a": 1}, 1: {"b": 2}}) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="rank 1 holds a"):
        joined({0: {"a": 1}, 1: {"a": 2}})


def test_rounding_noise_around_zero_is_measured_against_the_largest_tensor():
    reference = {"weight": torch.tensor([2.0]), "key.bias": torch.tensor([1e-8])}
    candidate = {"weight": torch.tensor([2.0]), "key.bias": torch.tensor([-1e-8])}
    assert compare(reference, candidate).max_rel_error == pytest.approx(1e-8)
    assert compare(reference, {**candidate, "key.bias": torch.ones(1)}).max_rel_error > 0.1

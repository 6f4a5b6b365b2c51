import pytest
import torch
from torch import nn

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

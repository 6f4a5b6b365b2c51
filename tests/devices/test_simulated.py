"""Simulated devices compute what one CPU computes, and count what they hold and move."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.devices.simulated import simulated
from labkit.devices.simulated.simulated import (
    bytes_on,
    devices,
    peak_bytes_on,
    reset_ledger,
    transfers,
    transfers_refusal,
)
from labkit.devices.simulated.simulated_memory import Transfer
from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer, next_token_loss

FLOAT = 4  # bytes of a float32
LONG = 8  # bytes of an int64


@pytest.fixture
def pair() -> tuple[torch.device, torch.device]:
    gc.collect()
    first, second = devices(2, "cpu")
    reset_ledger()
    return first, second


CONFIG = ModelConfig(layers=4, width=16, heads=2, context=8, vocabulary=11)


class SplitTransformer(nn.Module):
    """The lab's transformer, its first half on one device and the second on another."""

    def __init__(self, model: Transformer, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        half = len(model.layers) // 2
        blocks = list(model.layers.values())
        self.lower = nn.Sequential(model.embed, *blocks[:half]).to(first)
        self.upper = nn.Sequential(*blocks[half:], model.head).to(second)

    def forward(self, ids_BT):
        x_BTD = self.lower(ids_BT.to(self.first, non_blocking=True))
        return self.upper(x_BTD.to(self.second, non_blocking=True))


def train_steps(model, optimizer, count=2):
    """Loss and gradients of the last of ``count`` steps on a fixed batch."""
    ids_BT = torch.arange(24).reshape(3, 8) % CONFIG.vocabulary
    targets_BT = (ids_BT + 1) % CONFIG.vocabulary
    for _ in range(count):
        optimizer.zero_grad()
        logits_BTV = model(ids_BT)
        loss = next_token_loss(logits_BTV, targets_BT.to(logits_BTV.device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1000.0)
        optimizer.step()
    return loss.item(), [parameter.grad.cpu() for parameter in model.parameters()]


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_transformer_on_two_devices_trains_bit_for_bit_as_on_one_cpu(pair, name):
    whole = Transformer(CONFIG)
    split = SplitTransformer(Transformer(CONFIG), *pair)
    loss, grads = train_steps(whole, OPTIMIZERS[name](whole.parameters()))
    split_loss, split_grads = train_steps(split, OPTIMIZERS[name](split.parameters()))

    assert split_loss == loss
    assert all(map(torch.equal, split_grads, grads))
    for parameter, reference in zip(split.parameters(), whole.parameters(), strict=True):
        assert torch.equal(parameter.cpu(), reference)


def test_layers_with_buffers_and_random_numbers_agree_with_the_cpu(pair):
    def run(device):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv1d(2, 3, 3, padding=1), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.LSTM(5, 4)
        ).to(device)
        x = torch.randn(4, 2, 5, device=device, requires_grad=True)
        y = model(x)[0].max(dim=1).values.std()
        y.backward()
        return [
            y.detach().cpu(),
            x.grad.cpu(),
            model[1].running_mean.cpu(),
            model[0].weight.grad.cpu(),
        ]

    for got, wanted in zip(run(pair[1]), run("cpu"), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"attn_mask": torch.ones(4, 4, dtype=torch.bool).tril()},
        {"attn_mask": torch.zeros(4, 4), "scale": 0.3},
        {},
    ],
    ids=["causal", "boolean mask", "float mask and scale", "plain"],
)
def test_attention_takes_the_kernel_of_the_cpu(pair, options):
    def run(device):
        qkv = torch.linspace(-1, 1, 192, device=device).reshape(3, 1, 2, 4, 8).requires_grad_()
        here = {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}
        y = F.scaled_dot_product_attention(*qkv, **here)
        y.square().sum().backward()
        return y.detach().cpu(), qkv.grad.cpu()

    assert all(map(torch.equal, run(pair[0]), run("cpu")))


def test_grouped_query_attention_agrees_with_the_cpu(pair):
    q, kv = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    run = lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)  # noqa: E731
    got = run(q.to(pair[0]), kv.to(pair[0]), kv.to(pair[0])).cpu()
    torch.testing.assert_close(got, run(q, kv, kv))


def test_complex_numbers_and_unused_gradients_agree_with_the_cpu(pair):
    def run(device):
        x = torch.tensor([1.0, 2.0, -3.0], device=device, requires_grad=True)
        z = torch.fft.hfft(torch.complex(x, x.flip(0))) + torch.view_as_real(
            torch.complex(x, x).conj().resolve_conj()
        ).sum() + x.sgn().sum()  # fmt: skip
        z.square().sum().backward()
        return z.detach().cpu(), x.grad.cpu()

    for got, wanted in zip(run(pair[0]), run("cpu"), strict=True):
        torch.testing.assert_close(got, wanted)


def test_gradient_of_a_cpu_leaf_comes_back_to_the_cpu(pair):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (x.to(pair[0]) * 3).to(pair[1]).sum().backward()
    assert x.grad.device.type == "cpu" and x.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(("left", "right"), [(0, 1), (1, 0), (0, "cpu"), ("cpu", 0)], ids=str)
def test_tensors_of_two_devices_do_not_meet(pair, left, right):
    place = lambda where: torch.ones(2, device=where if where == "cpu" else pair[where])  # noqa: E731
    a, b = place(left), place(right)
    words = f"same device, but found at least two devices, {a.device} and {b.device}!"
    with pytest.raises(RuntimeError, match=words):
        a + b
    assert (a + b.cpu().sum().item()).device == a.device


def test_input_left_on_the_wrong_device_names_the_argument(pair):
    layer = nn.Linear(2, 2).to(pair[1])
    words = "but got mat1 is on lazy:0, different from other tensors on lazy:1 .* aten::addmm"
    with pytest.raises(RuntimeError, match=words):
        layer(torch.ones(1, 2, device=pair[0]))


def test_scalars_and_indices_may_come_from_the_cpu(pair):
    x = torch.arange(3.0, device=pair[0])
    assert (x * torch.tensor(2.0)).tolist() == [0.0, 2.0, 4.0]
    assert x[torch.tensor([2, 0])].tolist() == [2.0, 0.0]


def test_bytes_of_a_small_linear_are_exact_and_leave_with_it(pair):
    first, second = pair
    before = bytes_on(first), bytes_on(second)
    layer = nn.Linear(3, 2).to(first)
    weights = (3 * 2 + 2) * FLOAT
    assert bytes_on(first) - before[0] == weights

    layer(torch.ones(5, 3, device=first)).sum().backward()
    assert bytes_on(first) - before[0] == 2 * weights  # and the gradients

    layer.to(second)
    assert bytes_on(first) == before[0]
    assert bytes_on(second) - before[1] == 2 * weights

    layer.cpu()
    assert bytes_on(second) == before[1]


def test_views_share_bytes_and_the_peak_outlives_a_temporary(pair):
    before = bytes_on(pair[0])
    x = torch.zeros(10, device=pair[0])
    view = x[2:].view(2, 4)
    assert bytes_on(pair[0]) - before == 10 * FLOAT
    del x
    assert bytes_on(pair[0]) - before == 10 * FLOAT
    (view + 1).sum()
    assert bytes_on(pair[0]) - before == 10 * FLOAT
    assert peak_bytes_on(pair[0]) - before == 10 * FLOAT + 8 * FLOAT + FLOAT
    reset_ledger()
    assert peak_bytes_on(pair[0]) == bytes_on(pair[0])


def test_activations_are_held_until_the_backward_pass(pair):
    before = bytes_on(pair[0])
    x = torch.zeros(10, device=pair[0], requires_grad=True)
    y = x.exp().sum()  # saves the 10 results of exp
    assert bytes_on(pair[0]) - before == (10 + 10 + 1) * FLOAT
    y.backward()
    assert bytes_on(pair[0]) - before == (10 + 10 + 1) * FLOAT  # x, its gradient, y


def test_transfers_are_exact_with_the_gradient_on_its_way_back(pair):
    first, second = map(str, pair)
    lower, upper = nn.Linear(3, 4).to(first), nn.Linear(4, 1).to(second)
    reset_ledger()
    x = torch.ones(5, 3).to(first)
    loss = upper(lower(x).to(second)).mean()
    loss.backward()
    assert loss.item() == loss.cpu()
    assert transfers() == (
        Transfer("cpu", first, 5 * 3 * FLOAT),
        Transfer(first, second, 5 * 4 * FLOAT),
        Transfer(second, first, 5 * 4 * FLOAT),
        Transfer(second, "cpu", FLOAT),  # item
        Transfer(second, "cpu", FLOAT),  # cpu
    )
    reset_ledger()
    assert transfers() == ()


def test_staying_on_a_device_is_no_transfer(pair):
    x = torch.ones(3, device=pair[0])
    assert x.to(pair[0]) is x
    assert x.to(torch.int64).device == x.to("lazy").device == pair[0]
    x.copy_(x.clone())
    assert transfers() == ()


def test_copy_between_devices_is_logged_with_the_bytes_of_the_target(pair):
    first, second = map(str, pair)
    a, b = torch.zeros(2, device=first), torch.tensor([1, 2], device=second)
    a.copy_(b)
    assert a.tolist() == [1.0, 2.0]
    assert transfers() == (
        Transfer("cpu", second, 2 * LONG),
        Transfer(second, first, 2 * FLOAT),
        Transfer(first, "cpu", 2 * FLOAT),
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.tensor([0, 1], device=device),
        lambda device: torch.as_tensor([0, 1], device=device),
        lambda device: torch.arange(2, device=device),
        lambda device: torch.arange(0, 4, 2, device=device) // 2,
        lambda device: torch.linspace(0, 1, 2, device=device),
        lambda device: torch.eye(2, device=device)[1],
        lambda device: torch.tril_indices(2, 2, device=device)[0, [0, 1]],
        lambda device: torch.randperm(2, device=device).sort().values,
        lambda device: torch.zeros(2, device=device) + torch.tensor([0, 1], device=device),
        lambda device: torch.ones(1, device=device).new_tensor([0, 1]),
        lambda device: torch.ones_like(torch.ones(2), device=device).cumsum(0) - 1,
        lambda device: torch.ones_like(torch.ones(2, device="lazy:0"), device=device).cumsum(0) - 1,
        lambda device: torch.tensor([0, 1]).to(torch.ones(1, device=device)),
    ],
)
def test_factories_take_the_device(pair, make):
    x = make(pair[1])
    assert x.device == pair[1] and x.tolist() == [0, 1]


def test_a_tensor_like_a_simulated_one_can_be_made_elsewhere(pair):
    x = torch.ones(2, device=pair[0])
    assert type(torch.zeros_like(x, device="cpu")) is torch.Tensor
    assert torch.empty_like(x, device="meta").device.type == "meta"


def test_tensors_print_their_device(pair):
    x = torch.ones(2, device=pair[1], requires_grad=True)
    assert repr(x) == "tensor([1., 1.], device='lazy:1', requires_grad=True)"
    assert repr(x * 2) == "tensor([2., 2.], device='lazy:1', grad_fn=<MulBackward0>)"
    assert f"{x.sum():.2f}" == "2.00"
    assert repr(nn.Parameter(x)).startswith("Parameter containing:\ntensor(")


def test_numpy_needs_the_cpu(pair):
    x = torch.ones(2, device=pair[1])
    with pytest.raises(TypeError, match="can't convert lazy:1 device type tensor to numpy"):
        x.numpy()
    with pytest.raises(TypeError, match="can't convert lazy:1"):
        np.asarray(x)
    assert x.cpu().numpy().tolist() == [1.0, 1.0]


def test_module_keeps_its_parameters_when_it_moves(pair):
    layer = nn.Linear(2, 2)
    weight, optimizer = layer.weight, torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(torch.ones(1, 2)).sum().backward()
    layer.to(pair[0]).to(pair[1])
    assert layer.weight is weight and weight.grad.device == pair[1]
    wanted = weight.cpu() - 1.0
    optimizer.step()
    assert torch.equal(layer.weight.cpu(), wanted)


def test_deep_copies_are_independent_and_keep_ties(pair):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(pair[0])
    model[1].weight = model[0].weight
    model(torch.ones(1, 2, device=pair[0])).sum().backward()
    twin = copy.deepcopy(model)
    assert twin[1].weight is twin[0].weight and isinstance(twin[0].weight, nn.Parameter)
    assert torch.equal(twin[0].weight.grad, model[0].weight.grad)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.abs().sum() > 0
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model[0].weight * 2)


def test_state_dict_makes_the_round_trip_through_the_cpu(pair, tmp_path):
    split = SplitTransformer(Transformer(CONFIG, seed=1), *pair)
    on_cpu = {name: value.cpu() for name, value in split.state_dict().items()}
    torch.save(on_cpu, tmp_path / "state.pt")
    other = SplitTransformer(Transformer(CONFIG, seed=2), *pair)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for parameter, wanted in zip(other.parameters(), split.parameters(), strict=True):
        assert parameter.device == wanted.device and torch.equal(parameter, wanted)
    with pytest.raises(RuntimeError, match=r"on lazy:0 cannot be pickled; save x.cpu\(\)"):
        torch.save(split.state_dict(), tmp_path / "no.pt")


def test_optimizer_state_loads_onto_the_device_of_its_parameter(pair):
    split = SplitTransformer(Transformer(CONFIG), *pair)
    optimizer = torch.optim.AdamW(split.parameters())
    train_steps(split, optimizer)
    again = torch.optim.AdamW(split.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter in split.parameters():
        assert again.state[parameter]["exp_avg"].device == parameter.device


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_activations_give_the_same_gradient(pair, use_reentrant):
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(pair[1])
    x = torch.ones(3, 4, device=pair[1], requires_grad=True)
    torch.manual_seed(0)
    layer(x).sum().backward()
    wanted, x.grad = x.grad, None
    torch.manual_seed(0)
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(x.grad, wanted)


def test_assigning_data_replaces_values_shape_and_device(pair):
    parameter = nn.Parameter(torch.zeros(2, device=pair[0]))
    parameter.data = torch.ones(3, device=pair[1])
    assert parameter.device == pair[1] and parameter.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.resize_(3, 4),
        lambda x: x.set_(torch.ones(4, device=x.device)),
        lambda x: x.set_(torch.ones(9, device=x.device)[:6].view(2, 3)),
        lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
        lambda x: x.new_ones(2) @ x,  # squeeze_ inside
        lambda x: torch.vmap(torch.sum)(x),
    ],
)
def test_shapes_and_bytes_follow_a_change_in_place(pair, change):
    before = bytes_on(pair[0])
    x = torch.ones(2, 3, device=pair[0])
    y, on_cpu = change(x), change(torch.ones(2, 3))
    assert y.shape == on_cpu.shape and y.stride() == on_cpu.stride()
    assert y.add(1).shape == on_cpu.shape
    storages = {t.data_ptr(): t._host.untyped_storage().nbytes() for t in (x, y)}
    assert bytes_on(pair[0]) - before == sum(storages.values())


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(2, device="lazy:99"),
        lambda: torch.ones(2).to("lazy:99"),
        lambda: torch.ones(2, device="lazy:0").to("lazy:99"),
        lambda: bytes_on("lazy:99"),
    ],
)
def test_ordinal_out_of_range_says_what_is_there(pair, use):
    with pytest.raises(RuntimeError, match="invalid device ordinal: lazy:99; .* are lazy:0 to"):
        use()


def test_fewer_devices_are_the_first_of_those_there(pair):
    x = torch.ones(1, device=devices(3, "cpu")[2])
    assert devices(1, "cpu") == [pair[0]]
    assert (x + torch.ones(1, device="lazy:2")).tolist() == [2.0]


def test_no_device_and_unknown_kinds_are_errors():
    with pytest.raises(ValueError, match="count=0 must be at least 1"):
        devices(0)
    with pytest.raises(ValueError, match="DEVICES='warp'"):
        devices(2, "warp")


def test_ordinary_tensors_and_the_accelerator_api_do_not_notice(pair):
    torch.ones(1, device=pair[0])
    assert not torch.overrides._get_current_function_mode_stack()
    assert type(torch.ones(2) + 1) is torch.Tensor
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is None or accelerator.type != "lazy"


def test_cpu_bytes_are_not_counted():
    assert bytes_on("cpu") is None and peak_bytes_on("cpu") is None


def test_real_devices_have_no_transfer_log(pair, monkeypatch):
    assert transfers_refusal() is None
    monkeypatch.setattr(simulated, "_latest", [torch.device("cuda", 0), torch.device("cuda", 1)])
    assert transfers() is None
    assert "cuda:0, cuda:1 copy without a log" in transfers_refusal()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs one CUDA GPU")
def test_a_real_gpu_answers_from_its_allocator():
    (gpu,) = devices(1, "cuda")
    before = bytes_on(gpu)
    x = torch.zeros(1024, device=gpu)
    assert gpu == torch.device("cuda", 0)
    assert bytes_on(gpu) - before == x.nbytes == 4096
    assert peak_bytes_on(gpu) >= bytes_on(gpu)
    reset_ledger()
    assert peak_bytes_on(gpu) == bytes_on(gpu)
    assert transfers() is None

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from spawned import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer, next_token_loss
from labkit.parallel.parity import compare, gradients
from labkit.parallel.pipelining.pipeline_guards import check_optimizer
from labkit.parallel.sharding import shards, tensor_layers
from labkit.parallel.sharding.tensor_checks import check_plan, check_tensor_sizes
from labkit.parallel.sharding.tensor_layers import (
    ColumnLinear,
    RowLinear,
    copied,
    split_vocabulary_loss,
    summed,
)
from labkit.parallel.sharding.tensor_parallel import loss_and_backward, tensor_parallel

CONFIG = ModelConfig(layers=2, width=32, heads=4, context=16)
IDS = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(1))
TARGETS = IDS.roll(1, 1)


def model_with_biases():
    """Biases of 0 hide one that is added twice; equal ones too, for LayerNorm takes them out."""
    model = Transformer(CONFIG)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            generator = torch.Generator().manual_seed(len(name))
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def reference():
    model = model_with_biases()
    loss = next_token_loss(model(IDS), TARGETS)
    loss.backward()
    return loss.item(), gradients(model)


def tensor_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))


def errors(mesh, **settings):
    """Loss error, and worst relative gradient error, against one device."""
    loss, expected = reference()
    model = tensor_parallel(model_with_biases(), mesh, **settings)
    error = abs(loss_and_backward(model, IDS, TARGETS).item() - loss)
    return error, compare(expected, shards.full_gradients(model)).max_rel_error, model


# ---- sizes and plans, without ranks


def test_sizes_that_do_not_divide_are_refused_with_those_that_do():
    smollm = {"heads": 9, "kv_heads": 3, "width": 576, "hidden": 1536, "vocabulary": 49152}
    with pytest.raises(ValueError, match="heads=9 and kv_heads=3.*t=2.*legal sizes of t are 1, 3$"):
        check_tensor_sizes(2, smollm)
    check_tensor_sizes(3, smollm)
    with pytest.raises(ValueError, match="t=0"):
        check_tensor_sizes(0, smollm)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    "plan, message",
    [
        ({"middle": ColwiseParallel()}, "'middle', which is no module; there are: up, down"),
        ({"up": ColwiseParallel()}, r"up.weight.shape\[0\]=6 must be divisible by t=4.* 1, 2, 3"),
        ({"down": RowwiseParallel()}, r"down.weight.shape\[1\]=6 must be"),
        (
            {"down": ColwiseParallel(use_local_output=False)},
            "scale, up.weight, up.bias would stay plain tensors.* that 'down' passes on",
        ),
        (
            {
                "up": PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=Replicate()
                )
            },
            "up.weight, up.bias would stay plain tensors",
        ),
    ],
)
def test_a_plan_that_torch_would_take_and_fail_on_is_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        check_plan(TwoLayers(), plan, 4)


def test_a_plan_that_fits_passes():
    check_plan(TwoLayers(), {"up": ColwiseParallel(), "down": RowwiseParallel()}, 2)


# ---- real ranks


def _pair_and_loss(rank):
    """A column and a row layer by hand against the whole pair, and the loss of split logits."""
    mesh = tensor_mesh()
    group = mesh.get_group()
    torch.manual_seed(0)
    up, down, x = nn.Linear(4, 6), nn.Linear(6, 4), torch.randn(3, 4, requires_grad=True)
    first, second = ColumnLinear(up, mesh), RowLinear(down, mesh)
    y = second(first(copied(x, group)))
    torch.testing.assert_close(y, down(up(x)))
    gradient = torch.autograd.grad(y.square().sum(), x)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(down(up(x)).square().sum(), x)[0])
    assert first.weight.shape == (3, 4) and second.weight.shape == (4, 3)
    logits, targets = torch.randn(2, 3, 8) * 30, torch.randint(8, (2, 3))
    whole = logits.clone().requires_grad_()
    own = logits.chunk(2, -1)[rank].clone().requires_grad_()
    expected, loss = next_token_loss(whole, targets), split_vocabulary_loss(own, targets, group)
    torch.testing.assert_close(loss, expected)
    (3 * expected).backward()
    (3 * loss).backward()
    torch.testing.assert_close(own.grad, whole.grad.chunk(2, -1)[rank])


def test_a_column_and_row_pair_and_the_loss_of_a_divided_vocabulary_equal_the_whole():
    run_ranks(_pair_and_loss, 2)


def _styles(rank):
    mesh = tensor_mesh()
    for settings in (
        {"split_vocabulary": True},
        {"style": "dtensor", "split_vocabulary": True},
        {"style": "dtensor", "sequence": True, "split_vocabulary": True},
    ):
        loss_error, gradient_error, _ = errors(mesh, **settings)
        assert loss_error < 2e-6 and gradient_error < 1e-5, settings


def test_a_divided_vocabulary_equals_one_device_in_every_style():
    run_ranks(_styles, 2)


def _faults(rank):
    mesh = tensor_mesh()
    found = {"right": errors(mesh)[:2]}

    def unsummed(x, group):
        return x

    with patch.object(tensor_layers, "summed", unsummed):
        found["no all-reduce forward"] = errors(mesh)[:2]
    with patch("labkit.parallel.sharding.tensor_parallel.copied", unsummed):
        found["no all-reduce backward"] = errors(mesh)[:2]

    def biased_everywhere(layer, x):
        return summed(nn.functional.linear(x, layer.weight, layer.bias), layer.group)

    with patch.object(RowLinear, "forward", biased_everywhere):
        found["bias on every rank"] = errors(mesh)[:2]
    return found


def test_a_missing_all_reduce_and_a_double_bias_show_in_loss_or_gradients():
    for found in run_ranks(_faults, 2):
        loss_error, gradient_error = found.pop("right")
        assert loss_error < 2e-6 and gradient_error < 1e-5
        assert found["no all-reduce forward"][0] > 1e-3
        assert found["no all-reduce backward"][1] > 1e-2
        assert found["no all-reduce backward"][0] < 2e-6  # the loss alone hides it
        assert found["bias on every rank"][0] > 1e-3


def _guards(rank):
    mesh = tensor_mesh()
    model = model_with_biases()
    early = torch.optim.AdamW(model.parameters())
    tensor_parallel(model, mesh)
    with pytest.raises(ValueError, match="24 of 37 parameters are not in the optimizer"):
        check_optimizer(early, [model])
    check_optimizer(torch.optim.AdamW(model.parameters()), [model])
    with pytest.raises(ValueError, match="37 parameters have no gradient, the first is embed"):
        shards.check_gradients(model)
    loss_and_backward(model, IDS, TARGETS)
    shards.check_gradients(model)

    whole = torch.nn.utils.get_total_norm(reference()[1].values()).item()
    own = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert shards.gradient_norm(model, mesh).item() == pytest.approx(whole, rel=1e-6)
    assert abs(own - whole) > 0.01 * whole  # a rank's own norm, not summed over the ranks

    with pytest.raises(ValueError, match="heads=3 must be.*legal sizes of t are 1, 3"):
        tensor_parallel(Transformer(CONFIG.with_(heads=3, width=48)), mesh)
    with pytest.raises(ValueError, match="the ranks disagree: rank 0: .*rank 1: "):
        tensor_parallel(Transformer(CONFIG.with_(layers=1 + rank)), mesh)
    with pytest.raises(ValueError, match="use style='dtensor'"):
        tensor_parallel(Transformer(CONFIG), mesh, sequence=True)
    with pytest.raises(ValueError, match="needs the whole model"):
        part = Transformer(CONFIG, layers=[0])
        tensor_parallel(part, mesh, style="dtensor", sequence=True)
    with pytest.raises(ValueError, match="style='megatron' is unknown"):
        tensor_parallel(Transformer(CONFIG), mesh, style="megatron")
    wide = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    with pytest.raises(ValueError, match=r"give one, as mesh\['tensor'\]"):
        tensor_parallel(Transformer(CONFIG), wide)
    divided = tensor_parallel(Transformer(CONFIG), mesh, style="dtensor", sequence=True)
    with pytest.raises(ValueError, match="tokens=5 must be divisible by t=2"):
        divided(IDS[:, :5])


def test_guards_of_optimizer_gradients_norm_sizes_and_settings_speak_on_every_rank():
    run_ranks(_guards, 2)


def _own_plan(rank):
    """A plan of one's own passes through the same guards and gives whole gradients back."""
    mesh = tensor_mesh()
    module = TwoLayers()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    check_plan(module, plan, 2)
    parallelize_module(module, mesh, plan)
    (module.down(module.up(torch.ones(2, 4))) * module.scale).sum().backward()
    assert shards.full_gradients(module)["up.weight"].shape == (6, 4)


def test_a_plan_of_ones_own_gives_whole_gradients_back():
    run_ranks(_own_plan, 2)

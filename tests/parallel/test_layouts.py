from functools import partial

import pytest
import torch
import torch.distributed as dist
from spawned import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer, next_token_loss
from labkit.parallel.parity import compare, gradients
from labkit.parallel.pipelining.pipeline import Pipeline
from labkit.parallel.scheduling.schedules import one_f_one_b
from labkit.parallel.scheduling.zero_bubble import zero_bubble
from labkit.parallel.sharding.data_parallel import shard_data
from labkit.parallel.sharding.layout_training import LayoutTraining
from labkit.parallel.sharding.layouts import Layout, blocks_of_stage, layouts_of

CPU = torch.device("cpu")
CONFIG = ModelConfig(layers=4, width=32, heads=4, context=16)
IDS = torch.randint(256, (16, 16), generator=torch.Generator().manual_seed(1))
TARGETS = IDS.roll(1, 1)
SGD = partial(torch.optim.SGD, lr=0.5)
CLIP = 1.0  # the model's norm is 3.5


def disturb(model):
    """Biases and norms that are not all equal: with biases of 0, adding one twice shows nothing."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def one_device():
    """Loss, gradients, norm, and weights and loss after a clipped step, of a single process."""
    model = Transformer(CONFIG)
    disturb(model)
    optimizer = SGD(model.parameters())
    loss = next_token_loss(model(IDS), TARGETS)
    loss.backward()
    found = gradients(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    after = next_token_loss(model(IDS), TARGETS)
    return loss.item(), found, norm.item(), dict(model.named_parameters()), after.item()


def _parity(rank, layouts):
    loss, reference, norm, weights, after = one_device()
    assert norm > 2 * CLIP
    found = {}
    for layout in layouts:
        make = partial(LayoutTraining, CONFIG, layout, layout.mesh("cpu"), CPU)
        training = make(make_optimizer=SGD, prepare=disturb)
        key = f"{layout} {layout.style} {layout.order[0]}"
        assert training.backward(IDS, TARGETS) == pytest.approx(loss, rel=1e-6), key
        parity = compare(reference, training.full_gradients())
        assert training.gradient_norm().item() == pytest.approx(norm, rel=1e-6), key
        training.optimizer.zero_grad()
        training.step(IDS, TARGETS, clip=CLIP)
        parameters = compare(weights, training.full_parameters())
        assert training.step(IDS, TARGETS) == pytest.approx(after, rel=1e-6), key
        found[key] = (parity.max_rel_error, parameters.max_rel_error)
    return found


def check_parity(ranks, layouts):
    for found in run_ranks(_parity, ranks, layouts):  # every rank: copies must not drift apart
        assert len(found) == len(layouts)
        assert max(max(errors) for errors in found.values()) < 1e-5, found


def test_every_layout_of_two_ranks_equals_one_device():
    check_parity(
        2,
        [
            *layouts_of(2),
            Layout(data=2, data_style="copies"),
            Layout(tensor=2, tensor_style="dtensor"),
            Layout(tensor=2, sequence=True),
        ],
    )


def test_every_layout_of_four_ranks_equals_one_device():
    check_parity(
        4,
        [
            *layouts_of(4),
            Layout(pipeline=2, data=2, data_style="copies"),
            Layout(data=2, tensor=2, data_style="copies"),
            Layout(data=2, tensor=2, sequence=True),
            Layout(pipeline=2, tensor=2, tensor_style="dtensor"),
            Layout(pipeline=2, tensor=2, order=("tensor", "pipeline", "data")),
            Layout(tensor=4, sequence=True),
        ],
    )


def _wrappers(rank):
    """A zero-bubble schedule takes the backward of FSDP2's modules apart, unseen by its hooks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    stage = Transformer(CONFIG, layers=blocks_of_stage(4, 2, mesh.get_local_rank("pipeline")))
    shard_data(stage, mesh["data"], reshard_after_forward=True)
    with pytest.raises(ValueError, match="FSDP2, whose hooks lose gradients.*use 1F1B or GPipe"):
        Pipeline(stage, zero_bubble(2, 4), group=mesh["pipeline"].get_group())
    wrapped = DistributedDataParallel(
        Transformer(CONFIG, layers=blocks_of_stage(4, 2, mesh.get_local_rank("pipeline"))),
        process_group=mesh["data"].get_group(),
    )
    with pytest.raises(ValueError, match="wrapped in DDP.*sum_gradients"):
        Pipeline(wrapped, one_f_one_b(2, 4), group=mesh["pipeline"].get_group())


def test_fsdp_under_a_zero_bubble_schedule_and_ddp_in_a_pipeline_are_refused():
    run_ranks(_wrappers, 4)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"tensor": 0}, "tensor=0 must be at least 1"),
        ({"order": ("data", "tensor")}, "must name pipeline, data, tensor once each"),
        ({"data_style": "ddp"}, "data_style='ddp' must be 'fsdp' or 'copies'"),
        ({"tensor_style": "auto"}, "tensor_style='auto' must be"),
        ({"tensor": 2, "sequence": True, "tensor_style": "hand"}, "use tensor_style='dtensor'"),
        ({"tensor": 2, "data": 2, "tensor_style": "hand"}, "use tensor_style='dtensor'"),
        ({"tensor": 2, "pipeline": 2, "sequence": True}, "the whole model on each"),
        ({"sequence": True}, "needs tensor ranks"),
    ],
)
def test_a_layout_that_does_not_work_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Layout(**settings)


def test_a_model_or_batch_that_does_not_divide_is_refused_with_sizes_that_do():
    with pytest.raises(ValueError, match="heads=4 must be divisible by t=3.* are 1, 2, 4"):
        Layout(tensor=3).check(CONFIG.with_(width=96, heads=4), 16)
    with pytest.raises(ValueError, match="need a block each, there are layers=4"):
        Layout(pipeline=5).check(CONFIG, 16)
    with pytest.raises(ValueError, match="batch=18.* 8 in all; try batch=16"):
        Layout(pipeline=2, data=2).check(CONFIG, 18)


def test_layouts_of_four_devices_and_their_names():
    assert [str(layout) for layout in layouts_of(4)] == [
        "pipeline 4",
        "pipeline 2 x data 2 (fsdp)",
        "pipeline 2 x tensor 2",
        "data 4 (fsdp)",
        "data 2 (fsdp) x tensor 2",
        "tensor 4",
    ]
    assert str(Layout()) == "one device"
    assert Layout(tensor=2).style == "hand"
    assert Layout(tensor=2).with_(data=2).style == "dtensor"


def _too_few(rank):
    with pytest.raises(ValueError, match="tensor 4 needs 4 ranks, there are 2"):
        Layout(tensor=4).mesh("cpu")
    mesh = Layout(data=2).mesh("cpu")
    training = LayoutTraining(CONFIG, Layout(data=2), mesh, CPU)
    with pytest.raises(ValueError, match="batch=3 rows.*try batch=2"):
        training.step(IDS[:3], TARGETS[:3])
    dist.barrier()


def test_a_wrong_number_of_ranks_and_uneven_rows_are_refused():
    run_ranks(_too_few, 2)

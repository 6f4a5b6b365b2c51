import pytest
import torch
from spawned import run_ranks

from labkit.devices.machines import machine
from labkit.measure.memory import held_bytes
from labkit.measure.virtual.virtual_clock import play
from labkit.measure.virtual.virtual_step import record_step
from labkit.models.config import preset
from labkit.models.transformer import Transformer, next_token_loss
from labkit.parallel.planning.layer_operators import LayerOperators, adamw_operators
from labkit.parallel.planning.layout_memory import predict_state_bytes
from labkit.parallel.planning.step_prediction import axis_groups, predict_step_s
from labkit.parallel.sharding.layout_training import LayoutTraining
from labkit.parallel.sharding.layouts import Layout, layouts_of

CONFIG = preset("tiny").model
BATCH = 16
IDS = torch.randint(256, (BATCH, CONFIG.context), generator=torch.Generator().manual_seed(1))
MACHINES = ["a6000-pcie", "a6000-nvlink", "a100-80-nvlink"]


def one_device():
    model = Transformer(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        loss = next_token_loss(model(IDS), IDS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return record_step(step)


def _record(rank, layouts):
    recordings = []
    for layout in layouts:
        training = LayoutTraining(CONFIG, layout, layout.mesh("cpu"), torch.device("cpu"))
        recordings.append(record_step(lambda: training.step(IDS, IDS)))  # noqa: B023
        training.backward(IDS, IDS)
        held = held_bytes(training.model, training.optimizer)
        assert held == predict_state_bytes(CONFIG, layout, stage=training.stage), str(layout)
    return recordings


def record(layouts):
    """Recordings of all ranks, by layout."""
    by_rank = run_ranks(_record, layouts[0].ranks, layouts)
    return dict(zip(map(str, layouts), zip(*by_rank, strict=True), strict=True))


def check(layout, recordings, name, width, rel):
    virtual = machine(name, layout.ranks).scaled(width)
    modelled = play(recordings, virtual).step_time_s
    predicted = predict_step_s(CONFIG, layout, virtual, BATCH)
    assert predicted == pytest.approx(modelled, rel=rel), f"{layout} on {virtual.name}"


@pytest.mark.parametrize("name", MACHINES)
def test_one_device_is_predicted(name):
    for width in (1, 32):
        check(Layout(), [one_device()], name, width, rel=0.01)


def test_tensor_parallelism_loses_over_pcie_and_wins_over_nvlink_as_predicted():
    """The same card, and the lab's model standing for one of width 512."""
    layouts = [
        Layout(tensor=2),
        Layout(tensor=2, sequence=True),
        Layout(tensor=2, tensor_style="dtensor"),
    ]
    recordings = [pair for pair in zip(*run_ranks(_record, 2, layouts), strict=True)]
    for layout, pair in zip(layouts, recordings, strict=True):
        for name in MACHINES:
            check(layout, pair, name, 4, rel=0.05)
    alone = one_device()
    speedups = {
        name: play([alone], machine(name, 2).scaled(4)).step_time_s
        / play(recordings[0], machine(name, 2).scaled(4)).step_time_s
        for name in MACHINES
    }
    assert speedups["a6000-pcie"] < 0.99 and speedups["a6000-nvlink"] > 1.01
    assert speedups["a100-80-nvlink"] > 1.2


def test_time_and_state_of_every_layout_of_four_devices_are_predicted():
    layouts = [*layouts_of(4), Layout(data=2, tensor=2, data_style="copies")]
    found = record(layouts)
    for layout in layouts:
        for name in ("a6000-pcie", "a100-80-nvlink"):
            check(layout, found[str(layout)], name, 32, rel=0.1)


def test_the_slow_axis_on_the_slow_link_costs_and_the_order_decides_which_it_is():
    bridged = machine("a6000-nvlink", 4).scaled(8)
    near = Layout(data=2, tensor=2)
    far = near.with_(order=("tensor", "pipeline", "data"))
    assert axis_groups(near, "tensor") == [(0, 1), (2, 3)] == axis_groups(far, "data")
    times = [predict_step_s(CONFIG, layout, bridged, BATCH) for layout in (near, far)]
    assert times[0] < 0.95 * times[1]


def test_operators_by_hand():
    config = CONFIG.with_(width=4, heads=1, context=2, layers=1)
    forward = LayerOperators(config, rows=1, tensor=1).block_forward()
    # (2, 4) @ (4, 4): 2 * 2 * 4 * 4 FLOPs; 8 + 16 + 8 values
    assert forward[0] == (64, 4 * 32)
    assert sum(operator.flops for operator in forward) == 4 * 64 + 2 * 256 + 2 * 2 * 2 * 2 * 4
    halved = LayerOperators(config.with_(heads=2), rows=1, tensor=2).block_forward()
    assert halved[0] == (32, 4 * (8 + 8 + 4))
    assert len(adamw_operators([3, 5])) == 2 * 10


def test_a_machine_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="tensor 4 needs 4 devices, a6000-pcie-2x has 2"):
        predict_step_s(CONFIG, Layout(tensor=4), machine("a6000-pcie", 2), BATCH)

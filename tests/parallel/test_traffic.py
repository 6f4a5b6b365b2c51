import pytest
import torch
from spawned import run_ranks
from torch.distributed.tensor.debug import CommDebugMode

from labkit.measure.virtual.virtual_step import record_step
from labkit.models.config import ModelConfig
from labkit.parallel.sharding.layout_training import LayoutTraining
from labkit.parallel.sharding.layouts import Layout, layouts_of
from labkit.parallel.sharding.traffic import Count, counted_traffic, predict_traffic

CPU = torch.device("cpu")
CONFIG = ModelConfig(layers=2, width=16, heads=4, context=8, vocabulary=63)  # 63: FSDP2 pads it
IDS = torch.randint(63, (8, 8), generator=torch.Generator().manual_seed(1))
ACTIVATION = 8 * 8 * 16 * 4  # bytes of (B, T, D)


def test_a_tensor_parallel_step_has_four_all_reduces_a_block():
    predicted = predict_traffic(CONFIG, Layout(tensor=2), 8)
    assert predicted == {("tensor", "all_reduce"): Count(8, 8 * ACTIVATION)}
    split = predict_traffic(CONFIG, Layout(pipeline=2, tensor=2), 8)
    assert split["tensor", "all_reduce"] == Count(4 * 4, 4 * ACTIVATION)  # one block, m = 4


def test_sequence_parallelism_moves_the_same_bytes_in_halves():
    predicted = predict_traffic(CONFIG, Layout(tensor=2, sequence=True), 8)
    assert predicted["tensor", "all_gather"] == Count(4 * 2 + 2, 10 * ACTIVATION)
    assert predicted["tensor", "reduce_scatter"] == Count(4 * 2, 8 * ACTIVATION)
    assert predicted["tensor", "all_reduce"].number == 1  # the norms' gradients


def test_fsdp_gathers_a_block_twice_and_scatters_each_unit_once():
    predicted = predict_traffic(CONFIG, Layout(data=2), 8)
    assert predicted["data", "all_gather"].number == 2 * 2 + 1
    assert predicted["data", "reduce_scatter"].number == 2 + 1
    assert predicted["data", "all_reduce"] == Count(1, 4)  # the loss


def test_whole_copies_move_every_gradient_once():
    predicted = predict_traffic(CONFIG, Layout(data=2, data_style="copies"), 8)
    assert predicted["data", "all_reduce"] == Count(2, 4 * CONFIG.num_parameters + 4)


def test_one_device_moves_nothing_and_a_batch_that_does_not_divide_is_refused():
    assert predict_traffic(CONFIG, Layout(), 8) == {}
    with pytest.raises(ValueError, match="batch=9"):
        predict_traffic(CONFIG, Layout(data=2), 9)


def _count(rank, layouts):
    for layout in layouts:
        mesh = layout.mesh("cpu")
        training = LayoutTraining(CONFIG, layout, mesh, CPU)
        recording = record_step(lambda: training.step(IDS, IDS))  # noqa: B023
        predicted = predict_traffic(CONFIG, layout, 8, stage=training.stage)
        counted = counted_traffic(recording, mesh)
        assert counted == predicted, f"{layout}: {counted}, predicted {predicted}"
        assert recording.unknown_operators == {}
        if layout.pipeline == 1:  # torch's own counter trips over a pipeline's backward
            with CommDebugMode() as seen:
                training.step(IDS, IDS)
            expected = sum(count.number for count in predicted.values())
            assert seen.get_total_counts() == expected, str(layout)


def test_what_is_counted_is_what_was_predicted_in_every_layout_of_four_ranks():
    layouts = [
        Layout(pipeline=2, data=2),
        Layout(pipeline=2, tensor=2),
        *layouts_of(4)[3:],
        Layout(data=4, data_style="copies"),
        Layout(pipeline=2, data=2, data_style="copies"),
        Layout(tensor=4, sequence=True),
        Layout(tensor=4, tensor_style="dtensor"),
        Layout(data=2, tensor=2, sequence=True),
        Layout(data=2, tensor=2, sequence=True, data_style="copies"),
    ]
    run_ranks(_count, 4, layouts)

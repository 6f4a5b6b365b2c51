import pickle
from statistics import median
from time import thread_time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spawned import run_ranks
from torch import nn

from labkit.measure.regions import region
from labkit.measure.virtual import communication
from labkit.measure.virtual.live_storages import VirtualOutOfMemoryError
from labkit.measure.virtual.operator_costs import classify
from labkit.measure.virtual.recorder import Recorder
from labkit.models.config import preset
from labkit.models.transformer import Transformer


def record(function, **settings):
    recorder = Recorder(**settings)
    with recorder:
        result = function()
    return result, recorder.take()


def test_a_product_counts_its_flops_bytes_and_storages():
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    c, recording = record(lambda: a @ b)
    (event,) = recording.events
    assert (event.name, event.flops, event.dtype) == ("aten::mm", 2 * 2 * 3 * 4, "float32")
    assert event.num_bytes == 4 * (2 * 3 + 3 * 4 + 2 * 4)
    assert len({*event.reads, *event.writes}) == 3
    assert torch.equal(c, a @ b)


def test_backward_runs_through_the_recorder_with_its_flops():
    net, x = nn.Linear(8, 16), torch.ones(4, 8, requires_grad=True)
    _, recording = record(lambda: net(x).sum().backward())
    # forward 2*4*8*16, backward the same for the input's and for the weight's gradient
    assert recording.flops == 3 * 2 * 4 * 8 * 16


def test_attention_on_the_cpu_counts_as_torch_counts_it_on_cuda():
    q = torch.ones(2, 3, 8, 16, requires_grad=True)
    _, recording = record(lambda: F.scaled_dot_product_attention(q, q, q).sum().backward())
    one_product = 2 * (2 * 3) * 8 * 8 * 16
    assert recording.flops == (2 + 5) * one_product
    assert recording.unknown_operators == {}


def test_writing_a_few_rows_of_a_large_tensor_costs_those_rows():
    large, rows, places = torch.zeros(1000, 4), torch.ones(2, 4), torch.tensor([7, 9])

    def write():
        large[places] = rows

    _, recording = record(write)
    assert [event.num_bytes for event in recording.events] == [2 * (2 * 4 * 4 + 2 * 8)]


def test_a_view_costs_nothing_and_names_the_same_storage():
    x = torch.ones(4, 4)
    _, recording = record(lambda: (x.add_(1), x[1:].t().add_(1)))
    first, second = (event for event in recording.events if event.name == "aten::add_")
    assert first.writes == second.writes == first.reads[:1]
    assert first.num_bytes == 2 * 64 and second.num_bytes == 2 * 48


def test_in_place_operators_without_a_result_still_write():
    xs = [torch.ones(4), torch.ones(2)]
    _, recording = record(lambda: torch._foreach_mul_(xs, 2.0))
    (event,) = recording.events
    assert event.writes == event.reads and len(event.writes) == 2
    assert event.num_bytes == 2 * (16 + 8)


def test_a_copy_and_a_fill_count_what_they_overwrite_once():
    x, y = torch.ones(4), torch.ones(4)
    _, recording = record(lambda: (x.copy_(y), x.zero_(), x.fill_(3.0)))
    assert [event.num_bytes for event in recording.events] == [32, 16, 16]


def test_an_operator_that_changes_an_argument_and_returns_new_tensors_writes_both():
    norm, x = nn.BatchNorm1d(4), torch.ones(8, 4)
    recorder = Recorder()
    with recorder:
        y = norm(x)
        live = recorder.storages.bytes
    event = next(e for e in recorder.take().events if "batch_norm" in e.name)
    assert len(set(event.writes)) >= 3  # the result and the two running statistics
    assert live >= x.nbytes + y.nbytes


def test_meta_tensors_take_neither_time_nor_memory():
    _, recording = record(lambda: torch.ones(1000, device="meta") + 1)
    assert recording.events == () and recording.peak_bytes == 0


def test_an_embedding_reads_only_the_rows_it_takes():
    table, ids = nn.Embedding(1000, 4), torch.tensor([1, 2, 3])
    _, recording = record(lambda: table(ids))
    assert [e.num_bytes for e in recording.events] == [2 * 3 * 4 * 4]


def test_an_expanded_tensor_counts_its_elements_once():
    x = torch.ones(1, 4).expand(100, 4)
    _, recording = record(lambda: x.sum())
    assert recording.events[0].num_bytes == 16 + 4


def test_a_storage_number_is_not_used_again_after_its_storage_is_freed():
    def many():
        for _ in range(50):
            torch.ones(64) + 1  # the allocator hands the same addresses out again and again

    _, recording = record(many)
    written = [storage for event in recording.events for storage in event.writes]
    assert len(written) == len(set(written)) == 100


def test_live_bytes_go_up_and_down_with_the_storages():
    recorder = Recorder()
    with recorder:
        a = torch.ones(1000)
        b = a + 1
        assert recorder.storages.bytes == 8000
        view = b[:10]
        del b
        assert recorder.storages.bytes == 8000  # the view keeps it
        del view
        assert recorder.storages.bytes == 4000
    assert recorder.take().peak_bytes == 8000
    assert a.nbytes == 4000


def test_held_modules_and_optimizers_count_from_the_start():
    net = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    recorder = Recorder()
    recorder.hold(net, optimizer)
    step_counter = 4
    assert recorder.storages.bytes == 4 * 400 + step_counter  # weight, gradient, two moments
    recorder.hold(net)
    assert recorder.storages.bytes == 4 * 400 + step_counter  # no storage counts twice


def test_a_storage_resized_in_place_changes_the_live_bytes():
    recorder, before = Recorder(), torch.UntypedStorage.resize_
    with recorder:
        x = torch.ones(1000)
        x.untyped_storage().resize_(0)
        assert recorder.storages.bytes == 0
        x.untyped_storage().resize_(2000)
        assert recorder.storages.bytes == 2000
    assert torch.UntypedStorage.resize_ is before


def test_the_operator_that_exceeds_the_capacity_says_what_was_asked_held_and_left():
    recorder = Recorder(capacity_bytes=3 << 20)
    a = torch.ones(1 << 18)  # 1 MiB
    recorder.hold(a)
    with pytest.raises(torch.OutOfMemoryError) as error, recorder:
        b = a + 1
        torch.cat([a, b])
    assert "virtual device 0 is out of memory: aten::cat asked for 2.00 MiB" in str(error.value)
    assert "2.00 MiB of 3.00 MiB are held, 1.00 MiB are left" in str(error.value)


def test_running_out_of_memory_in_backward_raises_the_same_error():
    x = torch.ones(1 << 18, requires_grad=True)
    recorder = Recorder(capacity_bytes=(2 << 20) + 64)
    recorder.hold(x)
    with pytest.raises(VirtualOutOfMemoryError), recorder:
        x.exp().sum().backward()


def test_a_model_that_does_not_fit_one_device_fits_half_each():
    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    capacity = 400_000  # one layer is 263,168 bytes
    with pytest.raises(VirtualOutOfMemoryError, match="holding a Sequential asked for 0.50 MiB"):
        Recorder(capacity_bytes=capacity).hold(net)
    for half in net:
        Recorder(capacity_bytes=capacity).hold(half)


def test_an_unknown_operator_costs_its_bytes_and_is_listed():
    x = torch.eye(8)
    _, recording = record(lambda: torch.linalg.svd(x))
    assert recording.unknown_operators == {"aten::_linalg_svd": 1}
    event = next(e for e in recording.events if e.name == "aten::_linalg_svd")
    assert event.flops == 0 and event.num_bytes == 4 * (64 + 64 + 8 + 64)


def test_known_operators_are_not_listed():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step():
        net(torch.ones(1, 1, 8, 8)).square().mean().backward()
        optimizer.step()

    _, recording = record(step)
    assert recording.unknown_operators == {}
    assert classify(torch.ops.aten.convolution_backward.default).flops is not None


def test_regions_nest_and_the_innermost_names_an_event():
    x = torch.ones(2)
    recorder = Recorder()
    with recorder, recorder.region("F0", kind="forward"):
        x + 1
        with region("attention"):
            x + 1
        x + 1
    x = x + 1
    recording = recorder.take()
    assert [recording.region_of(e).label for e in recording.events] == ["F0", "attention", "F0"]
    assert recording.region_of(recording.events[0]).kind == "forward"


def test_a_free_region_without_a_recorder_does_nothing():
    with region("F0"):
        assert torch.ones(1) + 1 == 2


def test_an_optimizer_step_names_its_own_region():
    net = nn.Linear(2, 2)
    net(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _, recording = record(optimizer.step)
    assert {recording.region_of(e) for e in recording.events} == {("optimizer", "optimizer")}


def test_take_starts_the_next_recording_with_storage_numbers_kept():
    x = torch.ones(2)
    recorder = Recorder()
    with recorder:
        x.add_(1)
        first = recorder.take()
        x.add_(1)
    second = recorder.take()
    assert len(first.events) == len(second.events) == 1
    assert first.events[0].writes == second.events[0].writes


def test_a_recording_pickles_and_the_recorded_program_is_unchanged():
    net = nn.Linear(4, 4)
    _, recording = record(lambda: net(torch.ones(2, 4)).sum().backward())
    assert pickle.loads(pickle.dumps(recording)) == recording
    recorded = net.weight.grad.clone()
    net.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    assert torch.equal(recorded, net.weight.grad)


def test_a_receive_from_anyone_cannot_be_timed_and_says_so():
    operator = torch.ops.c10d.recv_any_source_.default
    with pytest.raises(NotImplementedError, match="recv_any_source_ cannot be timed"):
        communication.event_of(operator, ([], None, 0), {}, None, lambda tensor: 0)


def test_recording_takes_at_most_three_times_the_unrecorded_step():
    # benchmarks/recorder.py measures it with care; this only notices when it becomes expensive
    model, ids = Transformer(preset("tiny").model), torch.zeros(2, 64, dtype=torch.long)
    recorder, ratios = Recorder(), []

    def step_s():
        started = thread_time()
        model(ids).sum().backward()
        return thread_time() - started

    step_s()
    for _ in range(7):
        plain_s = step_s()
        with recorder:
            ratios.append(step_s() / plain_s)
    assert median(ratios) <= 3


# ---- real ranks


def _messages_and_collectives(rank):
    recorder = Recorder()
    x, parts = torch.full((4,), float(rank)), [torch.empty(4) for _ in range(2)]
    pair = dist.new_group([0, 1])
    with recorder:
        if rank == 0:
            dist.send(x, 1, tag=7)
        else:
            dist.recv(x, 0, tag=7)
        dist.all_reduce(x)
        work = dist.all_gather(parts, x, group=pair, async_op=True)
        work.wait()
        dist.broadcast(x, 1)
        dist.reduce_scatter_tensor(torch.empty(2), x)
        dist.barrier()
    return recorder.take()


def test_messages_and_collectives_are_recorded_with_group_tag_payload_and_order():
    zero, one = run_ranks(_messages_and_collectives, 2)
    send, receive = zero.events[0], one.events[0]
    assert (send.kind, send.ranks, send.tag, send.num_bytes) == ("send", (1,), 7, 16)
    assert (receive.kind, receive.ranks, receive.tag) == ("recv", (0,), 7)
    assert send.reads and not send.writes and receive.writes and not receive.reads
    seen = [e for e in zero.events if e.kind == "collective"]
    assert [(e.name, e.num_bytes, e.blocking) for e in seen] == [
        ("all_reduce", 16, True),
        ("all_gather", 32, False),
        ("broadcast", 16, True),
        ("reduce_scatter", 16, True),
        ("barrier", 0, True),
    ]
    assert all(e.ranks == (0, 1) for e in seen)
    assert seen[0].reads == seen[0].writes and len(set(seen[1].writes)) == 2
    assert (zero.rank, one.rank) == (0, 1)

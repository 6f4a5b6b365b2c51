"""Whatever engine runs the layer, its step records and plays: torch's own, on real gloo ranks."""

import pickle
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from spawned import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from labkit.devices.machines import machine
from labkit.devices.profiles import uniform_machine
from labkit.measure.virtual.live_storages import VirtualOutOfMemoryError
from labkit.measure.virtual.virtual_clock import play
from labkit.measure.virtual.virtual_step import record_step, stage_regions

LAYERS, WIDTH, ROWS = 8, 32, 64
SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def _pipeline(rank, name, m):
    """A recorded step of torch's stock schedule: LAYERS equal layers over the ranks."""
    p, virtual = dist.get_world_size(), 2 if name == "Interleaved1F1B" else 1
    per = LAYERS // (p * virtual)
    stages = [
        PipelineStage(
            nn.Sequential(*(Layer() for _ in range(per))),
            rank + i * p,
            p * virtual,
            torch.device("cpu"),
        )
        for i in range(virtual)
    ]
    schedule = SCHEDULES[name](
        stages if virtual > 1 else stages[0], m, loss_fn=nn.MSELoss(), scale_grads=False
    )
    x, y = torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)

    def step():
        with stage_regions(*stages):
            schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == p - 1 else {}))

    return record_step(step, hold=[stage.submod for stage in stages])


def _two_rank_pipelines(rank):
    found = {(name, m): _pipeline(rank, name, m) for name in SCHEDULES for m in (2, 4)}
    found["again"] = _pipeline(rank, "1F1B", 4)
    return found


def _four_rank_pipelines(rank):
    found = {name: _pipeline(rank, name, 8) for name in SCHEDULES}
    busy = threading.Event()
    load = threading.Thread(target=_burn, args=(busy,))
    load.start()
    found["1F1B on a loaded machine"] = _pipeline(rank, "1F1B", 8)
    busy.set()
    load.join()
    return found


def _burn(stop):
    while not stop.is_set():
        sum(range(1000))


@pytest.fixture(scope="module")
def four_ranks():
    return _by_name(run_ranks(_four_rank_pipelines, 4))


@pytest.fixture(scope="module")
def two_ranks():
    return _by_name(run_ranks(_two_rank_pipelines, 2))


def _by_name(ranks):
    return {name: [found[name] for found in ranks] for name in ranks[0]}


def _labels(timeline, rank, kind):
    return [s.label for s in timeline.spans if s.rank == rank and s.kind == kind]


def test_every_stock_schedule_records_each_forward_and_backward_once(two_ranks, four_ranks):
    for name, m in ((name, m) for name in SCHEDULES for m in (2, 4)):
        timeline = play(two_ranks[name, m], machine("lab", 2))
        prefixes = {0: ["0", "2"], 1: ["1", "3"]} if "Inter" in name else {0: [""], 1: [""]}
        for rank in (0, 1):
            expected = {f"{s}F{i}" for s in prefixes[rank] for i in range(m)}
            assert set(_labels(timeline, rank, "forward")) == expected, (name, m)
            assert set(_labels(timeline, rank, "backward")) == {
                label.replace("F", "B") for label in expected
            }
    for name in SCHEDULES:
        assert play(four_ranks[name], machine("lab", 4)).num_ranks == 4


def test_the_recorded_flops_are_those_of_the_layers(two_ranks):
    for recordings in two_ranks.values():
        # two products of 2*R*W*4W per layer, three times with backward; the very first layer
        # computes no gradient for its input
        per_product = 2 * ROWS * WIDTH * 4 * WIDTH
        assert sum(r.flops for r in recordings) == (LAYERS * 6 - 1) * per_product


def test_the_boundary_carries_exactly_the_activations(two_ranks):
    first, last = two_ranks["1F1B", 4]
    assert first.sent_bytes() == first.sent_bytes(1) == last.sent_bytes(0) == ROWS * WIDTH * 4
    first, last = two_ranks["Interleaved1F1B", 4]  # three boundaries instead of one, both ways
    assert first.sent_bytes() + last.sent_bytes() == 2 * 3 * ROWS * WIDTH * 4


def test_the_same_program_gives_the_same_timeline_also_on_a_loaded_machine(two_ranks, four_ranks):
    pairs = [
        (two_ranks["1F1B", 4], two_ranks["again"], machine("a6000-pcie", 2)),
        (four_ranks["1F1B"], four_ranks["1F1B on a loaded machine"], machine("lab", 4)),
    ]
    for once, again, its in pairs:
        assert set(play(once, its).spans) == set(play(again, its).spans)


def test_timing_a_recording_on_another_profile_equals_recording_again_for_it(two_ranks):
    # the recording holds nothing of a profile: a second one differs in measured seconds only
    def without_seconds(recording):
        events = tuple(e._replace(own_s=0.0) for e in recording.events)
        return replace(recording, events=events)

    for rank in (0, 1):
        assert without_seconds(two_ranks["1F1B", 4][rank]) == without_seconds(
            two_ranks["again"][rank]
        )
    nvlink, pcie = machine("a6000-nvlink", 2), machine("a6000-pcie", 2)
    assert play(two_ranks["1F1B", 4], nvlink) == replace(
        play(two_ranks["again"], nvlink), provenance=nvlink.provenance
    )
    assert play(two_ranks["1F1B", 4], nvlink) != play(two_ranks["1F1B", 4], pcie)


def test_the_bubble_of_the_inner_stages_is_the_laws_within_three_points(four_ranks):
    p, m = 4, 8
    law = (p - 1) / (m + p - 1)
    quick = machine("lab", p).links[0, 1]
    lab = machine("lab", p).profiles[0]
    bare = replace(lab, message_overhead_s=0.0, launch_overhead_s=0.0)
    free_links = uniform_machine(
        "free links", bare, replace(quick, latency_s=0.0, bandwidth_bytes_per_s=1e15), p
    )
    for name in ("GPipe", "1F1B"):
        timeline = play(four_ranks[name], free_links)
        for inner in (1, 2):
            assert 1 - timeline.busy_share(inner) == pytest.approx(law, abs=0.03), (name, inner)
        # the first stage computes no gradient for its input, so it idles more
        assert 1 - timeline.busy_share(0) > law


def test_one_f_one_b_needs_less_memory_than_gpipe(four_ranks):
    gpipe, one = (four_ranks[name] for name in ("GPipe", "1F1B"))
    assert all(b.peak_bytes <= a.peak_bytes for a, b in zip(gpipe, one, strict=True))
    assert one[3].peak_bytes < gpipe[3].peak_bytes


def test_busy_and_idle_make_up_the_step_and_spans_of_a_device_do_not_overlap(four_ranks):
    for recordings in four_ranks.values():
        timeline = play(recordings, machine("lab", 4))
        for rank in range(4):
            spans = sorted(
                (s.start_s, s.end_s)
                for s in timeline.spans
                if s.rank == rank and s.stream == "compute"
            )
            assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
            idle = timeline.step_time_s - timeline.busy_s(rank)
            assert sum(b - a for a, b in spans) + idle == pytest.approx(timeline.step_time_s)


# ---- tensor parallel, FSDP, optimizer, generation, capacity


def _other_engines(rank):
    mesh = init_device_mesh("cpu", (2,))
    return {
        "tp": _trained(_tensor_parallel(mesh)),
        "fsdp": _trained(_sharded(mesh)),
        "generation": _generation(rank),
        "capacity": _capacity(rank),
    }


def _tensor_parallel(mesh):
    net = nn.Sequential(Layer(), Layer())
    for layer in net:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


def _sharded(mesh):
    net = nn.Sequential(*(Layer() for _ in range(4)))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _trained(net):
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    x = torch.ones(ROWS, WIDTH)

    def step():
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return record_step(step, hold=[net, optimizer], warm_up=2)


def _generation(rank):
    """Two tokens of a two-stage decoder with a cache written in place; the token travels back."""
    layer, cache, token = nn.Linear(WIDTH, WIDTH), torch.zeros(2, WIDTH), torch.zeros(1, WIDTH)

    @torch.no_grad()
    def step():
        for position in range(2):
            if rank:
                dist.recv(token, 0)
            cache[position] = layer(token)[0]
            out = cache[: position + 1].mean(0, keepdim=True)
            dist.send(out, 1 - rank)
            if not rank:
                dist.recv(token, 1)

    return record_step(step, hold=[layer, cache])


def _capacity(rank):
    """The whole net on one device, and its half on each of two."""
    net, x, limit = nn.Sequential(Layer(), Layer()), torch.ones(ROWS, WIDTH), 220_000
    try:
        record_step(lambda: net(x).sum().backward(), hold=[net], capacity_bytes=limit)
        whole = "fits"
    except VirtualOutOfMemoryError as error:
        whole = str(error)
    half = record_step(
        lambda: net[rank](x).sum().backward(), hold=[net[rank]], capacity_bytes=limit
    )
    return whole, half.peak_bytes


@pytest.fixture(scope="module")
def others():
    return _by_name(run_ranks(_other_engines, 2))


def test_tensor_parallel_layers_record_their_all_reduces_and_waits(others):
    zero, one = others["tp"]
    reduces = [e for e in zero.events if e.kind == "collective"]
    # forward once a layer, backward once where an input gradient is needed
    assert [e.name for e in reduces] == ["all_reduce"] * 3
    assert all(e.num_bytes == ROWS * WIDTH * 4 and e.ranks == (0, 1) for e in reduces)
    assert sum(e.kind == "wait" for e in zero.events) == 3
    assert zero.flops == one.flops == (2 * 6 - 1) * (2 * ROWS * WIDTH * 4 * WIDTH) // 2
    timeline = play([zero, one], machine("lab", 2))
    assert len(_labels(timeline, 0, "collective")) == 3 and _labels(timeline, 0, "optimizer")


def test_fsdp_units_record_a_gather_each_way_and_one_reduce_scatter(others):
    zero, _ = others["fsdp"]
    names = [e.name for e in zero.events if e.kind == "collective"]
    assert names.count("reduce_scatter") == 4
    assert 7 <= names.count("all_gather") <= 8  # the last layer may stay gathered for backward
    assert zero.unknown_operators == {}
    timeline = play(others["fsdp"], machine("lab", 2))
    gathers = [
        s
        for s in timeline.spans
        if s.rank == 0 and "all_gather" in s.label and s.kind == "collective"
    ]
    computes = [s for s in timeline.spans if s.rank == 0 and s.stream == "compute"]
    overlap = [
        (g, c) for g in gathers for c in computes if g.start_s < c.end_s and c.start_s < g.end_s
    ]
    assert overlap  # the next layer is gathered while this one computes


def test_a_generation_step_records_its_cache_writes_and_both_messages(others):
    zero, one = others["generation"]
    assert [e.kind for e in zero.events if e.kind in ("send", "recv")] == ["send", "recv"] * 2
    timeline = play([zero, one], machine("a6000-pcie", 2))
    # one token: the stages take turns, but rank 1 posts its receive while rank 0 computes
    assert timeline.overlap_s <= machine("a6000-pcie", 1).profiles[0].message_overhead_s
    assert [
        s.rank for s in sorted(timeline.spans, key=lambda s: s.start_s) if s.kind == "transfer"
    ] == [0, 1, 0, 1]


def test_what_does_not_fit_on_one_device_fits_on_two(others):
    for whole, half in others["capacity"]:
        assert "is out of memory" in whole and "0.21 MiB are held" in whole
        assert half <= 220_000


def test_recordings_of_ranks_pickle(others):
    for recording in (*others["tp"], *others["fsdp"]):
        assert pickle.loads(pickle.dumps(recording)) == recording

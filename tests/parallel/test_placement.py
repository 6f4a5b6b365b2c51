"""Placement: by hand, equal to brute force on random small cases, and refusals with figures."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from labkit.devices.machines import machine
from labkit.devices.profiles import Link
from labkit.models.config import ModelConfig
from labkit.parallel.placing.costs import LayerCost
from labkit.parallel.placing.placement import even_split, microbatches_in_flight, place
from labkit.parallel.placing.placement_plan import Placement, PlacementDevice, machine_devices
from labkit.parallel.planning.layer_chains import LabChain
from labkit.parallel.planning.layer_costs import layer_costs
from labkit.parallel.scheduling.replay import replay
from labkit.parallel.scheduling.schedules import (
    Action,
    gpipe,
    interleaved_one_f_one_b,
    naive,
    one_f_one_b,
)
from labkit.parallel.scheduling.waterfall import waterfall


def layer(name="x", flops=3, state=0, kept=0, output=0):
    """A third of the FLOPs forward; all of the state in the weights."""
    return LayerCost(name, flops // 3, flops - flops // 3, state, 0, 0, kept, output)


def wire(bytes_per_s, latency_s=0.0):
    return Link("wire", bytes_per_s, latency_s, "made up")


def devices(*memory, flops_per_s=1.0, link=None):
    return [PlacementDevice(f"gpu {i}", flops_per_s, m, link) for i, m in enumerate(memory)]


def test_a_heavy_head_gets_a_device_of_its_own():
    costs = [layer(flops=f) for f in (0, 6, 6, 6, 6, 24)]
    placed = place(costs, devices(None, None))
    assert placed.cuts == (5,)
    assert placed.stage_time_s == (24, 24)


def test_a_fast_device_gets_more_layers():
    costs = [layer(flops=6)] * 6
    fast, slow = PlacementDevice("fast", 2.0), PlacementDevice("slow", 1.0)
    assert place(costs, [fast, slow]).cuts == (4,)
    assert place(costs, [slow, fast]).cuts == (2,)


def test_a_cut_avoids_the_layer_with_the_large_output():
    sizes = [10, 1000, 10, 10]
    costs = [layer(flops=6, output=size) for size in sizes]
    free = place(costs, devices(None, None))
    dear = place(costs, devices(None, None, link=wire(100.0)))
    assert free.cuts == (2,)
    assert dear.cuts == (1,)
    # 18 of work, and 10 bytes sent each way over 100 bytes/s
    assert dear.stage_time_s == pytest.approx((6.1, 18.1))


def test_an_inner_stage_sends_both_ways():
    costs = [layer(flops=3, output=10)] * 3
    placed = place(costs, devices(None, None, None, link=wire(10.0, latency_s=0.5)))
    assert placed.transfer_s == (1.5, 3.0, 1.5)


def test_memory_moves_the_cut():
    costs = [layer(flops=3, state=10), *[layer(flops=3, state=30)] * 3]
    assert place(costs, devices(100, 100)).cuts == (2,)
    assert place(costs, devices(100, 30)).cuts == (3,)


def test_activations_count_once_for_each_microbatch_in_flight():
    costs = [layer(kept=10, state=5)] * 2
    assert place(costs, devices(None, None), num_microbatches=8).memory_bytes == (25, 15)
    all_held = place(costs, devices(None, None), num_microbatches=8, schedule=gpipe)
    assert all_held.memory_bytes == (85, 85)


def test_of_equally_fast_partitions_the_one_with_less_peak_memory_wins():
    costs = [layer(flops=6, state=1), layer(flops=0, state=9), layer(flops=6, state=5)]
    assert place(costs, devices(None, None)).cuts == (2,)  # 10 and 5, not 1 and 14


def test_of_partitions_equal_in_time_and_memory_the_earlier_cut_wins():
    costs = [layer(flops=6, state=5), layer(flops=0), layer(flops=0), layer(flops=6, state=5)]
    assert place(costs, devices(None, None)).cuts == (1,)


def test_every_device_gets_a_layer_even_if_it_would_be_faster_without():
    costs = [layer(flops=9), layer(flops=0), layer(flops=0)]
    assert place(costs, devices(None, None, None)).cuts == (1, 2)


def test_the_same_device_object_may_stand_for_several_devices():
    device = PlacementDevice("gpu", 1.0, link_to_next=wire(10.0))
    placed = place([layer(flops=3, output=10)] * 3, [device] * 3)
    assert placed.transfer_s == (1, 2, 1)


# ---- against brute force -------------------------------------------------------------------------

SMALL = st.integers(0, 12)


@st.composite
def cases(draw):
    n = draw(st.integers(1, 7))
    p = draw(st.integers(1, min(n, 4)))
    costs = [layer(f"l{i}", draw(SMALL), draw(SMALL), draw(SMALL), draw(SMALL)) for i in range(n)]
    capacity = st.one_of(st.none(), st.integers(1, 60))
    rate = st.sampled_from([1.0, 2.0, 3.0])
    links = st.one_of(st.none(), st.builds(wire, st.sampled_from([1.0, 3.0]), st.just(0.5)))
    equal = draw(st.booleans())
    one = PlacementDevice("d", draw(rate), draw(capacity), draw(links))
    several = [PlacementDevice(f"d{i}", draw(rate), draw(capacity), draw(links)) for i in range(p)]
    schedule = draw(st.sampled_from([one_f_one_b, gpipe]))
    return costs, [one] * p if equal else several, draw(st.integers(1, 5)), schedule


def brute_force(costs, devices, m, schedule):
    """(slowest stage, peak memory, cuts) of the best partition, or None where none fits."""
    in_flight = microbatches_in_flight(schedule, len(devices), m)
    best = None
    for cuts in combinations(range(1, len(costs)), len(devices) - 1):
        edges = (0, *cuts, len(costs))
        times, memories = [], []
        for i, device in enumerate(devices):
            held = costs[edges[i] : edges[i + 1]]
            time = sum(c.forward_flops + c.backward_flops for c in held) / device.flops_per_s
            if i + 1 < len(devices) and device.link_to_next:
                time += device.link_to_next.transfer_s(held[-1].output_bytes)
            if i > 0 and devices[i - 1].link_to_next:
                time += devices[i - 1].link_to_next.transfer_s(costs[edges[i] - 1].output_bytes)
            times.append(time)
            kept = sum(c.activation_bytes for c in held)
            memories.append(sum(c.parameter_bytes for c in held) + in_flight[i] * kept)
        if any(d.memory_bytes is not None and m > d.memory_bytes
               for m, d in zip(memories, devices, strict=True)):  # fmt: skip
            continue
        candidate = (max(times), max(memories), cuts)
        best = candidate if best is None else min(best, candidate)
    return best


@settings(max_examples=500, deadline=None)
@given(cases())
def test_the_placement_is_the_best_of_all_partitions(case):
    costs, targets, m, schedule = case
    best = brute_force(*case)
    if best is None:
        with pytest.raises(ValueError, match="do not fit"):
            place(costs, targets, num_microbatches=m, schedule=schedule)
        return
    placed = place(costs, targets, num_microbatches=m, schedule=schedule)
    assert (placed.slowest_stage_s, max(placed.memory_bytes), placed.cuts) == best


@settings(max_examples=150, deadline=None)
@given(cases())
def test_what_a_refusal_says_would_do_does_and_nothing_less(case):
    costs, targets, m, schedule = case
    assume(brute_force(*case) is None)
    with pytest.raises(ValueError) as refused:
        place(costs, targets, num_microbatches=m, schedule=schedule)
    enough = int(re.search(r"\((\d+) bytes\) each", str(refused.value))[1])
    assert brute_force(costs, devices(*[enough] * len(targets)), m, schedule)
    if enough > 1:
        assert not brute_force(costs, devices(*[enough - 1] * len(targets)), m, schedule)
    count = re.search(r"or (\d+) devices", str(refused.value))
    most = int(count[1]) if count else len(costs) + 1
    for tried in range(len(targets) + 1, most):
        more = [*targets, *[targets[-1]] * (tried - len(targets))]
        assert brute_force(costs, more, m, schedule) is None
    if count:
        more = [*targets, *[targets[-1]] * (most - len(targets))]
        assert brute_force(costs, more, m, schedule)


# ---- refusals ------------------------------------------------------------------------------------


def test_a_refusal_has_what_each_device_needs_and_holds_and_what_would_do():
    costs = [layer(state=1 << 30)] * 6
    message = (
        "6 layers do not fit on 2 devices with m=1. The nearest split: gpu 0 needs 3.00 GiB of "
        r"2.00 GiB, gpu 1 needs 3.00 GiB of 2.00 GiB. What would do: 2 devices of 3.00 GiB "
        r"\(3221225472 bytes\) each, or 3 devices when the further ones are like gpu 1"
    )
    with pytest.raises(ValueError, match=message):
        place(costs, devices(2 << 30, 2 << 30))


def test_a_layer_larger_than_any_device_is_refused_for_every_count():
    with pytest.raises(ValueError, match="21 B.* each, but no number of devices up to 3"):
        place([layer(state=1), layer(state=20), layer(state=1)], devices(10, 10))


def test_more_devices_than_layers_are_refused():
    with pytest.raises(ValueError, match="2 layers on 3 devices.* try 1 to 2 devices"):
        place([layer()] * 2, devices(None, None, None))


def test_a_schedule_with_several_stages_per_rank_is_refused():
    with pytest.raises(ValueError, match="4 stages on 2 ranks.* one stage per rank"):
        place([layer()] * 4, devices(None, None), num_microbatches=2,
              schedule=interleaved_one_f_one_b)  # fmt: skip


def test_a_placement_by_hand_needs_ascending_cuts_and_one_entry_per_device():
    with pytest.raises(ValueError, match=r"cuts=\(2, 2\) must be 2 ascending numbers within 1..3"):
        Placement((layer(),) * 4, tuple(devices(None, None, None)), (2, 2), (1, 1, 1))
    with pytest.raises(ValueError, match=r"in_flight=\(1,\) must have one entry per device, 2"):
        Placement((layer(),) * 4, tuple(devices(None, None)), (2,), (1,))


def test_a_device_needs_a_rate_and_a_capacity_above_zero():
    with pytest.raises(ValueError, match="gpu: flops_per_s=0 must be above 0"):
        PlacementDevice("gpu", 0)
    with pytest.raises(ValueError, match="gpu: memory_bytes=0 must be above 0"):
        PlacementDevice("gpu", 1.0, 0)


# ---- what a placement shows and feeds ------------------------------------------------------------


def test_an_even_split_counts_layers_and_nothing_else():
    costs = [layer(flops=f) for f in (0, 6, 6, 6, 24)]
    assert even_split(costs, devices(None, None)).cuts == (3,)
    assert even_split(costs, devices(None, None)).stage_time_s == (12, 30)


def test_the_table_names_layers_times_and_memory():
    costs = [layer("embed", 0), layer("a", 3_000, state=2048), layer("head", 6_000, state=1024)]
    placed = place(costs, devices(4096, None, flops_per_s=1e6))
    assert str(placed).splitlines() == [
        "3 layers on 2 devices, slowest stage 6 ms per microbatch (predicted)",
        "device  layers          time per microbatch  of slowest  memory    capacity",
        "gpu 0   embed to a (2)  3 ms                 50%         2.00 KiB  4.00 KiB",
        "gpu 1   head            6 ms                 100%        1.00 KiB  no limit",
    ]
    assert "<td>embed to a (2)</td>" in placed._repr_html_()


def test_the_figure_has_a_bar_for_every_device_and_units_on_its_axes():
    figure = place([layer(state=5)] * 3, devices(100, 100, None)).draw()
    time_axes, memory_axes = figure.axes
    assert len(time_axes.patches) == 3 * 3 and len(memory_axes.patches) == 3
    assert "[ms]" in time_axes.get_xlabel() and "[MiB]" in memory_axes.get_xlabel()
    assert "(predicted)" in figure.get_suptitle()


def test_a_placement_gives_the_replay_its_costs():
    costs = [layer(flops=f, output=8) for f in (3, 6, 9)]
    placed = place(costs, devices(None, None, link=wire(4.0)))
    assert placed.cuts == (2,)
    # forward 3 and 3, backward 6 and 6, a message of 2 s each way
    assert replay(naive(2), placed.step_costs()).step_time_s == 3 + 2 + 3 + 6 + 2 + 6
    split = placed.step_costs()
    assert [split.of_action(Action(stage, k, 0)) for stage in (0, 1) for k in "IW"] == [0, 6, 3, 3]
    parts = waterfall(one_f_one_b(2, 4), placed.step_costs())
    assert parts.imbalance_s == 0 and parts.transfer_s > 0


def test_the_lab_model_on_four_cards_balances_embedding_and_head_with_the_blocks():
    config = ModelConfig(layers=24, width=1024, heads=16, context=1024)
    costs = layer_costs(LabChain(config), 2)
    targets = machine_devices(machine("a6000-nvlink", 4))
    best = place(costs, targets, num_microbatches=8)
    even = even_split(costs, targets, num_microbatches=8)
    assert [len(held) for held in best.ranges] == [7, 6, 6, 7]
    assert best.slowest_stage_s < 0.9 * even.slowest_stage_s

import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from labkit.devices.inventory import Device
from labkit.measure import timers
from labkit.measure.timers import StepTimes, model_flops_utilisation, time_steps


def test_first_call_warm_up_and_steady_state_are_three_numbers():
    pauses_s = iter([0.08, 0.04, 0.04, 0.01, 0.01, 0.01])
    times = time_steps(lambda: time.sleep(next(pauses_s)), steps=3, warmup=2)
    assert times.n == 3 and len(times.warmup_s) == 2
    assert times.first_s > min(times.warmup_s) > times.median_s


def test_median_spread_and_rate_are_those_of_the_counted_calls():
    times = StepTimes(9.0, (5.0,), (1.0, 2.0, 2.0, 2.0, 3.0))
    assert (times.median_s, times.spread_s, times.n) == (2.0, 0.0, 5)
    assert times.per_second(1024) == 512


def test_every_placed_device_is_synchronised_before_and_after_a_call(monkeypatch):
    seen = []
    monkeypatch.setattr(timers, "synchronize", lambda devices: seen.append(tuple(devices)))
    placed = (torch.device("cpu"), torch.device("meta"))
    time_steps(lambda: seen.append("step"), devices=placed, steps=1, warmup=0)
    assert seen == [placed, "step", placed] * 2  # the first call and one counted


@pytest.mark.parametrize("steps, warmup", [(0, 0), (1, -1)])
def test_counts_out_of_range_are_named(steps, warmup):
    with pytest.raises(ValueError, match=f"steps={steps}.*warmup={warmup}"):
        time_steps(lambda: None, steps=steps, warmup=warmup)


def _rank(rank, store, answers):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    times = time_steps(
        lambda: time.sleep(0.06 if rank == 1 else 0.0), steps=3, group=dist.group.WORLD
    )
    answers.put((rank, times.steady_s))
    dist.destroy_process_group()


def test_the_slowest_rank_counts_and_all_ranks_get_the_same_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (str(tmp_path / "store"), answers), nprocs=2)
    first, second = (answers.get()[1] for _ in range(2))
    assert first == second and min(first) >= 0.06


def test_utilisation_needs_a_published_peak():
    known = Device("cuda", 0, "X1", peak_flops={"float32": 1e12})
    assert model_flops_utilisation(5e11, 1.0, known) == 0.5
    assert model_flops_utilisation(5e11, 1.0, known, "bfloat16") is None
    assert model_flops_utilisation(5e11, 1.0, Device("cpu", 0, "X1")) is None

"""Continuous batching gives the tokens of each request alone, sooner than static batching."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from spawned import run_ranks

from labkit.devices.machines import LAB_WIDTH, machine
from labkit.models.config import ModelConfig
from labkit.models.decoder import LabDecoder
from labkit.models.transformer import Transformer
from labkit.parallel.generation.generate import generate
from labkit.parallel.generation.rank_runners import LayersOnRanks, TensorOnRanks
from labkit.parallel.generation.requests import Answer, Request, Served, random_requests
from labkit.parallel.generation.runners import OneDevice, even_layers
from labkit.parallel.generation.sampling import GREEDY, Sampling
from labkit.parallel.generation.serving import serve
from labkit.parallel.generation.step_clocks import RealClock, VirtualStepClock

CONFIG = ModelConfig(layers=4, width=32, heads=4, context=48, vocabulary=64)
SAMPLED = Sampling(temperature=1.0, top_p=0.9, seed=5)
REQUESTS = random_requests(10, per_s=200.0, vocabulary=64, new_tokens=range(1, 25))


def one_device() -> OneDevice:
    return OneDevice(LabDecoder(Transformer(CONFIG)))


def lab_clock(count: int = 1, group=None) -> VirtualStepClock:
    return VirtualStepClock(machine("lab", count), group, decode_width=LAB_WIDTH)


def alone(sampling) -> tuple[tuple[int, ...], ...]:
    """Each request's tokens without company; draws go by a prompt's place, so that is kept."""
    made = []
    for request in REQUESTS:
        prompts = [request.prompt] * (request.number + 1)
        tokens = generate(
            one_device(), prompts, new_tokens=request.new_tokens, sampling=sampling
        ).tokens
        made.append(tokens[-1])
    return tuple(made)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_depend_neither_on_slots_nor_on_the_way_of_batching(sampling):
    expected = alone(sampling)
    for slots, continuous in ((1, True), (3, True), (3, False), (10, True)):
        settings = dict(slots=slots, continuous=continuous, sampling=sampling)
        served = serve(one_device(), REQUESTS, clock=lab_clock(), **settings)
        assert served.tokens == expected
        assert served.provenance.startswith("virtual:lab")


def test_continuous_batching_finishes_sooner_and_keeps_its_slots_fuller():
    static, continuous = (
        serve(one_device(), REQUESTS, slots=3, clock=lab_clock(), continuous=way)
        for way in (False, True)
    )
    assert continuous.tokens_per_s > 1.2 * static.tokens_per_s
    assert continuous.latency_s(95) < static.latency_s(95)
    assert continuous.slot_use > static.slot_use + 0.1


def test_virtual_time_is_the_same_every_time():
    first, second = (serve(one_device(), REQUESTS, slots=3, clock=lab_clock()) for _ in range(2))
    assert first == second


def test_a_stop_token_frees_the_slot():
    longest = max(REQUESTS, key=lambda request: request.new_tokens)
    stop = {alone(GREEDY)[longest.number][1]}
    served = serve(one_device(), REQUESTS, slots=3, clock=lab_clock(), stop=stop)
    assert len(served.answers[longest.number].tokens) <= 2


def test_real_time_passes_while_it_serves_and_waits():
    requests = [Request(0, 0.0, (1, 2), 3), Request(1, 0.2, (3,), 2)]
    served = serve(one_device(), requests, slots=2, clock=RealClock())
    assert served.provenance == "measured:cpu"
    assert served.answers[1].admitted_s >= 0.2
    assert all(a.first_token_s <= a.finished_s for a in served.answers)


def on_ranks(rank: int):
    group, size = dist.group.WORLD, dist.get_world_size()
    part = LabDecoder(Transformer(CONFIG)).part(even_layers(CONFIG.layers, size)[rank])
    runners = (LayersOnRanks(part), TensorOnRanks(LabDecoder(Transformer(CONFIG))))
    clocks = [lab_clock(size, group), lab_clock(size, group), RealClock(group=group)]
    return [
        serve(runner, REQUESTS, slots=3, clock=clock, sampling=SAMPLED)
        for runner, clock in zip((*runners, runners[0]), clocks, strict=True)
    ]


def test_ranks_serve_together_and_agree_on_every_moment():
    first, second = run_ranks(on_ranks, 2)
    assert first == second
    assert all(served.tokens == alone(SAMPLED) for served in first)


def test_figures_are_those_of_a_schedule_that_can_be_checked_by_hand():
    answers = tuple(
        Answer(Request(i, i, (1,), 2), i % 2, start, start + 1, end, (5, 6))
        for i, (start, end) in enumerate([(0, 4), (1, 3), (4, 6)])
    )
    served = Served(answers, slots=2, provenance="virtual:toy")
    assert (served.seconds, served.tokens_per_s, served.slot_use) == (6, 1.0, 8 / 12)
    assert (served.latency_s(50), served.wait_s(50)) == (4, 1)
    assert [span.rank for span in served.slot_timeline().spans] == [0, 1, 0]


def test_arrivals_are_seeded_and_have_the_rate_asked_for():
    many = random_requests(2000, per_s=50.0, vocabulary=64)
    assert many == random_requests(2000, per_s=50.0, vocabulary=64)
    assert many != random_requests(2000, per_s=50.0, vocabulary=64, seed=1)
    assert many[-1].arrival_s == pytest.approx(2000 / 50, rel=0.1)
    assert {len(r.prompt) for r in many} == set(range(4, 17))


def test_a_request_beyond_the_context_and_no_slots_are_refused():
    with pytest.raises(ValueError, match="context of 48"):
        serve(one_device(), [Request(0, 0.0, (1,), 60)], slots=1, clock=lab_clock())
    with pytest.raises(ValueError, match="slots=0"):
        serve(one_device(), REQUESTS, slots=0, clock=lab_clock())


def test_serving_leaves_gradients_on():
    serve(one_device(), REQUESTS[:1], slots=1, clock=lab_clock())
    assert torch.is_grad_enabled()

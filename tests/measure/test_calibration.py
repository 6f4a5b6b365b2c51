import pytest
import torch
import torch.distributed as dist
from spawned import run_ranks
from torch import nn

from labkit.measure.calibration import (
    LinkFit,
    calibrate,
    measure_link,
    recorded_cost,
    with_measured_costs,
)
from labkit.measure.recording import NO_REGION, CpuSeconds, Event, Recording
from labkit.measure.virtual_clock import play
from labkit.measure.virtual_step import median_recording, record_step


def recording(*events, cpu_s=None):
    return Recording(0, events, (NO_REGION,), 0, {}, cpu_s)


def test_measured_costs_add_up_to_the_unrecorded_step_and_messages_carry_the_other_threads():
    found = recording(
        Event("compute", "a", own_s=3.0),
        Event("send", "s", own_s=1.0, ranks=(1,)),
        Event("recv", "r", own_s=0.0, ranks=(1,)),
        cpu_s=CpuSeconds(main=2.0, others=0.5),
    )
    assert [e.own_s for e in with_measured_costs(found).events] == [1.5, 0.75, 0.25]


def test_a_recording_without_measured_seconds_is_refused():
    with pytest.raises(ValueError, match=r"record_step\(\.\.\., timed=5\)"):
        with_measured_costs(recording(Event("compute", "a", own_s=1.0)))


def test_medians_are_taken_event_by_event():
    runs = [recording(Event("compute", "a", own_s=s), Event("compute", "b", own_s=2 * s))
            for s in (1.0, 9.0, 2.0)]
    seconds = [CpuSeconds(m, 0.0) for m in (5.0, 4.0, 60.0)]
    found = median_recording(runs, seconds)
    assert [e.own_s for e in found.events] == [2.0, 4.0] and found.cpu_s == CpuSeconds(5.0, 0.0)


def test_recordings_of_different_programs_have_no_median():
    runs = [recording(Event("compute", "a")), recording()]
    with pytest.raises(ValueError, match="1 events and one of 0 are not the same program"):
        median_recording(runs, [])


def test_one_rank_with_recorded_costs_takes_its_own_cpu_time():
    net, x = nn.Linear(64, 64), torch.ones(128, 64)
    found = record_step(lambda: net(x).sum().backward(), hold=[net], timed=3)
    timeline = play([with_measured_costs(found)], calibrate(), recorded_cost)
    assert timeline.step_time_s == pytest.approx(found.cpu_s.main)
    assert timeline.provenance == "virtual:calibrated-cpu-1x"


def test_a_calibrated_profile_says_where_it_comes_from_and_needs_a_link_for_two():
    here = calibrate(LinkFit(1e-4, 1e9, 1e-4), 2)
    assert here.count == 2 and here.link(0, 1).rendezvous
    assert "measured on this machine" in here.profiles[0].source
    assert here.profiles[0].peak_flops["float32"] > 1e8
    with pytest.raises(ValueError, match=r"count=2 needs link=measure_link\(\)"):
        calibrate(count=2)
    with pytest.raises(ValueError, match="two sizes and two ranks"):
        measure_link()


def _pair(rank):
    link = measure_link(repeats=10)
    message = torch.zeros(64, 64)
    net = nn.Linear(64, 64)

    def step():
        if rank:
            dist.recv(message, 0)
        out = net(message)
        if not rank:
            dist.send(out.detach(), 1)

    return link, record_step(step, hold=[net], timed=3)


def test_two_ranks_measure_their_link_and_play_on_it():
    (link, first), (_, second) = run_ranks(_pair, 2)
    assert link.latency_s > 0 and link.host_s > 0 and link.bandwidth_bytes_per_s > 1e6
    pair = [with_measured_costs(r) for r in (first, second)]
    step_s = play(pair, calibrate(link, 2), recorded_cost).step_time_s
    # the second rank starts when the message is there, so the two take turns
    assert step_s >= link.latency_s + first.cpu_s.main

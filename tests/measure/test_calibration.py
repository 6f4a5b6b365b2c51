import pytest
import torch
import torch.distributed as dist
from spawned import run_ranks
from torch import nn

from labkit.measure.virtual.calibration import (
    LinkFit,
    calibrate,
    measure_link,
    measured_step_s,
    play_measured,
    with_measured_costs,
)
from labkit.measure.virtual.recording import NO_REGION, Event, Recording, Unrecorded
from labkit.measure.virtual.virtual_step import joined_recording, record_step


def recording(*events, unrecorded=None):
    return Recording(0, events, (NO_REGION,), 0, {}, unrecorded)


def test_measured_costs_add_up_to_the_unrecorded_step_and_messages_carry_the_other_threads():
    found = recording(
        Event("compute", "a", own_s=3.0),
        Event("send", "s", own_s=1.0, ranks=(1,)),
        Event("recv", "r", own_s=0.0, ranks=(1,)),
        unrecorded=Unrecorded(main_s=2.0, others_s=0.5, walls_s=(2.5,)),
    )
    assert [e.own_s for e in with_measured_costs(found).events] == [1.5, 0.75, 0.25]


def test_a_recording_without_measured_seconds_is_refused():
    with pytest.raises(ValueError, match=r"record_step\(\.\.\., timed=5\)"):
        with_measured_costs(recording(Event("compute", "a", own_s=1.0)))


def test_medians_are_taken_event_by_event_and_the_fastest_call_counts():
    runs = [
        recording(Event("compute", "a", own_s=s), Event("compute", "b", own_s=2 * s))
        for s in (1.0, 9.0, 2.0)
    ]
    calls = [Unrecorded(5.0, 0.5, (7.0,)), Unrecorded(4.0, 0.25, (9.0,))]
    found = joined_recording(runs, calls)
    assert [e.own_s for e in found.events] == [2.0, 4.0]
    assert found.unrecorded == Unrecorded(4.0, 0.25, (7.0, 9.0))


def test_the_measured_step_is_the_slowest_rank_of_the_fastest_call():
    walls_s = ((3.0, 5.0), (6.0, 4.0))
    ranks = [recording(unrecorded=Unrecorded(1.0, 0.0, walls)) for walls in walls_s]
    assert measured_step_s(ranks) == 5.0


def test_recordings_of_different_programs_have_no_median():
    runs = [recording(Event("compute", "a")), recording()]
    with pytest.raises(ValueError, match="1 events and one of 0 are not the same program"):
        joined_recording(runs, [])


def test_one_rank_with_recorded_costs_takes_its_own_cpu_time():
    net, x = nn.Linear(64, 64), torch.ones(128, 64)
    found = record_step(lambda: net(x).sum().backward(), hold=[net], timed=3)
    timeline = play_measured([found], calibrate())
    assert timeline.step_time_s == pytest.approx(found.unrecorded.main_s)
    assert len(found.unrecorded.walls_s) == 3
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

    return link, record_step(step, hold=[net], timed=3, group=dist.group.WORLD)


def test_two_ranks_measure_their_link_and_play_on_it():
    (link, first), (_, second) = run_ranks(_pair, 2)
    assert link.latency_s > 0 and link.host_s > 0 and link.bandwidth_bytes_per_s > 1e6
    step_s = play_measured([first, second], calibrate(link, 2)).step_time_s
    # the second rank starts when the message is there, so the two take turns
    assert step_s >= link.latency_s + first.unrecorded.main_s

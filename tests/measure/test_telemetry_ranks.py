"""Telemetry of ranks: their processes, their spans on one clock, and recordings of virtual ones."""

from __future__ import annotations

from labkit.devices.inventory import choose_devices
from labkit.devices.ranks.ranks import Ranks
from labkit.measure.telemetry.telemetry import telemetry
from labkit.measure.telemetry.telemetry_regions import WAITING, by_region

ONE_AFTER_THE_OTHER = """
from labkit.measure.regions import region
from labkit.measure.step_trace import trace_step
x = torch.ones(64, 256)
w = torch.eye(256)
def step():
    if rank == 1:
        dist.recv(x, 0)
    y = x
    with region("F", "forward"):
        for _ in range(200):
            y = y @ w
    if rank == 0:
        dist.send(y, 1)
measured = trace_step(step, devices=on_cpu, group=dist.group.WORLD, steps=30)
recorded = trace_step(step, devices=on_virtual, group=dist.group.WORLD)
"""


def test_ranks_are_watched_by_process_and_joined_with_what_they_traced():
    cpu, virtual = choose_devices("cpu", 2), choose_devices("virtual", 2)
    with Ranks(2, cpu) as ranks:
        ranks.push(on_cpu=cpu, on_virtual=virtual)
        with telemetry(cpu, pids=ranks.pids, hz=10) as measured:
            ranks.run(ONE_AFTER_THE_OTHER)
        measured.join(ranks.pull("measured"), cpu)
        with telemetry(virtual) as modelled:
            pass
        modelled.join(ranks.pull("recorded"), virtual)
    for rank in range(2):
        assert measured.mean(rank, "memory_used_bytes") > 50e6
        assert measured.peak(rank, "cpu_percent") > 0
    spans = [s for s in measured.spans if s.kind == "forward"]
    assert sorted(span.rank for span in spans) == [0, 1]
    # the ranks' spans lie on the sampler's clock
    assert all(measured.start_s < s.start_s and s.end_s < measured.end_s for s in spans)

    assert modelled.devices[1].provenance == "virtual:lab" and modelled.devices[1].model
    waiting = {r.device: r for r in by_region(modelled) if r.region == WAITING}
    assert waiting[1].active_percent["kernel_active_percent"] > 99
    assert waiting[1].active_percent["compute_percent"] < 5
    assert modelled.peak(0, "memory_peak_bytes") > 0

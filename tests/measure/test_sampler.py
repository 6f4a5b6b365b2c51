"""The thread that samples: its rate, its end, and its silence."""

from __future__ import annotations

import threading
import time

import pytest
from fake_nvml import FakeGPU

from labkit.measure.telemetry.metrics import Metered, Reading
from labkit.measure.telemetry.nvidia_source import NvidiaSource
from labkit.measure.telemetry.sampler import Sampler


class Counting:
    """A source of one device that counts its looks, and may fail."""

    def __init__(self, takes_s=0.0, fails=False):
        self.devices = (Metered("device", "measured:cpu"),)
        self.looks, self.takes_s, self.fails = 0, takes_s, fails

    def read(self, index):
        self.looks += 1
        time.sleep(self.takes_s)
        if self.fails:
            raise OSError("gone")
        return Reading({"cpu_percent": self.looks})


def test_it_looks_at_once_then_at_its_rate_and_a_last_time():
    sampler = Sampler([Counting()], hz=20)
    sampler.start()
    assert sampler.running and len(sampler.samples) >= 1
    time.sleep(0.3)
    sampler.stop()
    assert not sampler.running and 4 <= len(sampler.samples) <= 9
    times = [sample.time_s for sample in sampler.samples]
    assert times == sorted(times)


def test_it_can_be_stopped_and_started_again_and_leaves_no_thread():
    source = Counting()
    sampler = Sampler([source], hz=50)
    for _ in range(3):
        sampler.start()
        sampler.start()
        sampler.stop()
        sampler.stop()
    assert source.looks == len(sampler.samples) >= 6
    assert not [t for t in threading.enumerate() if t.name == "labkit-sampler"]


def test_slow_looks_are_not_caught_up_on():
    sampler = Sampler([Counting(takes_s=0.05)], hz=1000)
    sampler.start()
    time.sleep(0.3)
    sampler.stop()
    assert len(sampler.samples) <= 9


def test_a_source_that_raises_gives_a_reason_and_the_others_go_on():
    sampler = Sampler([Counting(fails=True), Counting()], hz=50)
    sampler.look()
    failed, fine = sampler.samples
    assert failed.reading.reasons["power_w"] == "OSError: gone" and failed.device == 0
    assert fine.reading.values == {"cpu_percent": 1} and fine.device == 1


def test_only_the_latest_samples_are_kept_where_that_is_asked():
    sampler = Sampler([Counting()], keep=2)
    for _ in range(5):
        sampler.look()
    assert [sample.reading.values["cpu_percent"] for sample in sampler.samples] == [4, 5]


def test_a_rate_of_zero_is_refused():
    with pytest.raises(ValueError, match="hz=0 must be above 0"):
        Sampler([], hz=0)


def test_a_gpu_that_is_lost_in_mid_run_shows_so_in_the_thread(gpus):
    with gpus(FakeGPU(busy=60, lost_from_s=0.1), FakeGPU(busy=20)):
        sampler = Sampler([NvidiaSource()], hz=50)
        sampler.start()
        time.sleep(0.2)
        sampler.stop()
    first = [s.reading for s in sampler.samples if s.device == 0]
    assert not first[0].lost and first[-1].lost and first[-1].values == {}
    assert not any(s.reading.lost for s in sampler.samples if s.device == 1)

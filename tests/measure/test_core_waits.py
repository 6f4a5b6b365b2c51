import os
import subprocess
import sys
import time

import pytest

from labkit.measure.core_waits import waited_s, waited_share

LINUX = os.path.exists("/proc/self/task")


def burn(seconds=0.5):
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


@pytest.mark.skipif(not LINUX, reason="only Linux tells")
def test_a_process_that_shares_its_core_waits_for_half_of_the_time_or_more():
    home = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(home)})  # a child inherits it
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        assert waited_share(burn) > 0.2
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, home)


@pytest.mark.skipif(not LINUX, reason="only Linux tells")
def test_who_sleeps_does_not_wait_for_a_core():
    assert waited_share(lambda: time.sleep(0.5)) < 0.2


def test_where_nothing_tells_there_is_no_number(monkeypatch, tmp_path):
    monkeypatch.setattr("labkit.measure.core_waits._THREADS", tmp_path / "no such folder")
    assert waited_s() is None and waited_share(lambda: None) is None

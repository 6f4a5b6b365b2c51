"""Figures of CPU ranks and of RAPL counters."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import time

import psutil
import pytest

from labkit.measure.telemetry import cpu_source
from labkit.measure.telemetry.cpu_source import ProcessSource, RaplSource


def test_a_busy_process_uses_cpu_and_an_ended_one_is_lost():
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    source = ProcessSource([os.getpid(), sleeper.pid])
    first = source.read(0)
    assert "cpu_percent" not in first.values and first.values["memory_used_bytes"] > 1e6
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        pass
    assert 0 < source.read(0).values["cpu_percent"] < 1000
    # two looks at once would divide a tick of 10 ms by microseconds
    assert "cpu_percent" not in source.read(0).values
    assert not source.read(1).lost
    sleeper.kill()
    sleeper.wait()
    lost = source.read(1)
    assert lost.lost and lost.values == {} and "ended" in lost.reasons["cpu_percent"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_procs_figures_are_psutils_and_an_odd_name_does_not_shift_them():
    code = "import time; open('/proc/self/comm', 'w').write('a) R 1 (b'); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 10
    while ") R" not in psutil.Process(child.pid).name() and time.monotonic() < until:
        time.sleep(0.01)
    cpu_s, resident_bytes = cpu_source._ProcProcess(child.pid).look()
    others = cpu_source._OtherProcess(child.pid).look()
    child.kill()
    child.wait()
    assert resident_bytes == pytest.approx(others[1], abs=2**20)  # the kernel counts in batches
    assert cpu_s == pytest.approx(others[0], abs=0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_nobody_waited_for_has_ended():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    source = ProcessSource([child.pid])
    assert not source.read(0).lost
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert source.read(0).lost
    child.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_look_opens_no_file_and_leaves_none_open(tmp_path, monkeypatch):
    package(tmp_path / "intel-rapl:0", 1)
    before = len(os.listdir("/proc/self/fd"))
    sources = [ProcessSource([os.getpid()]), RaplSource(tmp_path)]
    with monkeypatch.context() as patched:
        for module, name in ((os, "open"), (builtins, "open")):
            patched.setattr(module, name, lambda *_, **__: pytest.fail("a look opened a file"))
        assert all(source.read(0).values for source in sources)
    del sources
    assert len(os.listdir("/proc/self/fd")) == before


def package(folder, energy_uj):
    folder.mkdir()
    (folder / "name").write_text("package-0\n")
    (folder / "max_energy_range_uj").write_text("1000000\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")


def test_a_package_counter_that_began_anew_is_continued(tmp_path):
    package(tmp_path / "intel-rapl:0", 900_000)
    package(tmp_path / "intel-rapl:0:0", 5)  # a part of the package
    source = RaplSource(tmp_path)
    assert [device.name for device in source.devices] == ["CPU package-0"]
    assert source.read(0).values["energy_j"] == 0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100000")
    assert source.read(0).values["energy_j"] == pytest.approx(0.2)


def test_an_unreadable_counter_is_null_with_its_reason(tmp_path):
    package(tmp_path / "intel-rapl:0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    reading = RaplSource(tmp_path).read(0)
    assert reading.values == {} and "root" in reading.reasons["energy_j"]
    assert RaplSource(tmp_path / "none").devices == ()

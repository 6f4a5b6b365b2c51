"""Ranks that do not start, and what a finished set of ranks leaves behind: nothing."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time

import psutil
import pytest

from labkit.devices.inventory import choose_devices
from labkit.devices.ranks import rank_kernels
from labkit.devices.ranks.rank_errors import RankError, RanksInterrupted
from labkit.devices.ranks.ranks import Ranks


@pytest.fixture
def nothing_left_behind(monkeypatch):
    """No process and no folder is there after the test that was not there before."""
    home = tempfile.mkdtemp(prefix="r")  # tmp_path is too long for a socket
    monkeypatch.setattr(tempfile, "tempdir", home)
    before = children()
    yield
    assert os.listdir(home) == [] and children() <= before
    os.rmdir(home)


def children():
    return {p.pid for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE}


def test_a_rank_that_ends_at_once_is_reported_with_its_standard_error(
    monkeypatch, nothing_left_behind
):
    boot = "import sys; sys.stderr.write('no such library'); sys.exit(4)"
    monkeypatch.setattr(rank_kernels, "BOOT", boot)
    with pytest.raises(RankError, match="did not start.*exited with code 4") as caught:
        Ranks(2, choose_devices("cpu", 2))
    assert "no such library" in str(caught.value)


def test_a_rank_that_never_answers_is_given_up_in_time(monkeypatch, nothing_left_behind):
    boot = "import sys, time; sys.stderr.write('thinking'); sys.stderr.flush(); time.sleep(100)"
    monkeypatch.setattr(rank_kernels, "BOOT", boot)
    began = time.monotonic()
    with pytest.raises(
        RankError, match=r"\[0, 1\] did not start within start_timeout_s=2"
    ) as caught:
        Ranks(2, choose_devices("cpu", 2), start_timeout_s=2)
    assert time.monotonic() - began < 8
    assert "rank 1 wrote:\nthinking" in str(caught.value)


def test_the_stop_button_ends_a_start(monkeypatch, nothing_left_behind):
    monkeypatch.setattr(rank_kernels, "BOOT", "import time; time.sleep(100)")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(RanksInterrupted, match="no process was left behind"):
        Ranks(2, choose_devices("cpu", 2))
    assert time.monotonic() - began < 8


def test_ranks_that_nobody_holds_are_ended(nothing_left_behind):
    ranks = Ranks(1, choose_devices("cpu", 1))
    pid = ranks.pids[0]
    folder = os.path.dirname(ranks.connection_files[0])
    del ranks
    gc.collect()
    assert not psutil.pid_exists(pid) and not os.path.exists(folder)


def test_a_forked_child_of_the_notebook_does_not_end_its_ranks():
    with Ranks(1, choose_devices("cpu", 1)) as ranks:
        child = os.fork()
        if child == 0:
            ranks.shutdown()
            os._exit(0)
        os.waitpid(child, 0)
        assert ranks.pull("rank") == {0: 0}

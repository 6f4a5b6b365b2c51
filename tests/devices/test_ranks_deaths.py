"""Ranks that die: how the death is reported, and that a restart helps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from labkit.devices.inventory import choose_devices
from labkit.devices.ranks.rank_errors import RankError
from labkit.devices.ranks.ranks import Ranks


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, choose_devices("cpu", 2), threads=1) as started:
        yield started


@pytest.fixture
def living(ranks):
    if not all(running(pid) for pid in ranks.pids):
        ranks.restart()
    return ranks


def running(pid):
    """Whether the process exists and is more than a zombie that waits for its parent."""
    with_state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True)
    return with_state.stdout.strip()[:1] not in (b"", b"Z")


@pytest.mark.parametrize(
    ("code", "cause", "hint"),
    [
        (
            "import os, time\ntime.sleep(1)\nif rank == 1: os._exit(3)\ndist.barrier()",
            "its process exited with code 3",
            "line 2 of its cell: time.sleep(1)",
        ),
        (
            "dist.all_reduce(torch.ones(3 if rank == 1 else 5)); dist.barrier()",
            "killed by SIGABRT",
            "while in all_reduce, line 1 of its cell\n"
            "it was sent 8 bytes where it expected 4: the ranks must give tensors of the same",
        ),
        (
            "import ctypes\nif rank == 1: ctypes.string_at(0)\ndist.barrier()",
            "killed by SIGSEGV",
            "while in line 2 of its cell",
        ),
    ],
    ids=["_exit", "abort", "segfault"],
)
def test_a_rank_that_dies_in_a_cell_is_the_cause_with_signal_and_place(living, code, cause, hint):
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        living.run(code)
    assert time.monotonic() - began < 12
    report = str(caught.value)
    assert caught.value.causes == [1] and caught.value.consequences == [0]
    assert report.startswith(f"rank 1 failed first: it died, {cause}") and hint in report
    assert "because of that, rank 0" in report and "ranks.restart()" in report
    with pytest.raises(RankError, match=f"rank 1 is dead, {cause}"):
        living.run("1")
    assert living.pull("rank", only=[0]) == {0: 0}  # what the survivor knows can be saved


def test_sigkill_inside_a_collective_is_reported_with_the_collective(living):
    threading.Timer(2.0, os.kill, (living.pids[0], signal.SIGKILL)).start()
    with pytest.raises(RankError) as caught:
        living.run("dist.recv(torch.zeros(1), 1 - rank)")
    assert caught.value.causes == [0]
    assert (
        "killed by SIGKILL (signal 9), as the system does when memory runs out, while in recv"
        in (str(caught.value))
    )


def test_sigkill_between_cells_is_noticed_and_a_restart_gives_new_ranks(living):
    old = living.pids
    child = living.pull("__import__('subprocess').Popen(['sleep', '600']).pid", only=[1])[1]
    os.kill(old[1], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while running(old[1]) and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(RankError, match="rank 1 .*, killed by SIGKILL"):
        living.run("dist.barrier()")
    living.restart()
    living.run("dist.barrier()")
    assert not set(old) & set(living.pids)
    assert not any(running(pid) for pid in [*old, child])


def test_a_rank_that_ignores_the_interrupt_is_killed_and_says_so(living):
    code = (
        "import signal, time\n"
        "if rank == 0: raise ValueError('mine')\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\ntime.sleep(100)"
    )
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        living.run(code)
    assert time.monotonic() - began < 15
    assert caught.value.causes == [0]
    assert "rank 1 was interrupted" in str(caught.value)
    assert "killed because it did not react to an interrupt" in str(caught.value)


def test_a_sequence_of_failures_always_ends_in_a_working_cell(living):
    """Those of 100 random steps, run by hand, that need no restart."""
    steps = [
        "if rank == 0: 1 / 0\ndist.barrier()",
        "w = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3 * rank)]\n"
        "if rank == 0: raise SystemExit(3)\n[v.wait() for v in w]",
        "if rank == 1:\n    w = dist.isend(torch.ones(9), 0)\n    raise KeyError\ndist.barrier()",
        "for i in range(20):\n    dist.all_reduce(torch.ones(500_000))\n"
        "    if i == 10 and rank == 1: raise RuntimeError('midway')",
        "g = dist.new_group([0, 1])\nif rank == 1: 1 / 0\ndist.all_reduce(torch.ones(2), group=g)",
        "1 / 0",
    ]
    for step, code in enumerate(steps):
        with pytest.raises(RankError):
            living.run(code)
        living.run("y = torch.ones(1)\ndist.all_reduce(y)")
        assert living.pull("y.item()") == {0: 2.0, 1: 2.0}, f"after step {step}"


def test_ranks_use_only_loopback_sockets_and_no_fixed_port(living):
    psutil = pytest.importorskip("psutil")
    addresses = {
        connection.laddr.ip
        for pid in living.pids
        for connection in psutil.Process(pid).net_connections(kind="inet")
    }
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    folder = os.path.dirname(living.connection_files[0])
    assert os.stat(folder).st_mode & 0o077 == 0, "another user could reach the sockets"
    assert '"transport": "ipc"' in open(living.connection_files[0]).read()


def test_the_default_signal_handler_is_back_after_a_cell(living):
    living.run("1")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sys.exc_info() == (None, None, None)

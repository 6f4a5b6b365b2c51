import os
import subprocess
import sys
import uuid

import psutil
import pytest

from labkit.lab.headless.processes import MARK, Family, describe

# a child that starts a grandchild, prints its pid, and ends when its stdin is closed
PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True, env={env})
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def family():
    family = Family(uuid.uuid4().hex)
    yield family
    family.kill()


def start(family, env):
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(env=env)],
        env={**os.environ, MARK: family.mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, int(process.stdout.readline())


def end(process):
    process.stdin.close()
    process.stdout.close()
    process.wait()


def test_a_grandchild_in_a_session_of_its_own_is_found_by_its_mark_and_killed(family):
    process, pid = start(family, env=None)
    end(process)
    left = family.wait(grace_s=0.2)
    assert [p.pid for p in left] == [pid]
    assert describe(left) == f"1 left and killed: pid {pid} (sleep 600)"
    family.kill()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_one_that_also_cleared_its_environment_is_known_from_a_sample(family):
    process, pid = start(family, env={})
    family.sample(process.pid)
    end(process)
    assert [p.pid for p in family.alive()] == [pid]


def test_processes_that_end_in_time_are_no_survivors_and_others_are_left_alone(family):
    other = Family(uuid.uuid4().hex)
    process, pid = start(other, env=None)
    assert family.wait(grace_s=0.1) == [] and describe([]) == ""
    family.kill()
    assert psutil.Process(pid).is_running()
    end(process)
    other.kill()

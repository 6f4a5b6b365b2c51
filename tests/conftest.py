"""Scripted GPUs for every room's tests: ``with gpus(FakeGPU(), FakeGPU()) as library``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "fakes"))


@pytest.fixture
def gpus():
    """A function that puts scripted GPUs under pynvml for the length of a ``with`` block."""
    from fake_nvml import Scenario, installed

    return lambda *listed, **scenario: installed(Scenario(list(listed), **scenario))

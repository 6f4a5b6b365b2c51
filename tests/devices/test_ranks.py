"""Two ranks that live through the whole file: what works, and the failures they survive."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time

import pytest
import torch

from labkit.devices.inventory import choose_devices
from labkit.devices.ranks.rank_errors import RankError, RanksInterrupted
from labkit.devices.ranks.ranks import Ranks

# Bounds are about four times what an idle machine needs: this one may be busy.
RECOVERY_S = 12.0


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, choose_devices("cpu", 2), threads=1) as started:
        yield started


class TimedText(io.StringIO):
    """Text with the time at which each piece of it was written."""

    def __init__(self):
        super().__init__()
        self.written = []

    def write(self, text):
        self.written.append((time.monotonic(), text))
        return super().write(text)


def press_stop_after(delay_s):
    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_the_namespace_of_a_rank_has_its_place_device_mesh_and_group(ranks):
    assert ranks.pull("(rank, world_size, str(device), mesh.size())") == {
        0: (0, 2, "cpu", 2),
        1: (1, 2, "cpu", 2),
    }
    ranks.run("x = torch.ones(2, device=device) * (rank + 1)\ndist.all_reduce(x)")
    assert ranks.pull("x.tolist()") == {0: [3.0, 3.0], 1: [3.0, 3.0]}
    assert "2 x cpu" in repr(ranks) and str(ranks.pids[0]) in repr(ranks)


def test_output_comes_live_line_by_line_with_its_rank_in_front(ranks, monkeypatch):
    out = TimedText()
    monkeypatch.setattr(sys, "stdout", out)
    ranks.run(
        "import time\nprint('first', rank)\ntime.sleep(1.5)\nprint('sec', end='')\nprint('ond')"
    )
    lines = sorted(out.getvalue().splitlines())
    assert lines == ["[0] first 0", "[0] second", "[1] first 1", "[1] second"]
    times = {text: at for at, text in out.written}
    assert times["[0] second\n"] - times["[0] first 0\n"] > 0.7


def test_the_last_value_is_shown_for_each_rank_and_show_hides_the_others(ranks, capsys):
    ranks.run("rank + 10")
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] 10", "[1] 11"]
    ranks.run("rank + 10", show=[1])
    assert capsys.readouterr().out == "[1] 11\n"
    ranks.run("only_here = 1", only=[0])
    assert ranks.pull("'only_here' in globals()") == {0: True, 1: False}


def test_output_of_c_code_and_of_child_processes_arrives(ranks, capfd):
    ranks.run("import os\nos.write(2, b'from C\\n')\nos.system('echo from a child')", only=[1])
    shown = capfd.readouterr()
    assert "[1] from C\n" in shown.err and "[1] from a child\n" in shown.err


def test_a_progress_bar_leaves_one_line(ranks, capsys):
    ranks.run("for i in range(5): print(f'\\r{i}/4', end='')", only=[0])
    assert capsys.readouterr().out == "[0] 4/4\n"


def test_a_cell_may_await_and_use_magics_but_not_ask(ranks, capsys):
    ranks.run("import asyncio\nawait asyncio.sleep(0.01)\n%time waited = 5")
    assert ranks.pull("waited") == {0: 5, 1: 5}
    with pytest.raises(RankError, match="StdinNotImplementedError"):
        ranks.run("input('name? ')", only=[0])


def test_values_go_both_ways_as_detached_cpu_tensors(ranks):
    ranks.push(weights={"w": torch.arange(3.0)}, steps=2)
    ranks.run("w = weights['w'].clone().requires_grad_()\nloss = (w * steps).sum()")
    pulled = ranks.pull("{'loss': loss, 'row': w[:1]}", only=[1])
    assert list(pulled) == [1]
    assert pulled[1]["loss"].item() == 6.0 and not pulled[1]["loss"].requires_grad
    assert pulled[1]["row"].untyped_storage().nbytes() == 4  # the row, not what it is a view of


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / (rank - 1)", "rank 1: ZeroDivisionError"),
        ("undefined", "rank 0: NameError: name 'undefined' is not defined"),
        ("lambda: 1", "cannot be sent between processes"),
        ("spread", "is spread over the ranks"),
    ],
)
def test_a_value_that_cannot_be_pulled_says_why_and_breaks_nothing(ranks, expression, message):
    ranks.run(
        "from torch.distributed.tensor import distribute_tensor\n"
        "from torch.distributed.tensor import Shard\n"
        "spread = distribute_tensor(torch.ones(4), mesh, [Shard(0)])\n"
        "group = dist.group.WORLD"
    )
    with pytest.raises(RankError, match=message):
        ranks.pull(expression)
    assert ranks.pull("group is dist.group.WORLD") == {0: True, 1: True}


def test_a_class_known_on_one_side_only_is_named(ranks):
    ranks.run("class Local: pass\nlocal = Local()")
    with pytest.raises(ValueError, match="defined only on the other side.*Local"):
        ranks.pull("local")
    with pytest.raises(ValueError, match=r"push\(f\).*cannot be sent"):
        ranks.push(f=lambda: 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.run("1", only=[5]), r"only=\[5\]: name one or more of the ranks 0..1"),
        (lambda r: r.run("1", show=[]), r"show=\[\]: name one or more"),
        (lambda r: r.pull("1", only=[-1]), r"only=\[-1\]"),
        (lambda r: r.run("x = = 1"), "no rank ran the cell"),
        (lambda r: Ranks(0), "count=0 must be at least 1"),
        (lambda r: Ranks(2, threads=0), "threads=0"),
        (lambda r: Ranks(2, timeout_s=0), "timeout_s=0"),
        (lambda r: Ranks(3, choose_devices("cpu", 2)), "count=3 ranks on 2 devices"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_rule(ranks, call, message):
    with pytest.raises(ValueError, match=message):
        call(ranks)
    assert ranks.pull("rank") == {0: 0, 1: 1}


def test_the_first_failing_rank_is_named_and_the_stuck_one_freed(ranks):
    ranks.run("kept = rank + 5")
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run("if rank == 1:\n    raise LookupError('my own')\ndist.all_reduce(torch.ones(3))")
    assert time.monotonic() - began < RECOVERY_S
    assert caught.value.causes == [1] and caught.value.consequences == [0]
    report = str(caught.value)
    assert report.startswith("rank 1 failed first: LookupError: my own")
    assert "raise" in report and "because of that, rank 0 was interrupted" in report
    assert "line 3 of its cell: dist.all_reduce(torch.ones(3))" in report
    ranks.run("y = torch.ones(1)\ndist.all_reduce(y)")
    assert ranks.pull("(kept, y.item(), mesh.size())") == {0: (5, 2.0, 2), 1: (6, 2.0, 2)}


def test_the_stuck_rank_is_interrupted_soon_after_the_failure(ranks):
    code = (
        "import time\nat = time.time()\n"
        "if rank == 0: raise ValueError\n"
        "try: dist.barrier()\nfinally: freed = time.time()"
    )
    with pytest.raises(RankError):
        ranks.run(code)
    failed, freed = ranks.pull("at", only=[0])[0], ranks.pull("freed", only=[1])[1]
    # one second of grace; the second of the promise is doubled for a busy machine
    assert 0.5 < freed - failed < 3.0


def test_the_report_names_what_must_be_made_again(ranks):
    ranks.run(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.pipelining import PipelineStage\n"
        "layer = torch.nn.Linear(2, 2)\n"
        "ddp = DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "sharded = fully_shard(torch.nn.Linear(2, 2), mesh=mesh)\n"
        "stage = PipelineStage(torch.nn.Linear(2, 2), rank, world_size, device)\n"
        "mine = {'mesh': mesh}"
    )
    with pytest.raises(RankError) as caught:
        ranks.run("1 / 0")
    report = str(caught.value)
    for name in ("ddp (Distr", "sharded (FSDPLinear)", "stage (PipelineStage)", "mine (dict)"):
        assert name in report
    assert "layer (" not in report and " mesh (" not in report
    ranks.run("del ddp, sharded, stage, mine, spread, group")


@pytest.mark.parametrize(
    "code",
    [
        "dist.recv(torch.zeros(1), 1 - rank)",
        "if rank == 0: dist.all_reduce(torch.ones(3))\nelse: import time; time.sleep(100)",
        "while True: pass",
        "import asyncio\nawait asyncio.sleep(100)",
    ],
    ids=["recv", "all_reduce", "busy", "await"],
)
def test_the_stop_button_ends_a_cell_and_the_next_one_works(ranks, code):
    press_stop_after(0.5)
    began = time.monotonic()
    with pytest.raises(RanksInterrupted, match="variables are kept and the process group is new"):
        ranks.run(code)
    assert time.monotonic() - began < RECOVERY_S
    ranks.run("y = torch.ones(1)\ndist.all_reduce(y)")
    assert ranks.pull("y.item()") == {0: 2.0, 1: 2.0}


def test_newer_ranks_end_the_older_and_a_deadlock_blames_nobody(ranks):
    with Ranks(2, choose_devices("cpu", 2), threads=1, timeout_s=2) as impatient:
        with pytest.raises(RankError) as caught:
            impatient.run("dist.recv(torch.zeros(1), 1 - rank)")
        assert caught.value.causes == [] and "no rank failed by itself" in str(caught.value)
        impatient.run("dist.barrier()")
    assert not impatient.alive and impatient.pids == []
    with pytest.raises(ValueError, match=r"ended by the newer Ranks\(2\); make new ones"):
        ranks.run("1")

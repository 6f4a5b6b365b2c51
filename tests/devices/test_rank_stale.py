from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from labkit.devices.ranks.rank_stale import stale


@pytest.fixture
def mesh(tmp_path):
    store = dist.FileStore(str(tmp_path / "group"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Engine:
    def __init__(self, part):
        self.part = part


def make_step(mesh):
    return lambda: mesh.size()


def test_a_variable_is_stale_through_whatever_it_holds_the_group_by(mesh):
    variables = {
        "group": dist.group.WORLD,
        "sub": mesh,
        "engine": Engine([mesh]),
        "step": make_step(mesh),
        "bound": mesh.size,
    }
    assert stale(variables, variables) == [
        "group (ProcessGroup)",
        "sub (DeviceMesh)",
        "engine (Engine)",
        "step (function)",
        "bound (method)",
    ]


def test_what_holds_no_group_is_not_stale(mesh):
    layer = torch.nn.Linear(2, 2)
    variables = {"mesh": mesh, "layer": layer, "optimizer": torch.optim.AdamW(layer.parameters())}
    exec("def uses_the_global(): return mesh.size()", variables)
    kept = {k: v for k, v in variables.items() if k != "mesh" and not k.startswith("_")}
    assert stale(kept, variables) == []


def test_a_huge_variable_is_looked_at_in_bounded_time():
    loop = []
    loop.append(loop)
    assert stale({"loop": loop, "many": [[i] for i in range(200_000)]}, {}) == []

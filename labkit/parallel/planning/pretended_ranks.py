"""Ranks that are not there: a mesh on which layers are divided, and collectives that move nothing.

torch's ``fake`` backend lets one process believe that it is rank 0 of many. With fake tensors a
divided layer then runs its real program: the plans of tensor parallelism and FSDP2 are rehearsed,
not retold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed._tools import fake_collectives  # noqa: F401, gives fake tensors collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def pretended_mesh(data: int, tensor: int) -> Iterator[DeviceMesh]:
    """The mesh of ``data`` x ``tensor`` pretended ranks, axes so named, as rank 0 sees it.

    Raises:
        ValueError: this process is one of several real ranks.
    """
    if dist.is_initialized():
        raise ValueError(
            "a divided layer is rehearsed on pretended ranks, which a process that is a rank "
            "itself cannot do; predict before init_process_group, or in a process of its own"
        )
    dist.init_process_group("fake", rank=0, world_size=data * tensor, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    finally:
        dist.destroy_process_group()

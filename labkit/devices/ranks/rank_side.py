"""Runs inside the process of a rank: the kernel's start, its process group, its namespace."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

# The IPython app reads its own options from here.
KERNEL_OPTIONS = [
    "--IPKernelApp.parent_handle=0",  # watch_parent does better; the notebook's own is inherited
    "--IPKernelApp.capture_fd_output=False",
    "--InteractiveShellApp.exec_PYTHONSTARTUP=False",
    "--HistoryManager.enabled=False",  # no history database shared with the reader's own sessions
    "--InteractiveShell.cache_size=0",  # Out[n] would keep tensors of past cells alive
    "--log-level=CRITICAL",
]


def main(boot: dict) -> None:
    """Be the kernel of one rank until told to stop or until the notebook is gone."""
    watch_parent(boot["parent"], Path(boot["folder"]))
    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance(argv=["-f", boot["connection_file"], *KERNEL_OPTIONS])


def watch_parent(parent: int, folder: Path, every_s: float = 0.25) -> None:
    """End this process, and what it started, once the notebook's process ``parent`` is gone.

    The pid is told at start, since the parent may be gone before this line. ipykernel's own watch
    would miss that under a subreaper, and it leaves the children and the folder behind.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # the launcher gave each rank a group of its own

    threading.Thread(target=watch, daemon=True, name="labkit-parent-watch").start()


def join(place: dict) -> None:
    """Make this process a rank: bind its device, join the process group, fill the namespace.

    Args:
        place: rank, world_size, kind of device, generation of the group, timeout_s, group_file,
            operation_file.
    """
    from IPython import get_ipython

    from labkit.devices.backends import backend
    from labkit.devices.ranks import rank_interrupt, rank_operation

    shell = get_ipython()
    its_backend = backend(place["kind"])
    device = its_backend.bind(0)  # the only accelerator that this process can see
    if place["generation"] == 0:
        rank_interrupt.make_interruptible(shell, its_backend)
        rank_operation.OperationRecord(shell, Path(place["operation_file"]))
    _leave_group()
    rank_interrupt.forget_connections()
    _enter_group(place, its_backend, device)
    shell.push(_namespace(place, device))


def rejoin(place: dict) -> None:
    """Like ``join`` after a failure: whatever still waits in the old group is ended first."""
    from labkit.devices.ranks import rank_interrupt

    rank_interrupt.end_collectives()
    join(place)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    # the traceback of the failure keeps the old group, and its sockets, alive
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()


def _enter_group(place: dict, its_backend, device) -> None:
    import torch.distributed as dist

    # A file instead of TCPStore: no port, and nothing that listens on every interface.
    store = dist.FileStore(place["group_file"], place["world_size"])
    dist.init_process_group(
        its_backend.collectives,
        store=store,
        rank=place["rank"],
        world_size=place["world_size"],
        timeout=timedelta(seconds=place["timeout_s"]),
        device_id=device if its_backend.is_accelerator else None,
    )


def _namespace(place: dict, device) -> dict:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    return {
        "torch": torch,
        "dist": dist,
        "rank": place["rank"],
        "world_size": place["world_size"],
        "device": device,
        "mesh": init_device_mesh(device.type, (place["world_size"],)),
    }

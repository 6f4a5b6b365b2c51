"""Runs inside a rank: finds the variables that hold a process group which is about to end."""

from __future__ import annotations

import gc
import pickle
import sys
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType

# Named, not imported: what no cell has imported, no variable holds.
GROUP_HOLDERS = (
    ("torch.distributed", "ProcessGroup"),
    ("torch.distributed", "Work"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.pipelining.stage", "_PipelineStageBase"),
    ("torch.distributed.pipelining.schedules", "_PipelineSchedule"),
    ("torch.nn.parallel", "DistributedDataParallel"),
)
OPAQUE = (ModuleType, type, FrameType, BuiltinFunctionType, str, bytes, int, float, complex)
MOST_OBJECTS = 50_000  # looked at per variable: a bound on time, reached by no model of a lesson
OURS = {"torch", "dist", "rank", "world_size", "device", "mesh"}  # made anew by ``join``


def save_names(file: str) -> None:
    """Write the descriptions of this rank's stale variables into ``file``."""
    from IPython import get_ipython

    shell = get_ipython()
    hidden = set(shell.user_ns_hidden) | OURS
    mine = {k: v for k, v in shell.user_ns.items() if k not in hidden and not k.startswith("_")}
    Path(file).write_bytes(pickle.dumps(stale(mine, shell.user_ns)))


def stale(variables: dict, namespace: dict) -> list[str]:
    """``name (type)`` of every variable through which a process group can be reached.

    Args:
        variables: the ones to judge.
        namespace: the dict that they live in; a way through it does not count.
    """
    holders = _holders()
    return [
        f"{name} ({type(value).__name__})"
        for name, value in variables.items()
        if _reaches(value, holders, namespace)
    ]


def _holders() -> tuple[type, ...]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in GROUP_HOLDERS)
    return tuple(kind for kind in found if kind is not None)


def _reaches(value: object, holders: tuple[type, ...], namespace: dict) -> bool:
    seen = {id(namespace)}
    todo = [value]
    while todo and len(seen) < MOST_OBJECTS:
        item = todo.pop()
        if isinstance(item, holders):
            return True
        if id(item) not in seen and not isinstance(item, OPAQUE):
            seen.add(id(item))
            todo.extend(_parts(item))
    return False


def _parts(item: object) -> list:
    if isinstance(item, FunctionType):  # not its globals: they hold every variable
        cells = [cell for cell in item.__closure__ or () if cell.cell_contents is not item]
        return [cell.cell_contents for cell in cells] + list(item.__defaults__ or ())
    return gc.get_referents(item)

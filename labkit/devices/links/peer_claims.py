"""What the driver claims of peer access: whether one GPU may read and write the other's memory.

Each rank sees its own GPU only, so torch cannot be asked there; NVML knows every GPU by its UUID.
"""

from __future__ import annotations

import torch
from nvitop import libnvml

from labkit.devices.backends import backend
from labkit.devices.nvml import ask, gpu_of_uuid, physical_gpus

PEER_KINDS = {"read": 0, "write": 1}  # of nvmlGpuP2PCapsIndex_t; pynvml has tuples by mistake


def peer_states(a: object, b: object) -> dict[str, bool | None]:
    """By ``read`` and ``write`` of two NVML handles; None where the driver does not answer."""
    states = {
        kind: ask("nvmlDeviceGetP2PStatus", a, b, index).value for kind, index in PEER_KINDS.items()
    }
    return {k: None if s is None else s == libnvml.NVML_P2P_STATUS_OK for k, s in states.items()}


def own_uuid(device: torch.device) -> str | None:
    """Of the NVIDIA GPU that ``device`` is; None for all others."""
    return backend("cuda").uuid(device.index or 0) if device.type == "cuda" else None


def peer_claimed(source: str | None, target: str | None) -> bool | None:
    """Whether the driver claims peer access between the GPUs of two UUIDs.

    Returns:
        None where it cannot be asked: no NVIDIA GPU, another host's, or no answer.
    """
    if source is None or target is None or not physical_gpus().devices:
        return None
    gpus = gpu_of_uuid(source), gpu_of_uuid(target)
    if None in gpus or any(gpu.handle is None for gpu in gpus):
        return None
    states = peer_states(*(gpu.handle for gpu in gpus)).values()
    return None if None in states else all(states)

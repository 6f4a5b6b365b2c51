"""Let torch's own functions create tensors on simulated devices: ``torch.zeros(2, device=d)``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch

from labkit.devices.simulated.simulated_memory import SIMULATED, simulated_index
from labkit.devices.simulated.simulated_tensor import HOST, SimulatedTensor, copy_into

aten = torch.ops.aten

# factories whose CPU kernel allocates; all others (zeros, randn, full ...) start from these
FACTORIES = (
    "empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "eye",
    "eye.m", "linspace", "logspace", "randperm", "randperm.generator", "tril_indices",
    "triu_indices",
)  # fmt: skip


@cache
def register_factories() -> torch.library.Library:
    """Let torch create tensors on simulated devices; the library lives as long as the process."""
    library = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        base, _, overload = name.partition(".")
        library.impl(name, _factory(getattr(getattr(aten, base), overload or "default")), "Lazy")
    # autograd's zeros that need no memory: here they are ordinary ones
    library.impl("_efficientzerotensor", _factory(aten.zeros.default), "Lazy")
    # torch.tensor(..., device=) copies below __torch_dispatch__
    library.impl("_copy_from", _copy_from, "Lazy")
    # torch.utils.checkpoint looks the device type up here; it needs no function of it
    torch._register_device_module(SIMULATED, ModuleType(f"torch.{SIMULATED}"))
    return library


def _factory(func) -> Callable[..., SimulatedTensor]:
    def create(*args, device: torch.device, **kwargs) -> SimulatedTensor:
        index = simulated_index(device)
        return SimulatedTensor(func(*args, device=HOST, **kwargs), index)

    return create


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False):
    return copy_into(aten.copy_.default, (target, source), {})

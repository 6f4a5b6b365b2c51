"""The one place that knows one torch back end from another."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

# the collectives that torch ships for each accelerator; anything else goes over the host
COLLECTIVES = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


@dataclass(frozen=True)
class Backend:
    """One kind of torch device: ``cpu``, or the accelerator that this torch was built for.

    On ``cpu`` a device is one process, so there are as many as one starts, and all share
    ``torch.device("cpu")``. Get one by ``backend(kind)``.
    """

    kind: str

    @property
    def is_accelerator(self) -> bool:
        return self.kind != "cpu"

    @property
    def collectives(self) -> str:
        """Name of the process-group back end."""
        return COLLECTIVES.get(self.kind, "gloo")

    @property
    def _module(self):  # torch.cuda, torch.xpu, torch.mps
        return torch.get_device_module(self.kind)

    def count(self) -> int:
        """Accelerators of this kind that the process can use; 0 for ``cpu``."""
        if not self.is_accelerator or accelerator_kind() != self.kind:
            return 0
        return torch.accelerator.device_count()

    def torch_device(self, index: int) -> torch.device:
        return torch.device(self.kind, index) if self.is_accelerator else torch.device("cpu")

    def bind(self, index: int) -> torch.device:
        """Make the accelerator ``index`` the current one of this process, and return it."""
        if self.is_accelerator:
            torch.accelerator.set_device_index(index)
        return self.torch_device(index)

    def current_device(self) -> torch.device:
        """The device that this process is bound to."""
        index = torch.accelerator.current_device_index() if self.is_accelerator else 0
        return self.torch_device(index)

    def synchronize(self, devices: Iterable[torch.device]) -> None:
        """Wait until all queued work of every device in ``devices`` is done; no-op on the CPU."""
        if self.is_accelerator:
            for device in devices:
                torch.accelerator.synchronize(device)

    def name(self, index: int) -> str:
        """Name the vendor gives the device, or its kind where torch reports none."""
        get_name = getattr(self._module, "get_device_name", None)
        return get_name(index) if get_name else self.kind

    def uuid(self, index: int) -> str | None:
        """``GPU-…`` as NVML writes it; None where torch reports none."""
        if not hasattr(self._module, "get_device_properties"):
            return None
        uuid = getattr(self._module.get_device_properties(index), "uuid", None)
        return None if uuid is None else f"GPU-{uuid}"

    def memory_bytes(self, index: int) -> int | None:
        """Total device memory in bytes; None where torch reports none."""
        if not hasattr(self._module, "get_device_properties"):
            return None
        return getattr(self._module.get_device_properties(index), "total_memory", None)

    def allocated_bytes(self, device: torch.device) -> int | None:
        """Bytes of live tensors on ``device`` now; None on ``cpu``, where nobody counts them."""
        return self._module.memory_allocated(device) if self._counts_memory else None

    def peak_bytes(self, device: torch.device) -> int | None:
        """Largest ``allocated_bytes`` since ``reset_peak_bytes``; None on ``cpu``."""
        return self._module.max_memory_allocated(device) if self._counts_memory else None

    def reset_peak_bytes(self, device: torch.device) -> None:
        if self._counts_memory:
            self._module.reset_peak_memory_stats(device)

    @property
    def _counts_memory(self) -> bool:
        # torch.cuda.max_memory_allocated silently answers 0 without a GPU: ask only a real one
        return self.is_accelerator and hasattr(self._module, "max_memory_allocated")

    def visible_environment(self, index: int) -> dict[str, str]:
        """Environment of a rank process that may use only accelerator ``index`` of this process.

        ``index`` counts the devices that this process sees, so an existing
        ``CUDA_VISIBLE_DEVICES=2,3`` is looked up, not overwritten. On ``cpu`` every accelerator
        is hidden.
        """
        if not self.is_accelerator:
            return dict.fromkeys(VISIBLE_DEVICES.values(), "")
        variable = VISIBLE_DEVICES.get(self.kind)
        if variable is None:
            return {}
        seen = [part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()]
        return {variable: seen[index] if seen else str(index)}

    def abort_process_group(self) -> bool:
        """End a collective that blocks this process, from another thread.

        Returns:
            True where the collectives can be aborted (NCCL and its kin). gloo cannot: False.
        """
        if self.collectives == "gloo":
            return False
        dist.distributed_c10d._abort_process_group()
        return True


def accelerator_kind() -> str | None:
    """Kind of the accelerator that torch can use here, such as ``cuda``; None without one."""
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator().type


def backend(kind: str) -> Backend:
    """The back end of that kind; virtual GPUs are executed by the CPU's.

    Raises:
        ValueError: ``kind`` is neither ``cpu`` nor the accelerator of this machine.
    """
    here = accelerator_kind()
    if kind == "virtual":
        kind = "cpu"
    if kind not in ("cpu", here):
        choices = "cpu" if here is None else f"cpu or {here}"
        raise ValueError(f"kind={kind!r}: torch {torch.__version__} can use {choices} here")
    return Backend(kind)

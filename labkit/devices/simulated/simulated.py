"""Several devices in one process, for the classic ``layer.to(devices[1])``: real or simulated.

    first, second = devices(2)       # cuda:0 and cuda:1 where they are, else lazy:0 and lazy:1
    lower, upper = lower.to(first), upper.to(second)
    loss = upper(lower(x.to(first)).to(second)).mean()
    loss.backward()                  # the gradient crosses back by itself

A simulated device is called ``lazy:<index>``, after a device type that torch knows and does not
use. What is real on it: values, gradients and optimizer steps, bit for bit those of one CPU; the
error when tensors of two devices meet; the bytes of the tensors that live on it; every transfer.
What is not: its memory is the host's and has no limit, nothing overlaps, and there is one random
generator, the CPU's. So it supports no claim about time; each operator costs some 20 us more
than on the CPU, and tensors elsewhere in the process cost nothing more.

Known differences from a GPU: bytes are those of the storages, without the allocator's rounding to
512 and without a kernel's scratch memory; a module that moves back to the CPU gets new Parameter
objects. Refused with an error: ``torch.save`` of a tensor that is not on the CPU, autocast, fused
optimizers, generators on the device, sparse tensors. ``torch.compile`` runs
the program uncompiled, with warnings.
"""

from __future__ import annotations

import torch

from labkit.devices.backends import accelerator_kind, backend
from labkit.devices.inventory import choose_devices
from labkit.devices.simulated.simulated_factories import register_factories
from labkit.devices.simulated.simulated_memory import (
    LEDGER,
    SIMULATED,
    Transfer,
    ensure_ordinals,
    simulated_index,
)

_latest: list[torch.device] = []  # what ``devices`` gave last


def devices(count: int, requested: str = "auto") -> list[torch.device]:
    """``count`` devices for one process: accelerators where there are that many, else simulated.

    A process has as many simulated devices as it ever asked for at once: after ``devices(4)``,
    ``devices(2)`` gives the first two of the same four.

    Args:
        count: number of devices, >= 1.
        requested: a notebook's ``DEVICES``; ``cpu`` takes simulated ones even beside GPUs.

    Raises:
        ValueError: ``count`` is below 1, or ``requested`` is not there.
    """
    kind = choose_devices(requested, count).kind
    if kind == accelerator_kind():
        _latest[:] = [backend(kind).torch_device(index) for index in range(count)]
    else:
        register_factories()
        ensure_ordinals(count)
        _latest[:] = [torch.device(SIMULATED, index) for index in range(count)]
    return list(_latest)


def is_simulated(device: torch.device | str) -> bool:
    """Whether ``device`` is one of this module's instead of a real one."""
    return torch.device(device).type == SIMULATED


def bytes_on(device: torch.device | str) -> int | None:
    """Bytes of the live tensors on ``device``, each storage once; None for ``cpu``, uncounted.

    Raises:
        RuntimeError: there is no such simulated device.
    """
    device = torch.device(device)
    if is_simulated(device):
        return LEDGER.bytes_on(simulated_index(device))
    return backend(device.type).allocated_bytes(device)


def peak_bytes_on(device: torch.device | str) -> int | None:
    """Largest ``bytes_on(device)`` since ``reset_ledger``; None for ``cpu``.

    Raises:
        RuntimeError: there is no such simulated device.
    """
    device = torch.device(device)
    if is_simulated(device):
        return LEDGER.peak_bytes_on(simulated_index(device))
    return backend(device.type).peak_bytes(device)


def transfers() -> tuple[Transfer, ...] | None:
    """Copies from, to and between the simulated devices since ``reset_ledger``, in order.

    ``x.item()`` is one of a single element. None on real devices: ``transfers_refusal`` says why.
    """
    return None if transfers_refusal() else tuple(LEDGER.transfers)


def transfers_refusal() -> str | None:
    """Why the devices that ``devices`` gave last have no transfer log; None where they have."""
    real = [str(device) for device in _latest if not is_simulated(device)]
    if not real:
        return None
    return f"{', '.join(real)} copy without a log that torch can read; DEVICES=cpu simulates one"


def reset_ledger() -> None:
    """Forget the transfers and start every peak from the bytes that are held now."""
    LEDGER.reset()
    for device in _latest:
        if not is_simulated(device):
            backend(device.type).reset_peak_bytes(device)

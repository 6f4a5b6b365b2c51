"""The doctor: every check of this machine, a verdict, and an exit status."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from labkit.devices.backends import accelerator_kind, backend
from labkit.devices.doctor.doctor_checks import FAILURE, OK, WARNING, Finding
from labkit.devices.doctor.doctor_gpus import examine_gpus
from labkit.devices.doctor.doctor_system import examine_system
from labkit.devices.links.link_copies import DeviceCopies
from labkit.devices.links.peer_data import examine_peer_data
from labkit.devices.nvml import physical_gpus
from labkit.devices.tuning.tuning_manifest import MANIFEST

LOAD_S = 0.5


def examine(
    root: Path = Path("/"), manifest: Path = MANIFEST, own_pids: Iterable[int] = ()
) -> list[Finding]:
    """Run all checks; takes about a second on each pair of GPUs.

    Args:
        root: folder under which ``proc``, ``sys``, ``etc`` and ``dev`` lie.
        manifest: what tuning leaves behind when it is killed together with its watchdog.
        own_pids: processes that may use the GPUs: the notebook's ranks.
    """
    found = physical_gpus()
    devices = _torch_devices()
    findings = examine_system(root, len(found.devices))
    findings += [_tuning(manifest), torch_sees(len(found.devices), len(devices))]
    with _load(devices):
        findings += examine_gpus(found, root, own_pids)
    return findings + (examine_peer_data(DeviceCopies(devices)) if found.devices else [])


def exit_status(findings: Iterable[Finding]) -> int:
    """1 where a check failed, else 0: a warning is no failure."""
    return int(any(finding.level == FAILURE for finding in findings))


def report_json(findings: Iterable[Finding]) -> dict:
    """``{"schema": 1, "status": 0, "findings": [...]}`` with the reasons and advice of each."""
    findings = list(findings)
    return {
        "schema": 1,
        "status": exit_status(findings),
        "findings": [finding.to_json() for finding in findings],
    }


def torch_sees(num_gpus: int, num_devices: int) -> Finding:
    """Whether torch can use the GPUs that the driver knows."""
    said = f"torch {torch.__version__} can use {num_devices} of {num_gpus} NVIDIA GPUs"
    if not num_gpus:
        others = f"{num_devices} other accelerators" if num_devices else "no accelerator here"
        said = f"torch {torch.__version__}: {others}"
    if num_gpus and not num_devices:
        return Finding("torch", FAILURE, said)
    return Finding("torch", WARNING if num_devices < num_gpus else OK, said)


def _tuning(manifest: Path) -> Finding:
    if manifest.exists():
        return Finding("tuning", FAILURE, f"{manifest} is still there")
    return Finding("tuning", OK, "nothing is left of an earlier run")


def _torch_devices() -> list[torch.device]:
    kind = accelerator_kind()
    its = backend(kind) if kind else None
    return [its.torch_device(i) for i in range(its.count())] if its else []


@contextmanager
def _load(devices: list[torch.device]) -> Iterator[None]:
    """Keep the devices at work inside the block: an idle one slows its PCIe link down."""
    until = time.perf_counter() + LOAD_S
    matrices = [torch.ones(4096, 4096, device=device) for device in devices]
    while matrices and time.perf_counter() < until:  # the clocks need some time to rise
        for matrix in matrices:
            matrix @ matrix
        torch.accelerator.synchronize(matrices[0].device)
    for matrix in matrices:
        for _ in range(100):  # queued: they run while the block asks
            matrix @ matrix
    yield
    for device in devices:
        torch.accelerator.synchronize(device)

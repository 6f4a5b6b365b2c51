"""The doctor's look at each NVIDIA GPU, and at how they are joined."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path

import nvitop
from nvitop import libnvml

from labkit.devices.doctor.doctor_checks import FAILURE, OK, UNKNOWN, WARNING, Finding
from labkit.devices.doctor.doctor_system import kernel_module_version, num_numa_nodes, numa_node
from labkit.devices.links.peer_claims import peer_states
from labkit.devices.nvml import Gpus, ask

SLOWDOWN_BITS = 0x8 | 0x20 | 0x40 | 0x80  # hardware slowdown, two thermal reasons, power brake
MAX_LINKS = 18
TOPOLOGY = {
    libnvml.NVML_TOPOLOGY_INTERNAL: "one board",
    libnvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
    libnvml.NVML_TOPOLOGY_MULTIPLE: "several PCIe switches",
    libnvml.NVML_TOPOLOGY_HOSTBRIDGE: "one host bridge",
    libnvml.NVML_TOPOLOGY_NODE: "one NUMA node",
    libnvml.NVML_TOPOLOGY_SYSTEM: "the link between processors",
}


def examine_gpus(found: Gpus, root: Path, own_pids: Iterable[int] = ()) -> list[Finding]:
    """All checks of the driver and of each GPU and pair.

    Args:
        found: the GPUs, or why there are none.
        root: folder under which ``proc`` and ``sys`` lie: ``/``.
        own_pids: processes that may use the GPUs, beside this one.
    """
    findings = [_driver(found, root)]
    if len(found.devices) > 1:
        findings.append(_mixed(found.devices))
    mine = {os.getpid(), *own_pids}
    for place, gpu in enumerate(found.devices):
        findings += _examine_gpu(gpu, f"GPU {place}", root, mine)
    for (i, a), (j, b) in combinations(enumerate(found.devices), 2):
        if a.handle is not None and b.handle is not None:
            findings.append(_peer_access(a, b, f"GPU {i} and {j}"))
    return findings


def _driver(found: Gpus, root: Path) -> Finding:
    module = kernel_module_version(root)
    if not found.devices:
        level = FAILURE if module or "reboot" in found.reason else OK
        return Finding("driver", level, f"no NVIDIA GPU can be used: {found.reason}")
    library = nvitop.Device.driver_version()
    if module and module != library:
        return Finding("driver", FAILURE, f"kernel module {module}, library {library}")
    return Finding("driver", OK, f"version {library}, {len(found.devices)} GPUs")


def _mixed(gpus: tuple[nvitop.Device, ...]) -> Finding:
    names = sorted({str(gpu.name()) for gpu in gpus})
    level = WARNING if len(names) > 1 else OK
    return Finding("mixed cards", level, ", ".join(names))


def _examine_gpu(gpu: nvitop.Device, name: str, root: Path, mine: set[int]) -> list[Finding]:
    if gpu.handle is None:
        return [Finding("lost", FAILURE, "it answers nothing", name)]
    checks = (
        _pcie_width,
        _pcie_generation,
        _ecc,
        _ecc_errors,
        _mig,
        _persistence,
        _power_limit,
        _throttling,
        _display,
        _nvlink,
    )
    findings = [check(gpu.handle, name) for check in checks]
    return [*findings, _other_processes(gpu, name, mine), _numa(gpu, name, root)]


def _judged(
    check: str, name: str, function: str, handle, judge: Callable[..., tuple[str, str]]
) -> Finding:
    """Ask one query; ``judge(value)`` gives the level and what was found."""
    value, reason = ask(function, handle)
    return Finding(check, *((UNKNOWN, reason) if reason else judge(value)), name)


def _pcie_width(handle, name: str) -> Finding:
    most, _ = ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
    return _judged(
        "pcie width",
        name,
        "nvmlDeviceGetCurrPcieLinkWidth",
        handle,
        lambda now: (WARNING if most and now < most else OK, f"{now} of {most or '?'} lanes"),
    )


def _pcie_generation(handle, name: str) -> Finding:
    most, _ = ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)
    state, _ = ask("nvmlDeviceGetPerformanceState", handle)
    under_load = state is not None and state <= 2  # P0 to P2; above the card saves power

    def judge(now: int) -> tuple[str, str]:
        below = bool(most) and now < most
        said = f"generation {now} of {most or '?'}, {'under load' if under_load else 'idle'}"
        return (OK if not below else WARNING if under_load else UNKNOWN), said

    return _judged("pcie generation", name, "nvmlDeviceGetCurrPcieLinkGeneration", handle, judge)


def _ecc(handle, name: str) -> Finding:
    def judge(now_and_pending: list[int]) -> tuple[str, str]:
        now, pending = ("on" if mode else "off" for mode in now_and_pending)
        changes = now != pending
        return (WARNING if changes else OK), now + (f", {pending} after a reboot" * changes)

    return _judged("ecc", name, "nvmlDeviceGetEccMode", handle, judge)


def _ecc_errors(handle, name: str) -> Finding:
    errors, reason = ask(
        "nvmlDeviceGetTotalEccErrors",
        handle,
        libnvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        libnvml.NVML_VOLATILE_ECC,
    )
    if reason:
        return Finding("ecc errors", UNKNOWN, reason, name)
    return Finding("ecc errors", FAILURE if errors else OK, f"{errors} uncorrected", name)


def _mig(handle, name: str) -> Finding:
    mode, reason = ask("nvmlDeviceGetMigMode", handle)
    on = bool(mode and mode[0])  # most cards do not know MIG at all
    return Finding("mig", FAILURE if on else OK, "on" if on else reason or "off", name)


def _persistence(handle, name: str) -> Finding:
    judge = lambda on: (OK, "on") if on else (WARNING, "off")  # noqa: E731
    return _judged("persistence", name, "nvmlDeviceGetPersistenceMode", handle, judge)


def _power_limit(handle, name: str) -> Finding:
    default, _ = ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)

    def judge(limit: int) -> tuple[str, str]:
        changed = default is not None and limit != default
        said = f"{limit / 1e3:.0f} W" + (f", by default {default / 1e3:.0f} W" if changed else "")
        return (WARNING if changed else OK), said

    return _judged("power limit", name, "nvmlDeviceGetPowerManagementLimit", handle, judge)


def _throttling(handle, name: str) -> Finding:
    return _judged(
        "throttling",
        name,
        "nvmlDeviceGetCurrentClocksEventReasons",
        handle,
        lambda bits: (
            FAILURE if bits & SLOWDOWN_BITS else OK,
            f"reasons {bits:#x}" if bits & SLOWDOWN_BITS else "no slowdown now",
        ),
    )


def _display(handle, name: str) -> Finding:
    judge = lambda on: (WARNING, "drives a display") if on else (OK, "none")  # noqa: E731
    return _judged("display", name, "nvmlDeviceGetDisplayActive", handle, judge)


def _nvlink(handle, name: str) -> Finding:
    states = [ask("nvmlDeviceGetNvLinkState", handle, link).value for link in range(MAX_LINKS)]
    known = [state for state in states if state is not None]
    up = sum(map(bool, known))
    if not known:
        return Finding("nvlink", OK, "none", name)
    level = WARNING if 0 < up < len(known) else OK
    return Finding("nvlink", level, f"{up} of {len(known)} links up", name)


def _other_processes(gpu: nvitop.Device, name: str, mine: set[int]) -> Finding:
    others = sorted(set(gpu.processes()) - mine)
    level = WARNING if others else OK
    return Finding("other processes", level, f"pids {others}" if others else "none", name)


def _numa(gpu: nvitop.Device, name: str, root: Path) -> Finding:
    node = numa_node(root, str(gpu.bus_id()))
    if node is None:
        return Finding("numa", OK, "the system names no node: there is one", name)
    nodes = num_numa_nodes(root)
    return Finding("numa", WARNING if nodes > 1 else OK, f"node {node} of {nodes}", name)


def _peer_access(a: nvitop.Device, b: nvitop.Device, name: str) -> Finding:
    level_of_path, _ = ask("nvmlDeviceGetTopologyCommonAncestor", a.handle, b.handle)
    over = f"over {TOPOLOGY.get(level_of_path, 'an unknown path')}"
    missing = [kind for kind, able in peer_states(a.handle, b.handle).items() if not able]
    if missing:
        return Finding("peer access", WARNING, f"no {' and no '.join(missing)}, {over}", name)
    return Finding("peer access", OK, f"read and write, {over}", name)

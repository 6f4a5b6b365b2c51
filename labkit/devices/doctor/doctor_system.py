"""The doctor's look at the machine itself, through files that a test can put elsewhere."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from labkit.devices.doctor.doctor_checks import FAILURE, OK, UNKNOWN, WARNING, Finding

SHARED_MEMORY_GIB = 1.0
OPEN_FILES = 4096
PASS_THROUGH = re.compile(r"\b(iommu=pt|intel_iommu=off|amd_iommu=off|iommu=off)\b")
JOINED_OPTION = re.compile(
    r'^\s*Option\s+"(SLI|MultiGPU|BaseMosaic)"\s+"(?!off|false|no|0)', re.IGNORECASE | re.MULTILINE
)
X_CONFIGURATIONS = ("etc/X11/xorg.conf*", "etc/X11/xorg.conf.d/*", "usr/share/X11/xorg.conf.d/*")
BRIDGE_CLASS, ACS_CAPABILITY, EXTENDED_START = "0x0604", 0x000D, 0x100


def examine_system(root: Path, num_gpus: int) -> list[Finding]:
    """All checks that need no GPU library.

    Args:
        root: folder under which ``proc``, ``sys``, ``etc`` and ``dev`` lie: ``/``.
        num_gpus: how many there are; some faults only matter with several.
    """
    return [
        _sli(root),
        _iommu(root),
        _acs(root),
        _shared_memory(root, num_gpus),
        _open_files(),
        _wsl(root),
    ]


def kernel_module_version(root: Path) -> str | None:
    """Version of the loaded NVIDIA kernel module; None where none is loaded."""
    text = _text(root / "proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def numa_node(root: Path, bus: str) -> int | None:
    """NUMA node of the PCI device ``00000000:21:00.0``; None where the system does not say."""
    name = bus.lower()[-12:]  # NVML writes the domain with eight digits, the system with four
    text = _text(root / f"sys/bus/pci/devices/{name}/numa_node")
    return int(text) if text and int(text) >= 0 else None


def num_numa_nodes(root: Path) -> int:
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*")))


def _sli(root: Path) -> Finding:
    files = [path for pattern in X_CONFIGURATIONS for path in sorted(root.glob(pattern))]
    joined = [f"/{path.relative_to(root)}" for path in files if JOINED_OPTION.search(_text(path))]
    if joined:
        return Finding("sli", FAILURE, f"switched on in {', '.join(joined)}")
    looked = f"{len(files)} X configuration file{'s' * (len(files) > 1)} looked at"
    return Finding("sli", OK, f"not switched on: {looked if files else 'no X configuration'}")


def _iommu(root: Path) -> Finding:
    units = _names(root / "sys/class/iommu")
    setting = PASS_THROUGH.search(_text(root / "proc/cmdline"))
    if units and not setting:
        return Finding("iommu", WARNING, "it translates addresses: iommu=pt was not set at boot")
    return Finding("iommu", OK, setting[0] if setting else "none is active")


def _acs(root: Path) -> Finding:
    bridges = [
        folder
        for folder in sorted((root / "sys/bus/pci/devices").glob("*"))
        if _text(folder / "class").startswith(BRIDGE_CLASS)
    ]
    controls = {folder.name: _acs_control(folder / "config") for folder in bridges}
    on = [name for name, control in controls.items() if control]
    if on:
        more = ", ..." if len(on) > 1 else ""
        said = f"on at {len(on)} of {_bridges(len(bridges))}: {on[0]}{more}"
        return Finding("acs", WARNING, said)
    if not bridges:
        return Finding("acs", OK, "the system shows no PCI bridge that could have it")
    if None in controls.values():
        return Finding("acs", UNKNOWN, "the bridges' configuration needs root to be read")
    return Finding("acs", OK, f"off at {_bridges(len(bridges))}")


def _bridges(count: int) -> str:
    return f"{count} PCI bridges" if count > 1 else "the one PCI bridge"


def _acs_control(path: Path) -> int | None:
    """Bits of the ACS control register, 0 without one; None where it may not be read.

    PCI Express Base Specification, extended capabilities: a chain of headers from byte 0x100, the
    lower 16 bits the capability, the upper 12 the next header; the control word stands at 6.
    """
    try:
        config = path.read_bytes()
    except OSError:
        return None
    if len(config) <= EXTENDED_START:
        return None  # without privilege Linux gives 64 bytes
    at, hops = EXTENDED_START, 0
    while EXTENDED_START <= at <= len(config) - 8 and hops < 64:
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == ACS_CAPABILITY:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at, hops = header >> 20, hops + 1
    return 0


def _shared_memory(root: Path, num_gpus: int) -> Finding:
    try:
        state = os.statvfs(root / "dev/shm")
    except OSError:
        return Finding("shared memory", UNKNOWN, "there is no /dev/shm")
    gib = state.f_frsize * state.f_blocks / 2**30
    small = FAILURE if num_gpus > 1 else WARNING
    level = OK if gib >= SHARED_MEMORY_GIB else small
    size = f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.0f} MiB"
    return Finding("shared memory", level, f"/dev/shm has {size}")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = OK if soft >= OPEN_FILES or soft == resource.RLIM_INFINITY else WARNING
    return Finding("open files", level, f"{soft} allowed, at most {hard}")


def _wsl(root: Path) -> Finding:
    inside = "microsoft" in _text(root / "proc/sys/kernel/osrelease").lower()
    return Finding("wsl", WARNING if inside else OK, "this is WSL" if inside else "this is not WSL")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _names(folder: Path) -> list[str]:
    return sorted(_entries(folder)) if folder.is_dir() else []


def _entries(folder: Path) -> Iterator[str]:
    return (path.name for path in folder.iterdir())

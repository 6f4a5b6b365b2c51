"""Which devices a notebook runs on, and where its numbers come from."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass

import psutil

from labkit.devices.backends import accelerator_kind, backend
from labkit.devices.machines import CARDS, machine

# The cards of the named machines by the name that the driver gives them. One that is not listed has
# no known peak: MFU is then refused, not guessed.
_CARD_NAMES = {
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA RTX 6000 Ada Generation": "6000-ada",
    "NVIDIA GeForce RTX 3090": "3090",
    "NVIDIA GeForce RTX 4090": "4090",
    "NVIDIA H200": "h200",
}
PEAK_FLOPS = {
    name: {dtype: CARDS[card].peak_flops[dtype] for dtype in ("float32", "bfloat16")}
    for name, card in _CARD_NAMES.items()
}

DEFAULT_MACHINE = "lab"  # the lab's narrow model shows the ratios of a wide one on A6000 cards


@dataclass(frozen=True)
class Device:
    """One device: a GPU, one process of a CPU run, or a virtual GPU.

    ``uuid``, ``memory_bytes`` and ``peak_flops`` (FLOP/s by dtype name) are None where unknown.
    """

    kind: str
    index: int
    name: str
    uuid: str | None = None
    memory_bytes: int | None = None
    peak_flops: dict[str, float] | None = None


@dataclass(frozen=True)
class DeviceSet:
    """The devices that a notebook uses, all of one kind.

    Args:
        devices: at least one.
        physical_cores: of the host; timing on ``cpu`` counts only up to that many ranks.
        machine: of virtual GPUs, the name for ``labkit.devices.machines.machine``.
    """

    devices: tuple[Device, ...]
    physical_cores: int
    machine: str | None = None

    def __post_init__(self) -> None:
        kinds = sorted({device.kind for device in self.devices})
        if len(kinds) != 1:
            raise ValueError(
                f"devices of kinds {kinds}: a set holds at least one, all of one kind; "
                "use choose_devices(...)"
            )

    @property
    def kind(self) -> str:
        return self.devices[0].kind

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def provenance(self) -> str:
        """Label of every number that these devices yield, such as ``measured:cpu``."""
        return f"virtual:{self.machine}" if self.machine else f"measured:{self.kind}"

    def first(self, count: int) -> DeviceSet:
        """The first ``count`` devices, for comparing with fewer."""
        if not 1 <= count <= self.count:
            raise ValueError(f"count={count} must lie within 1..{self.count}, the devices here")
        return DeviceSet(self.devices[:count], self.physical_cores, self.machine)

    def to_json(self) -> dict:
        return {
            "kind": self.kind,
            "count": self.count,
            "physical_cores": self.physical_cores,
            "machine": self.machine,
            "devices": [asdict(device) for device in self.devices],
        }

    @staticmethod
    def from_json(data: dict) -> DeviceSet:
        """Inverse of ``to_json``."""
        return DeviceSet(
            tuple(Device(**device) for device in data["devices"]),
            data["physical_cores"],
            data["machine"],
        )


def choose_devices(requested: str = "auto", count: int = 1) -> DeviceSet:
    """The devices for a notebook that wants ``count``.

    Args:
        requested: ``auto`` takes the accelerators where there are ``count`` of them, else virtual
            GPUs; ``cpu``, the name of an accelerator (``cuda``), ``virtual`` or
            ``virtual:<machine>`` insists.
        count: number of devices, >= 1.

    Raises:
        ValueError: ``requested`` is unknown or has fewer than ``count``; the message says what is
            there and what to choose.
    """
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")
    here = accelerator_kind()
    there = backend(here).count() if here else 0
    if requested == "auto":
        requested = here if here and there >= count else "virtual"
    kind, _, machine_name = requested.partition(":")
    if kind == "virtual":
        return virtual_devices(machine_name or DEFAULT_MACHINE, count)
    if requested == "cpu":
        return DeviceSet(tuple(_cpu_device(i) for i in range(count)), physical_cores())
    if requested == here and there >= count:
        devices = tuple(_accelerator_device(requested, index) for index in range(count))
        return DeviceSet(devices, physical_cores())
    if requested not in (here, "cuda", "xpu", "mps"):
        raise ValueError(
            f"DEVICES={requested!r} is unknown; choose auto, cuda, cpu, virtual or "
            "virtual:<machine>"
        )
    found = f"{there} of kind {here}" if here else "no accelerator"
    raise ValueError(
        f"DEVICES={requested!r} with count={count}: this machine has {found} "
        f"and {physical_cores()} CPU cores; choose DEVICES=auto, virtual or cpu"
    )


def virtual_devices(machine_name: str, count: int) -> DeviceSet:
    """Virtual GPUs of a named machine: executed by CPU processes, timed by its profiles.

    Raises:
        ValueError: the machine is unknown; the message lists those there are.
    """
    modelled = machine(machine_name, count)
    devices = tuple(
        Device("virtual", i, profile.name, None, profile.memory_bytes, dict(profile.peak_flops))
        for i, profile in enumerate(modelled.profiles)
    )
    return DeviceSet(devices, physical_cores(), machine_name)


def physical_cores() -> int:
    """Cores without hyper-threads, at least 1; all logical ones where the system hides the rest."""
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def _cpu_device(index: int) -> Device:
    name = platform.processor() or platform.machine()
    return Device("cpu", index, f"{name} process", None, psutil.virtual_memory().total, None)


def _accelerator_device(kind: str, index: int) -> Device:
    its = backend(kind)
    name = its.name(index)
    return Device(kind, index, name, its.uuid(index), its.memory_bytes(index), PEAK_FLOPS.get(name))

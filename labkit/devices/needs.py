"""What a claim asks of the hardware: a claim that it cannot support is refused, with the reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.util import find_spec

from labkit.devices.inventory import DeviceSet
from labkit.models.pretrained import why_not_pretrained

MOST_WAITED = 0.03  # of a step: beyond it, 10 % is not a question of the prediction


@dataclass(frozen=True)
class Timing:
    """Wall-clock time of ``devices`` ranks that work at once.

    Accelerators support it when they are there; CPU ranks only while each has a core of its own.
    """

    devices: int = 1

    def refusal(self, found: DeviceSet) -> str | None:
        """Why ``found`` cannot support the claim; None when it can."""
        if found.count < self.devices:
            return f"needs {self.devices} devices, this run has {found.count}"
        if found.kind == "cpu" and self.devices > found.physical_cores:
            return (
                f"{self.devices} CPU ranks share {found.physical_cores} physical cores: "
                "their wall-clock time says nothing about as many devices"
            )
        return None


@dataclass(frozen=True)
class Accelerators:
    """``devices`` real accelerators."""

    devices: int = 1

    def refusal(self, found: DeviceSet) -> str | None:
        """Why ``found`` cannot support the claim; None when it can."""
        if found.kind in ("cpu", "virtual"):
            return f"needs {self.devices} accelerators, this run uses {found.kind} devices"
        if found.count < self.devices:
            return f"needs {self.devices} accelerators, this run has {found.count}"
        return None


@dataclass(frozen=True)
class Virtual:
    """Devices whose machine is modelled, so that a layout can be predicted without calibration."""

    def refusal(self, found: DeviceSet) -> str | None:
        """Why ``found`` cannot support the claim; None when it can."""
        if found.kind == "virtual":
            return None
        return f"what {found.kind} devices and links cost is not known until it is calibrated"


@dataclass(frozen=True)
class KnownPeak:
    """A device whose peak FLOP/s for ``dtype`` is published, so that MFU means something."""

    dtype: str = "float32"

    def refusal(self, found: DeviceSet) -> str | None:
        """Why ``found`` cannot support the claim; None when it can."""
        for device in found.devices:
            if self.dtype not in (device.peak_flops or {}):
                return f"no published {self.dtype} peak FLOP/s is known for {device.name!r}"
        return None


@dataclass(frozen=True)
class Cores:
    """``count`` physical cores of the host, for CPU ranks that are timed beside other devices."""

    count: int

    def refusal(self, found: DeviceSet) -> str | None:
        """Why the host cannot support the claim; None when it can."""
        if found.physical_cores < self.count:
            return f"needs {self.count} physical cores, this host has {found.physical_cores}"
        return None


@dataclass(frozen=True)
class QuietCores:
    """``count`` physical cores of the host that other programs left to the ranks timed on them.

    Args:
        waited: the share of the timed steps in which a rank was ready and had no core; None where
            the system does not tell.
        most: the largest share that does not count as disturbed.
    """

    count: int
    waited: float | None
    most: float = MOST_WAITED

    def refusal(self, found: DeviceSet) -> str | None:
        """Why the host cannot support the claim; None when it can."""
        if self.waited is None:
            return "this system does not tell how long a process was kept from its core"
        if self.waited > self.most:
            return (
                f"other programs kept the ranks from a core for {self.waited:.0%} of their steps; "
                "run it again on a quiet machine"
            )
        return Cores(self.count).refusal(found)


@dataclass(frozen=True)
class Package:
    """An optional Python package, by the name that is imported."""

    name: str

    def refusal(self, found: DeviceSet) -> str | None:
        """Why this environment cannot support the claim; None when it can."""
        return None if find_spec(self.name) else f"{self.name} is not installed"


@dataclass(frozen=True)
class PretrainedModel:
    """The package that carries a pretrained chat model."""

    def refusal(self, found: DeviceSet) -> str | None:
        """Why this environment cannot support the claim; None when it can."""
        return why_not_pretrained()


@dataclass(frozen=True)
class EnergyCounters:
    """``devices`` devices that each counted their energy.

    Args:
        missing: what was said in place of an energy, ``EnergyReading.reason``; None where all did.
    """

    devices: int = 1
    missing: str | None = None

    def refusal(self, found: DeviceSet) -> str | None:
        """Why ``found`` cannot support the claim; None when it can."""
        if found.kind == "virtual":
            return "the energy of a virtual device is not modelled"
        if found.count < self.devices:
            return f"needs {self.devices} devices, this run has {found.count}"
        return self.missing


Need = (
    Timing
    | Accelerators
    | Virtual
    | KnownPeak
    | Cores
    | QuietCores
    | Package
    | PretrainedModel
    | EnergyCounters
)
_KINDS = (
    Timing,
    Accelerators,
    Virtual,
    KnownPeak,
    Cores,
    QuietCores,
    Package,
    PretrainedModel,
    EnergyCounters,
)
_TYPES = {kind.__name__: kind for kind in _KINDS}


def need_to_json(need: Need) -> dict:
    """``{"type": "Timing", "devices": 2}``"""
    return {"type": type(need).__name__, **asdict(need)}


def need_from_json(data: dict) -> Need:
    """Inverse of ``need_to_json``.

    Raises:
        ValueError: the type is unknown.
    """
    fields = dict(data)
    name = fields.pop("type")
    if name not in _TYPES:
        raise ValueError(f"need of type {name!r} is unknown; one of {', '.join(_TYPES)}")
    return _TYPES[name](**fields)

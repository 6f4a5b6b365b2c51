"""The figures that telemetry can give of a device, each with its unit and what it means."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Metric(NamedTuple):
    """``counter`` figures only grow: what counts is the difference of two."""

    unit: str
    meaning: str
    counter: bool = False


METRICS = {
    "kernel_active_percent": Metric(
        "%",
        "share of time in which at least one kernel was on the device; one that waits for another "
        "device counts, and so does one that fills a hundredth of it",
    ),
    "compute_percent": Metric("%", "share of time in which the device computed"),
    "cpu_percent": Metric("%", "CPU seconds of the process per second; 100 is one core"),
    "memory_used_bytes": Metric("B", "memory in use; of a CPU process, its resident set"),
    "memory_peak_bytes": Metric(
        "B", "most bytes of tensors alive at once in the whole step: one figure, in every sample"
    ),
    "power_w": Metric("W", "power now"),
    "energy_j": Metric("J", "energy since some moment", counter=True),
    "temperature_c": Metric("°C", "temperature of the chip"),
    "fan_percent": Metric("%", "fan speed as the driver asks for it"),
    "sm_clock_mhz": Metric("MHz", "clock of the multiprocessors"),
    "memory_clock_mhz": Metric("MHz", "clock of the memory"),
    "throttle_bits": Metric("bits", "why the clocks are not higher; see throttle_reasons"),
    "link_percent": Metric("%", "share of time in which data of the device were under way"),
    "pcie_sent_bytes_per_s": Metric("B/s", "over PCIe, within 20 ms before the query"),
    "pcie_received_bytes_per_s": Metric("B/s", "over PCIe, within 20 ms before the query"),
    "nvlink_sent_bytes": Metric("B", "over all NVLinks since some moment", counter=True),
    "nvlink_received_bytes": Metric("B", "over all NVLinks since some moment", counter=True),
}
# what the first row of a picture shows, where there is more than one
ACTIVITY = ("compute_percent", "kernel_active_percent", "cpu_percent")

# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
THROTTLE = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
}
SLOWED_DOWN = 0x4 | 0x8 | 0x20 | 0x40 | 0x80  # reasons that more cooling or power would lift


def throttle_reasons(bits: int) -> list[str]:
    """Names of the set bits.

    >>> throttle_reasons(0x44)
    ['power cap', 'hardware thermal']
    """
    return [name for bit, name in THROTTLE.items() if bits & bit]


class Reading(NamedTuple):
    """One look at one device.

    Attributes:
        values: by metric, in its unit.
        reasons: by metric, why there is no value.
        lost: the device, or the process that stands for it, is gone.
    """

    values: dict[str, float]
    reasons: dict[str, str] = {}
    lost: bool = False

    @staticmethod
    def nothing(reason: str, lost: bool = False) -> Reading:
        """No figure at all."""
        return Reading({}, dict.fromkeys(METRICS, reason), lost)


class Metered(NamedTuple):
    """A device that is read.

    Attributes:
        name: as shown, such as ``GPU 0`` or ``rank 1``.
        provenance: of its figures.
        model: of the card.
        uuid: as NVML writes it; None where it has none.
        memory_bytes: capacity; None where unknown.
        has_meter: it may have an energy counter; a process never has.
    """

    name: str
    provenance: str
    model: str = ""
    uuid: str | None = None
    memory_bytes: int | None = None
    has_meter: bool = True


class Source(Protocol):
    """Where figures come from; one for each kind of device."""

    devices: tuple[Metered, ...]

    def read(self, index: int) -> Reading:
        """Look at ``devices[index]`` now; does not raise for what cannot be read."""

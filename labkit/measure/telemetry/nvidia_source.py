"""Figures of NVIDIA GPUs: identity from nvitop, figures from raw NVML queries through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import nvitop
from nvitop import libnvml

from labkit.devices.nvml import LASTING, LOST, Answer, ask, ask_field, gpu_of_uuid, physical_gpus
from labkit.measure.telemetry.metrics import Metered, Reading

ALL_LINKS = 0xFFFFFFFF  # the scope for which NVML adds up all NVLinks of a GPU
Query = Callable[[object], Answer]


def _query(function: str, *arguments: object, scale: float = 1) -> Query:
    def run(handle: object) -> Answer:
        value, reason = ask(function, handle, *arguments)
        return Answer(None, reason) if reason else Answer(value * scale)

    return run


def _field(number: int, scale: float) -> Query:
    def run(handle: object) -> Answer:
        value, reason = ask_field(handle, number, ALL_LINKS)
        return Answer(None, reason) if reason else Answer(value * scale)

    return run


def _kernel_active(handle: object) -> Answer:
    rates, reason = ask("nvmlDeviceGetUtilizationRates", handle)
    return Answer(None, reason) if reason else Answer(rates.gpu)


def _memory_used(handle: object) -> Answer:
    memory, reason = ask("nvmlDeviceGetMemoryInfo", handle)
    return Answer(None, reason) if reason else Answer(memory.used)


def _power(handle: object) -> Answer:
    """Power now; where the driver lacks it, its own average, over 1 s on Ampere cards."""
    value, reason = ask_field(handle, libnvml.NVML_FI_DEV_POWER_INSTANT)
    if reason in LASTING:
        value, reason = ask("nvmlDeviceGetPowerUsage", handle)
    return Answer(None, reason) if reason else Answer(value / 1e3)


_QUERIES: dict[str, Query] = {
    "kernel_active_percent": _kernel_active,
    "memory_used_bytes": _memory_used,
    "power_w": _power,
    "energy_j": _query("nvmlDeviceGetTotalEnergyConsumption", scale=1e-3),
    "temperature_c": _query("nvmlDeviceGetTemperature", libnvml.NVML_TEMPERATURE_GPU),
    "fan_percent": _query("nvmlDeviceGetFanSpeed"),
    "sm_clock_mhz": _query("nvmlDeviceGetClockInfo", libnvml.NVML_CLOCK_SM),
    "memory_clock_mhz": _query("nvmlDeviceGetClockInfo", libnvml.NVML_CLOCK_MEM),
    "throttle_bits": _query("nvmlDeviceGetCurrentClocksEventReasons"),
}
# each PCIe query blocks for some 20 ms
_TRAFFIC: dict[str, Query] = {
    "pcie_sent_bytes_per_s": _query(
        "nvmlDeviceGetPcieThroughput", libnvml.NVML_PCIE_UTIL_TX_BYTES, scale=1000
    ),
    "pcie_received_bytes_per_s": _query(
        "nvmlDeviceGetPcieThroughput", libnvml.NVML_PCIE_UTIL_RX_BYTES, scale=1000
    ),
    "nvlink_sent_bytes": _field(libnvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 1024),
    "nvlink_received_bytes": _field(libnvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, 1024),
}
TRAFFIC = tuple(_TRAFFIC)


class NvidiaSource:
    """NVIDIA GPUs.

    Args:
        uuids: of the GPUs, in the order of the ranks that use them; None for all, in PCI order.
            By UUID, so that neither ``CUDA_VISIBLE_DEVICES`` nor ``CUDA_DEVICE_ORDER`` can mix
            them up.
        traffic: read PCIe and NVLink too, which takes some 40 ms a GPU.
    """

    def __init__(self, uuids: Sequence[str] | None = None, traffic: bool = False) -> None:
        found = physical_gpus().devices if uuids is None else [gpu_of_uuid(u) for u in uuids]
        self._gpus = tuple(found)
        self._queries = _QUERIES | (_TRAFFIC if traffic else {})
        self._not_asked = {} if traffic else dict.fromkeys(TRAFFIC, "ask for it with traffic=True")
        names = uuids or [None] * len(self._gpus)
        self.devices = tuple(map(_metered, range(len(self._gpus)), self._gpus, names))
        self._lasting: list[dict[str, str]] = [{} for _ in self._gpus]  # metric -> reason

    def read(self, index: int) -> Reading:
        """Ask all queries of one GPU; what it never answers is asked once only."""
        gpu, lasting = self._gpus[index], self._lasting[index]
        if gpu is None:
            return Reading.nothing("NVML knows no GPU of this UUID")
        if gpu.handle is None:
            return Reading.nothing(LOST, lost=True)
        values: dict[str, float] = {}
        reasons = self._not_asked | lasting
        for metric, query in self._queries.items():
            if metric in lasting:
                continue
            value, reason = query(gpu.handle)
            if reason == LOST:
                return Reading.nothing(LOST, lost=True)
            if reason is None:
                values[metric] = value
            else:
                reasons[metric] = reason
            if reason in LASTING:
                lasting[metric] = reason
        return Reading(values, reasons)


def _metered(place: int, gpu: nvitop.Device | None, uuid: str | None) -> Metered:
    if gpu is None or gpu.handle is None:
        return Metered(f"GPU {place}", "measured:cuda", "", uuid)
    total = gpu.memory_total()
    memory_bytes = total if isinstance(total, int) else None
    return Metered(f"GPU {place}", "measured:cuda", str(gpu.name()), gpu.uuid(), memory_bytes)

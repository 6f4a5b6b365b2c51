"""A stand-in for the library libnvidia-ml with scripted GPUs.

An object assigned to ``pynvml.nvmlLib``: the real pynvml wrappers and the real nvitop run on top,
only the shared object is replaced. Figures are numbers or key frames: ``[[0, 20], [1, 90]]``
is 20 at second 0 and 90 from second 1 on, linear between.

Other processes see the same GPUs through ``sitecustomize.py`` in this folder, which reads the
scenario that ``write_scenario`` wrote; what setters change lies in a state file beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pynvml

SETTABLE = ("limit_mw", "locked", "fan_manual")


@dataclass
class FakeGPU:
    """One RTX A6000; ``unsupported`` names the queries that it answers with "not supported".

    ``instance_of`` makes it a MIG instance of that GPU; instances stand after all GPUs.
    """

    name: str = "NVIDIA RTX A6000"
    uuid: str = ""
    bus: str = ""
    memory_total: int = 51_527_024_640
    memory_used: object = 0
    busy: object = 0
    power_w: object = 22.0
    temperature: object = 35
    fan: object = 30
    fans: int = 1
    clock: object = 1410
    throttle: int = 1
    limits_w: tuple = (100, 300, 300)  # least, default, most
    width: int = 16
    generation: int = 4
    ecc: tuple = (0, 0)
    ecc_errors: int = 0
    mig: object = None
    display: int = 0
    persistence: int = 1
    p2p: int = 0
    nvlinks: int = 0
    pids: tuple = ()
    unsupported: tuple = ()
    lost_from_s: float = float("inf")
    instance_of: object = None
    limit_mw: int = 300_000
    locked: object = None
    fan_manual: object = None


@dataclass
class Scenario:
    """What the fake library answers; ``init_error`` is an NVML code for its initialisation."""

    gpus: list = field(default_factory=list)
    root: bool = False
    init_error: int = 0
    driver: str = "580.95.05"
    state: str = ""  # file that holds what setters changed, for all processes

    def __post_init__(self) -> None:
        self.gpus = [FakeGPU(**g) if isinstance(g, dict) else g for g in self.gpus]
        for i, gpu in enumerate(self.gpus):
            gpu.uuid = gpu.uuid or f"GPU-a600000{i}-0000-4000-8000-{i:012x}"
            gpu.bus = gpu.bus or f"00000000:{0x21 + 0x20 * i:02X}:00.0"


def write_scenario(scenario: Scenario, folder: Path) -> dict[str, str]:
    """Write the scenario; returns the environment in which a Python process sees its GPUs."""
    scenario.state = str(folder / "gpu-state.json")
    path = folder / "scenario.json"
    path.write_text(json.dumps(asdict(scenario)))
    return {"FAKE_NVML": str(path), "PYTHONPATH": str(Path(__file__).parent)}


class _NvmlError(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


def _out(pointer, value) -> None:
    """Write through what ``ctypes.byref`` made."""
    getattr(pointer, "_obj", pointer).value = value


def _plain(argument):
    return getattr(argument, "value", argument)


class FakeNvml:
    """The library: every ``nvml...`` method takes what the C function takes.

    Attributes:
        calls: each setter that changed something, in order.
        asked: how often each function was called.
    """

    def __init__(self, scenario: Scenario, clock=time.monotonic) -> None:
        self.scenario, self.clock, self.began_s = scenario, clock, clock()
        self.calls: list[tuple] = []
        self.asked: dict[str, int] = {}

    def __getattr__(self, name: str):
        plain = name.removesuffix("_v2").removesuffix("_v3")
        method = getattr(type(self), f"_{plain}", None)
        if not name.startswith("nvml") or method is None:
            raise AttributeError(name)

        def function(*arguments):
            self.asked[name] = self.asked.get(name, 0) + 1
            try:
                return self._call(plain, method, arguments)
            except _NvmlError as error:
                return error.code

        return function

    def _call(self, name: str, method, arguments) -> int:
        for place, argument in enumerate(arguments, start=1):
            if isinstance(argument, float | tuple | list):  # what ctypes takes for no C function
                raise ctypes.ArgumentError(f"argument {place} of {name}: {argument!r}")
        handle = arguments[0] if arguments else None
        if isinstance(handle, pynvml.c_nvmlDevice_t):
            gpu = self._gpu(handle)
            if self.now_s >= gpu.lost_from_s and name != "nvmlDeviceGetHandleByUUID":
                raise _NvmlError(pynvml.NVML_ERROR_GPU_IS_LOST)
            if name in gpu.unsupported:
                raise _NvmlError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return method(self, gpu, *arguments[1:]) or 0
        return method(self, *arguments) or 0

    @property
    def now_s(self) -> float:
        return self.clock() - self.began_s

    def _index(self, handle) -> int:
        return ctypes.c_void_p.from_address(ctypes.addressof(handle)).value - 1

    def _gpu(self, handle) -> FakeGPU:
        self._load_state()
        return self.scenario.gpus[self._index(handle)]

    def _number(self, value) -> float:
        """The value of a number or of key frames now."""
        if not isinstance(value, list | tuple):
            return value
        now, (last_s, last) = self.now_s, value[0]
        for at_s, reached in value:
            if now < at_s:
                return last + (reached - last) * (now - last_s) / (at_s - last_s)
            last_s, last = at_s, reached
        return last

    def _change(self, gpu: FakeGPU, **changed) -> int:
        if not self.scenario.root:
            raise _NvmlError(pynvml.NVML_ERROR_NO_PERMISSION)
        for name, value in changed.items():
            setattr(gpu, name, value)
            self.calls.append((self.scenario.gpus.index(gpu), name, value))
        self._save_state()

    def _save_state(self) -> None:
        if self.scenario.state:
            kept = [{n: getattr(g, n) for n in SETTABLE} for g in self.scenario.gpus]
            partial = Path(f"{self.scenario.state}.{os.getpid()}")
            partial.write_text(json.dumps(kept))
            partial.replace(self.scenario.state)

    def _load_state(self) -> None:
        if self.scenario.state and Path(self.scenario.state).exists():
            kept = json.loads(Path(self.scenario.state).read_text())
            for gpu, values in zip(self.scenario.gpus, kept, strict=True):
                vars(gpu).update(values)

    def _nvmlInitWithFlags(self, flags):
        return self.scenario.init_error

    def _nvmlShutdown(self):
        return 0

    def _nvmlSystemGetDriverVersion(self, buffer, length):
        buffer.value = self.scenario.driver.encode()

    def _nvmlSystemGetCudaDriverVersion(self, out):
        _out(out, 13000)

    def _nvmlDeviceGetCount(self, out):
        _out(out, self._count)

    @property
    def _count(self) -> int:
        return sum(gpu.instance_of is None for gpu in self.scenario.gpus)

    def _nvmlDeviceGetHandleByIndex(self, index, out):
        if _plain(index) >= self._count:
            return pynvml.NVML_ERROR_INVALID_ARGUMENT
        if self.now_s >= self.scenario.gpus[_plain(index)].lost_from_s:
            return pynvml.NVML_ERROR_GPU_IS_LOST
        self._put_handle(out, _plain(index))

    def _nvmlDeviceGetHandleByUUID(self, uuid, out):
        for i, gpu in enumerate(self.scenario.gpus):
            if gpu.uuid.encode() == _plain(uuid):
                return self._put_handle(out, i)
        return pynvml.NVML_ERROR_NOT_FOUND

    def _put_handle(self, out, index: int) -> int:
        handle = getattr(out, "_obj", out)
        ctypes.c_void_p.from_address(ctypes.addressof(handle)).value = index + 1
        return 0

    def _nvmlDeviceGetIndex(self, gpu, out):
        _out(out, self.scenario.gpus.index(gpu))

    def _nvmlDeviceGetName(self, gpu, buffer, length):
        buffer.value = gpu.name.encode()

    def _nvmlDeviceGetUUID(self, gpu, buffer, length):
        buffer.value = gpu.uuid.encode()

    def _nvmlDeviceGetPciInfo(self, gpu, out):
        getattr(out, "_obj", out).busId = gpu.bus.encode()

    def _nvmlDeviceGetMemoryInfo(self, gpu, out):
        memory = getattr(out, "_obj", out)
        memory.total, memory.used = gpu.memory_total, int(self._number(gpu.memory_used))
        memory.free = memory.total - memory.used

    def _nvmlDeviceGetUtilizationRates(self, gpu, out):
        rates = getattr(out, "_obj", out)
        rates.gpu = round(self._number(gpu.busy))
        rates.memory = rates.gpu // 3

    def _nvmlDeviceGetTemperature(self, gpu, sensor, out):
        _out(out, round(self._number(gpu.temperature)))

    def _nvmlDeviceGetPowerUsage(self, gpu, out):
        _out(out, min(round(self._number(gpu.power_w) * 1000), gpu.limit_mw))

    def _nvmlDeviceGetFieldValues(self, gpu, count, out):
        for value in getattr(out, "_obj", out):
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
            if value.fieldId == pynvml.NVML_FI_DEV_POWER_INSTANT:
                value.nvmlReturn, value.valueType = 0, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
                value.value.uiVal = round(self._number(gpu.power_w) * 1000)

    def _nvmlDeviceGetTotalEnergyConsumption(self, gpu, out):
        power_w = self._number(gpu.power_w)  # of a constant power: energy is power times time
        _out(out, int(power_w * self.now_s * 1000))

    def _nvmlDeviceGetClockInfo(self, gpu, kind, out):
        clock = round(self._number(gpu.clock))
        if gpu.locked:
            clock = max(gpu.locked[0], min(gpu.locked[1], clock))
        _out(out, 8001 if _plain(kind) == pynvml.NVML_CLOCK_MEM else clock)

    def _nvmlDeviceGetMaxClockInfo(self, gpu, kind, out):
        _out(out, 8001 if _plain(kind) == pynvml.NVML_CLOCK_MEM else 2100)

    def _nvmlDeviceGetCurrentClocksEventReasons(self, gpu, out):
        _out(out, gpu.throttle)

    def _nvmlDeviceGetPcieThroughput(self, gpu, counter, out):
        time.sleep(0.02)  # as long as a real one takes
        _out(out, 1_200_000)

    def _nvmlDeviceGetPersistenceMode(self, gpu, out):
        _out(out, gpu.persistence)

    def _nvmlDeviceGetDisplayActive(self, gpu, out):
        _out(out, gpu.display)

    def _nvmlDeviceGetPerformanceState(self, gpu, out):
        _out(out, 2)

    def _nvmlDeviceGetCurrPcieLinkWidth(self, gpu, out):
        _out(out, gpu.width)

    def _nvmlDeviceGetMaxPcieLinkWidth(self, gpu, out):
        _out(out, 16)

    def _nvmlDeviceGetCurrPcieLinkGeneration(self, gpu, out):
        _out(out, gpu.generation)

    def _nvmlDeviceGetMaxPcieLinkGeneration(self, gpu, out):
        _out(out, 4)

    def _nvmlDeviceGetEccMode(self, gpu, now, pending):
        _out(now, gpu.ecc[0])
        _out(pending, gpu.ecc[1])

    def _nvmlDeviceGetTotalEccErrors(self, gpu, kind, counter, out):
        _out(out, gpu.ecc_errors)

    def _nvmlDeviceGetMigMode(self, gpu, now, pending):
        if gpu.mig is None:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        _out(now, gpu.mig)
        _out(pending, gpu.mig)

    def _nvmlDeviceIsMigDeviceHandle(self, gpu, out):
        _out(out, int(gpu.instance_of is not None))

    def _instances(self, gpu: FakeGPU) -> list[int]:
        parent = self.scenario.gpus.index(gpu)
        return [i for i, each in enumerate(self.scenario.gpus) if each.instance_of == parent]

    def _nvmlDeviceGetMaxMigDeviceCount(self, gpu, out):
        _out(out, len(self._instances(gpu)))

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, gpu, index, out):
        if _plain(index) >= len(self._instances(gpu)):
            return pynvml.NVML_ERROR_NOT_FOUND
        self._put_handle(out, self._instances(gpu)[_plain(index)])

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu, out):
        self._put_handle(out, gpu.instance_of)

    def _nvmlDeviceGetComputeRunningProcesses(self, gpu, count, entries):
        room = getattr(count, "_obj", count)
        if entries is None or room.value < len(gpu.pids):
            room.value = len(gpu.pids)
            return pynvml.NVML_ERROR_INSUFFICIENT_SIZE if gpu.pids else 0
        for entry, pid in zip(entries, gpu.pids, strict=False):
            entry.pid, entry.usedGpuMemory = pid, 1 << 30
            entry.gpuInstanceId = entry.computeInstanceId = 0xFFFFFFFF
        room.value = len(gpu.pids)

    def _nvmlDeviceGetP2PStatus(self, gpu, other, index, out):
        _out(out, gpu.p2p)

    def _nvmlDeviceGetTopologyCommonAncestor(self, gpu, other, out):
        _out(out, pynvml.NVML_TOPOLOGY_SYSTEM)

    def _nvmlDeviceGetNvLinkState(self, gpu, link, out):
        if not gpu.nvlinks:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        if _plain(link) >= gpu.nvlinks:
            return pynvml.NVML_ERROR_INVALID_ARGUMENT
        _out(out, 1)

    def _nvmlDeviceGetPowerManagementLimit(self, gpu, out):
        _out(out, gpu.limit_mw)

    def _nvmlDeviceGetPowerManagementDefaultLimit(self, gpu, out):
        _out(out, gpu.limits_w[1] * 1000)

    def _nvmlDeviceGetPowerManagementLimitConstraints(self, gpu, least, most):
        _out(least, gpu.limits_w[0] * 1000)
        _out(most, gpu.limits_w[2] * 1000)

    def _nvmlDeviceGetNumFans(self, gpu, out):
        _out(out, gpu.fans)

    def _nvmlDeviceGetFanSpeed(self, gpu, *fan_and_out):
        fan = self._number(gpu.fan) if gpu.fan_manual is None else gpu.fan_manual
        _out(fan_and_out[-1], round(fan))

    def _nvmlDeviceGetMinMaxFanSpeed(self, gpu, least, most):
        _out(least, 30)
        _out(most, 100)

    def _nvmlDeviceGetFanControlPolicy(self, gpu, fan, out):
        _out(out, int(gpu.fan_manual is not None))

    def _nvmlDeviceSetPowerManagementLimit(self, gpu, milliwatts):
        least, _, most = gpu.limits_w
        if not least * 1000 <= _plain(milliwatts) <= most * 1000:
            return pynvml.NVML_ERROR_INVALID_ARGUMENT
        self._change(gpu, limit_mw=_plain(milliwatts))

    def _nvmlDeviceSetGpuLockedClocks(self, gpu, least, most):
        self._change(gpu, locked=[_plain(least), _plain(most)])

    def _nvmlDeviceResetGpuLockedClocks(self, gpu):
        self._change(gpu, locked=None)

    def _nvmlDeviceSetFanSpeed(self, gpu, fan, percent):
        self._change(gpu, fan_manual=_plain(percent))

    def _nvmlDeviceSetDefaultFanSpeed(self, gpu, fan):
        self._change(gpu, fan_manual=None)


@contextlib.contextmanager
def installed(scenario: Scenario):
    """Swap the library under pynvml, and what nvitop remembers of it, inside the block."""
    saved = pynvml.nvmlLib
    fake = FakeNvml(scenario)
    _put(fake)
    try:
        yield fake
    finally:
        _put(saved)


def _put(library) -> None:
    import nvitop.api.device
    import nvitop.api.libnvml

    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    nvitop.api.device._PHYSICAL_DEVICE_ATTRS = None
    nvitop.api.device._parse_cuda_visible_devices.cache_clear()
    names = vars(nvitop.api.libnvml)
    for name in list(names):
        if name.endswith("_version_suffix") and not callable(names[name]):
            names[name] = None
        elif name.endswith("__flags"):
            names[name].clear()
        elif name.endswith("__initialized"):
            names[name] = False

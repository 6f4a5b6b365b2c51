"""What the GPUs' settings were before the first change, on disk, and how to put them back.

The file is complete before anything changes and is removed only when everything is restored. It
lies where a reboot removes it, as a reboot also resets what it describes. GPUs are named by UUID:
their numbers may change. Clocks go back to the driver's own: NVML does not tell of a lock, so that
one set before is lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import nvitop

from labkit.devices.nvml import ask, gpu_of_uuid
from labkit.devices.tuning.tuning_plan import TuningError, Wish, held_fan_percent

MANIFEST = Path("/run/labkit/gpu-settings.json")


@dataclass(frozen=True)
class Original:
    """One GPU's settings.

    Attributes:
        parts: of power, clocks and fans, what will be changed and so put back.
        power_limit_mw: None where the card has none.
        fans: by fan, the percentage at which it was held; None where it followed the heat.
    """

    uuid: str
    parts: tuple[str, ...]
    power_limit_mw: int | None
    fans: tuple[int | None, ...]


def read_original(gpu: nvitop.Device, wish: Wish) -> Original:
    """All settings of a GPU that can be read; a lock of its clocks cannot."""
    count = ask("nvmlDeviceGetNumFans", gpu.handle).value or 0
    limit_mw = ask("nvmlDeviceGetPowerManagementLimit", gpu.handle).value
    fans = tuple(held_fan_percent(gpu.handle, fan) for fan in range(count))
    return Original(gpu.uuid(), wish.parts, limit_mw, fans)


def write_manifest(path: Path, originals: Sequence[Original]) -> None:
    """Write the file, whole or not at all, and see it to the disk.

    Raises:
        TuningError: there is one of an earlier run already.
    """
    if path.exists():
        raise TuningError(
            f"an earlier run left {path}: first, as root, python -m labkit tune restore"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump({"pid": os.getpid(), "gpus": [asdict(o) for o in originals]}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def restore(path: Path = MANIFEST) -> list[str]:
    """Put everything back that the manifest names; try all of it, whatever fails.

    Returns:
        What could not be restored, in words; the manifest then stays. Empty when all is put back,
        also without a manifest.
    """
    if not path.exists():
        return []
    originals = [Original(**fields) for fields in json.loads(path.read_text())["gpus"]]
    problems = [problem for original in originals for problem in _restore_gpu(original)]
    if not problems:
        path.unlink(missing_ok=True)
    return problems


def _restore_gpu(original: Original) -> list[str]:
    gpu = gpu_of_uuid(original.uuid)
    if gpu is None or gpu.handle is None:
        return [f"{original.uuid}: the GPU is not there"]
    parts: dict[str, Callable[[object, Original], list[tuple[str, str | None]]]] = {
        "power": _restore_power,
        "clocks": _restore_clocks,
        "fans": _restore_fans,
    }
    done = [result for part in original.parts for result in parts[part](gpu.handle, original)]
    return [f"{original.uuid}: {what}: {reason}" for what, reason in done if reason]


def _restore_power(handle: object, original: Original) -> list[tuple[str, str | None]]:
    if original.power_limit_mw is None:
        return []
    answer = ask("nvmlDeviceSetPowerManagementLimit", handle, original.power_limit_mw)
    return [("power limit", answer.reason)]


def _restore_clocks(handle: object, original: Original) -> list[tuple[str, str | None]]:
    return [("clocks", ask("nvmlDeviceResetGpuLockedClocks", handle).reason)]


def _restore_fans(handle: object, original: Original) -> list[tuple[str, str | None]]:
    results = []
    for fan, held_at in enumerate(original.fans):
        if held_at is None:
            answer = ask("nvmlDeviceSetDefaultFanSpeed_v2", handle, fan)
        else:
            answer = ask("nvmlDeviceSetFanSpeed_v2", handle, fan, held_at)
        results.append((f"fan {fan}", answer.reason))
    return results

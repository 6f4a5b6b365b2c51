"""What would be changed on which GPU, checked against the bounds that its driver gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import nvitop
from nvitop import libnvml

from labkit.devices.nvml import ask

# NVML sets a lock of the clocks and takes it off, but does not tell of one
LOCK_GONE = "the driver's own clocks; a lock set before cannot be read, and is gone"
FAN_FLOOR_PERCENT = 50  # a fan held by hand no longer follows the heat: never hold it slow


@dataclass(frozen=True)
class Wish:
    """Settings for GPUs; None leaves one as it is.

    Args:
        power_limit_w: most power that the card may draw, in watts.
        clocks_mhz: least and most clock of the multiprocessors.
        fan_percent: speed of all its fans, which may only be raised.
    """

    power_limit_w: float | None = None
    clocks_mhz: tuple[int, int] | None = None
    fan_percent: int | None = None

    def __post_init__(self) -> None:
        if self.clocks_mhz is not None and not 0 < self.clocks_mhz[0] <= self.clocks_mhz[1]:
            raise ValueError(f"clocks_mhz={self.clocks_mhz} must be (least, most), both above 0")

    @property
    def parts(self) -> tuple[str, ...]:
        """Which of power, clocks and fans it changes."""
        values = (self.power_limit_w, self.clocks_mhz, self.fan_percent)
        names = ("power", "clocks", "fans")
        return tuple(n for n, value in zip(names, values, strict=True) if value is not None)


@dataclass(frozen=True)
class Step:
    """One change: an NVML function and what it takes after the handle, and in words the value now,
    the one held then, and what it is put back to afterwards.
    """

    gpu: str
    uuid: str
    function: str
    arguments: tuple[int, ...]
    now: str
    then: str
    after: str


class TuningError(RuntimeError):
    """A change could not be made or not be undone; the message says what to do."""


def plan(gpus: Sequence[nvitop.Device], wish: Wish) -> list[Step]:
    """The changes that ``wish`` takes, none of which is made.

    Raises:
        ValueError: a value lies outside of the driver's bounds, or a fan would slow down; the
            message gives the bounds.
        TuningError: the card does not tell its bounds.
    """
    parts: dict[str, Callable[[nvitop.Device, str, Wish], list[Step]]] = {
        "power": _power,
        "clocks": _clocks,
        "fans": _fans,
    }
    return [
        step
        for place, gpu in enumerate(gpus)
        for part in wish.parts
        for step in parts[part](gpu, f"GPU {place}", wish)
    ]


def settings(gpus: Sequence[nvitop.Device]) -> list[dict[str, str]]:
    """Power limit, clock and fan of each GPU now, with the driver's bounds; reasons for nulls."""
    return [_settings(gpu.handle, f"GPU {place}") for place, gpu in enumerate(gpus)]


def _settings(handle: object, name: str) -> dict[str, str]:
    queries = {
        "power limit": ("nvmlDeviceGetPowerManagementLimit", (), 1e-3, "W"),
        "bounds": ("nvmlDeviceGetPowerManagementLimitConstraints", (), 1e-3, "W"),
        "clock": ("nvmlDeviceGetClockInfo", (libnvml.NVML_CLOCK_SM,), 1, "MHz"),
        "highest": ("nvmlDeviceGetMaxClockInfo", (libnvml.NVML_CLOCK_SM,), 1, "MHz"),
        "fan": ("nvmlDeviceGetFanSpeed", (), 1, "%"),
        "fan bounds": ("nvmlDeviceGetMinMaxFanSpeed", (), 1, "%"),
    }
    shown = {"GPU": name}
    for label, (function, arguments, scale, unit) in queries.items():
        value, reason = ask(function, handle, *arguments)
        numbers = value if isinstance(value, list | tuple) else [value]
        if reason:
            shown[label] = f"null: {reason}"
        else:
            shown[label] = " to ".join(f"{number * scale:.0f}" for number in numbers) + f" {unit}"
    return shown


def _power(gpu: nvitop.Device, name: str, wish: Wish) -> list[Step]:
    least, most = known(name, "nvmlDeviceGetPowerManagementLimitConstraints", gpu)
    now = known(name, "nvmlDeviceGetPowerManagementLimit", gpu)
    wanted = round(wish.power_limit_w * 1000)
    if not least <= wanted <= most:
        raise ValueError(
            f"{name}: power_limit_w={wish.power_limit_w} is outside of the driver's bounds, "
            f"{least / 1000:.0f} to {most / 1000:.0f} W"
        )
    says = (f"limit {now / 1000:.0f} W", f"{wish.power_limit_w:.0f} W", f"{now / 1000:.0f} W")
    return [Step(name, gpu.uuid(), "nvmlDeviceSetPowerManagementLimit", (wanted,), *says)]


def _clocks(gpu: nvitop.Device, name: str, wish: Wish) -> list[Step]:
    most = known(name, "nvmlDeviceGetMaxClockInfo", gpu, libnvml.NVML_CLOCK_SM)
    now = known(name, "nvmlDeviceGetClockInfo", gpu, libnvml.NVML_CLOCK_SM)
    if wish.clocks_mhz[1] > most:
        raise ValueError(f"{name}: clocks_mhz={wish.clocks_mhz} is above the card's {most} MHz")
    low, high = wish.clocks_mhz
    held = f"between {low} and {high} MHz" if low < high else f"held at {high} MHz"
    says = (f"clock {now} MHz", held, LOCK_GONE)
    return [Step(name, gpu.uuid(), "nvmlDeviceSetGpuLockedClocks", wish.clocks_mhz, *says)]


def _fans(gpu: nvitop.Device, name: str, wish: Wish) -> list[Step]:
    least, most = known(name, "nvmlDeviceGetMinMaxFanSpeed", gpu)
    count = known(name, "nvmlDeviceGetNumFans", gpu)
    if not count:
        raise TuningError(f"{name}: it has no fan of its own; nothing was changed")
    steps = []
    for fan in range(count):
        now = known(name, "nvmlDeviceGetFanSpeed_v2", gpu, fan)
        floor = max(least, FAN_FLOOR_PERCENT, now)
        if not floor <= wish.fan_percent <= most:
            raise ValueError(
                f"{name}: fan_percent={wish.fan_percent} is outside of {floor} to {most} %: "
                f"fan {fan} turns at {now} % now, and a fan is never slowed"
            )
        held = held_fan_percent(gpu.handle, fan)
        after = "follows the heat" if held is None else f"held at {held} %"
        says = (f"fan {fan} at {now} %", f"held at {wish.fan_percent} %", after)
        arguments = (fan, wish.fan_percent)
        steps.append(Step(name, gpu.uuid(), "nvmlDeviceSetFanSpeed_v2", arguments, *says))
    return steps


def held_fan_percent(handle: object, fan: int) -> int | None:
    """At what a fan is held by hand; None where it follows the heat."""
    by_hand = ask("nvmlDeviceGetFanControlPolicy_v2", handle, fan).value
    return ask("nvmlDeviceGetFanSpeed_v2", handle, fan).value if by_hand else None


def known(name: str, function: str, gpu: nvitop.Device, *arguments: int):
    """What the driver answers for the card called ``name``; TuningError with the reason if not."""
    value, reason = ask(function, gpu.handle, *arguments)
    if reason:
        raise TuningError(f"{name}: {function} gives no answer: {reason}; nothing was changed")
    return value

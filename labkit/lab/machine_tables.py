"""What this machine is and what its numbers may be used for, as tables."""

from __future__ import annotations

from labkit.devices.inventory import physical_cores
from labkit.devices.support import CLAIMS, Support, support_for
from labkit.lab.results import versions
from labkit.lab.tables import Table
from labkit.parallel.placing.placement_view import readable_bytes

COUNTS = (1, 2, 4)


def devices_table(requested: str = "auto") -> Table:
    """What a notebook about one, two and four devices runs on here."""
    return Table(
        ["a notebook about", "runs on", "memory of each", "uuid", "provenance"],
        [[_counted(count), *_device_cells(s)] for count, s in _supports(requested).items()],
    )


def _device_cells(support: Support | str) -> list[str]:
    if isinstance(support, str):
        return [support, "", "", ""]
    found = support.devices
    first, memory = found.devices[0], found.devices[0].memory_bytes
    return [
        f"{found.count} × {first.name}",
        "unknown" if memory is None else readable_bytes(memory),
        first.uuid or "none: it is no GPU",
        found.provenance,
    ]


def support_table(requested: str = "auto") -> Table:
    """Which claims each count of devices supports here, and why not the others."""
    supports = _supports(requested)
    return Table(
        ["claims about", *map(_counted, supports)],
        [[name, *(_answer(s, name) for s in supports.values())] for name in CLAIMS],
    )


def _answer(support: Support | str, claims: str) -> str:
    if isinstance(support, str):
        return support
    modelled = support.devices.kind == "virtual" and claims != CLAIMS[0]
    return support.refusals[claims] or ("supported, modelled" if modelled else "supported")


def versions_table() -> Table:
    """Versions of Python and of the packages that can change a result, and the cores."""
    rows = [[name, version] for name, version in versions().items()]
    return Table(["", "here"], [*rows, ["physical cores", physical_cores()]])


def _supports(requested: str) -> dict[int, Support | str]:
    """By count of devices; in words where the requested kind has fewer."""
    supports: dict[int, Support | str] = {}
    for count in COUNTS:
        try:
            supports[count] = support_for(count, requested)
        except ValueError:
            supports[count] = f"not here: fewer than {count} of kind {requested}"
    return supports


def _counted(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"

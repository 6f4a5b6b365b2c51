"""From one GPU to two to four with PyTorch model parallelism: what stands behind the notebooks."""

from __future__ import annotations

from importlib import import_module

from labkit.devices.ranks.magic import register_magic

# loaded on first use: torch comes with them, which `python -m labkit` need not wait for
_HOMES = {
    "Ranks": "labkit.devices.ranks.ranks",
    "Timing": "labkit.devices.needs",
    "claim": "labkit.lab.claims",
    "measurement": "labkit.lab.claims",
    "predict": "labkit.lab.claims",
    "start": "labkit.lab.session",
}
__all__ = list(_HOMES)

register_magic()


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")

"""From one GPU to two to four with PyTorch model parallelism: what stands behind the notebooks."""

from __future__ import annotations

from labkit.devices.magic import register_magic

__all__ = ["Ranks"]

register_magic()


def __getattr__(name: str):
    # loaded on first use: Ranks brings torch with it, which `python -m labkit` need not wait for
    if name == "Ranks":
        from labkit.devices.ranks import Ranks

        return Ranks
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")

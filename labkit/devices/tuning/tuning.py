"""Change clocks, fans and power of GPUs for the length of a block, and put them back.

Whatever ends the block, the settings are restored: its end, an exception, Ctrl-C and SIGTERM by
this process; SIGKILL by a watchdog process. If both are killed, the manifest is left, and
``python -m labkit tune restore`` restores from it. A lock of the clocks is the exception: NVML does
not tell of one, so they go back to the driver's own.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import nvitop

from labkit.devices.nvml import ask, gpu_of_uuid, physical_gpus
from labkit.devices.tuning.tuning_manifest import MANIFEST, read_original, restore, write_manifest
from labkit.devices.tuning.tuning_plan import Step, TuningError, Wish, plan
from labkit.devices.tuning.tuning_watchdog import Watchdog


@contextmanager
def tuned(
    wish: Wish,
    gpus: Sequence[nvitop.Device] | None = None,
    *,
    apply: bool = False,
    manifest: Path = MANIFEST,
) -> Iterator[list[Step]]:
    """Hold ``wish`` inside the block; without ``apply`` only say what would change.

    Args:
        gpus: None for all.
        apply: make the changes, which takes root.
        manifest: where the settings before are kept.

    Yields:
        The steps, made or not.

    Raises:
        ValueError: a value is outside of the driver's bounds; nothing was changed.
        TuningError: there is no GPU, no permission, a manifest of an earlier run, or settings that
            could not be restored.
    """
    steps = plan(_present(gpus), wish)
    if not apply:
        yield steps
        return
    devices = [gpu_of_uuid(uuid) for uuid in dict.fromkeys(step.uuid for step in steps)]
    write_manifest(manifest, [read_original(gpu, wish) for gpu in devices])
    try:
        watchdog = Watchdog(manifest)
    except BaseException:
        manifest.unlink()  # nothing was changed yet
        raise
    with _sigterm_raises():
        try:
            _make_all(steps, manifest)
            yield steps
        finally:
            problems = ["interrupted"]
            try:
                problems = restore(manifest)
            finally:
                watchdog.release(restored=not problems)
            if problems and manifest.exists():
                raise TuningError(
                    f"not restored: {'; '.join(problems)}; as root: python -m labkit tune restore"
                )


def _present(gpus: Sequence[nvitop.Device] | None) -> Sequence[nvitop.Device]:
    if gpus is not None:
        return gpus
    found = physical_gpus()
    if not found.devices:
        raise TuningError(f"there is no GPU to tune: {found.reason}")
    return found.devices


def _make_all(steps: Sequence[Step], manifest: Path) -> None:
    for place, step in enumerate(steps):
        _, reason = ask(step.function, gpu_of_uuid(step.uuid).handle, *step.arguments)
        if reason:
            if not place:
                # The driver itself refused the first change: nothing is to be put back. A signal
                # instead of an answer says no such thing.
                manifest.unlink()
            hint = "; changing settings takes root" if reason == "no permission" else ""
            raise TuningError(f"{step.gpu}: {step.function}{step.arguments}: {reason}{hint}")


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the block is left in order."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; the watchdog is there
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""``python -m labkit tune``: show what would change, hold it, restore after a crash."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence

from labkit.devices.nvml import physical_gpus
from labkit.devices.tuning.tuning import tuned
from labkit.devices.tuning.tuning_manifest import MANIFEST, restore
from labkit.devices.tuning.tuning_plan import Step, TuningError, Wish, settings
from labkit.lab.tables import Table


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 done, 1 not restored, 2 not possible."""
    manifest = options.manifest or MANIFEST
    if options.action == "restore":
        problems = restore(manifest)
        print("\n".join(problems) or "nothing is left to put back")
        return 1 if problems else 0
    clocks = tuple(options.clocks) if options.clocks else None
    wish = Wish(options.power, clocks, options.fan)
    apply = options.apply and options.action == "hold"
    try:
        if not wish.parts:
            print(settings_table())
            return 0
        with tuned(wish, apply=apply, manifest=manifest) as steps:
            print(steps_table(steps))
            if not apply:
                print("\nnothing was changed; to change it: tune hold ... --apply, as root")
            else:
                _hold(options.seconds)
    except TuningError as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 2
    return 0


def _hold(seconds: float | None) -> None:
    print("\nheld; Ctrl-C restores", flush=True)
    try:
        time.sleep(threading.TIMEOUT_MAX if seconds is None else seconds)
    except KeyboardInterrupt:
        print("restoring")


def settings_table() -> Table:
    """Settings of every GPU now, and the bounds within which they may change.

    Raises:
        TuningError: there is no GPU.
    """
    found = physical_gpus()
    if not found.devices:
        raise TuningError(f"there is no GPU to tune: {found.reason}")
    rows = settings(found.devices)
    return Table(list(rows[0]), [list(row.values()) for row in rows])


def steps_table(steps: Sequence[Step]) -> Table:
    """What changes on which GPU, from what, and what it is put back to."""
    rows = [[step.gpu, step.now, step.then, step.after] for step in steps]
    return Table(["GPU", "now", "then", "put back to"], rows)

"""A process that restores the GPUs' settings when the one that changed them is killed.

``python -m labkit.devices.tuning.tuning_watchdog FD PID MANIFEST`` reads the pipe
FD. Its other end is held by the process PID, which tunes: a byte says that all is restored; an end
without one, or another parent, that it has died. A process that PID forked may keep the pipe open.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from labkit.devices.tuning.tuning_manifest import restore

RESTORED = b"r"
PATIENCE_S = 0.5  # between two looks at who the parent is


class Watchdog:
    """Watches over this process until ``release``; made before the first change.

    Args:
        manifest: what it restores from.
    """

    def __init__(self, manifest: Path) -> None:
        read_end, self._write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(read_end), str(os.getpid()), manifest],
                cwd=Path(__file__).parents[3],  # where labkit is found without being installed
                pass_fds=[read_end],
                start_new_session=True,  # Ctrl-C in the terminal is not for it
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
            )
        finally:
            os.close(read_end)
        self._process.stdout.readline()  # it is watching now

    def release(self, restored: bool) -> None:
        """End it; where not everything was ``restored`` it tries too."""
        try:
            if restored:
                os.write(self._write_end, RESTORED)
        except BrokenPipeError:
            pass  # it was killed, and there is nothing left for it to do
        os.close(self._write_end)
        self._process.wait(timeout=30)
        self._process.stdout.close()


def main(read_end: int, watched: int, manifest: Path) -> int:
    """Wait for the pipe's end or the process's, then restore what has to be."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print("watching", flush=True)
    while not select.select([read_end], [], [], PATIENCE_S)[0]:
        if os.getppid() != watched:
            break
    else:
        if os.read(read_end, 1) == RESTORED:
            return 0
    problems = restore(manifest)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))

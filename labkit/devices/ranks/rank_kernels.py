"""Starts, signals and ends the processes of the ranks: one IPython kernel each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
from jupyter_client.connect import ConnectionFileMixin
from jupyter_client.launcher import launch_kernel

from labkit.devices.ranks.rank_operation import crash_place

# The rank gets the notebook's own sys.path, so that it finds what the notebook finds; no installed
# kernelspec is needed. C++ output goes to the rank's log file and not through ipykernel's capture,
# which dies with the process: the last words of a crash would be lost.
BOOT = (
    "import json, sys; boot = json.loads(sys.argv.pop(1)); sys.path[:] = boot['path']; "
    "from labkit.devices.ranks.rank_side import main; main(boot)"
)


@dataclass(frozen=True)
class Death:
    """How the process of a rank ended: ``code`` >= 0 is an exit code, below 0 minus a signal."""

    code: int
    last_words: str = ""
    operation: str = ""
    by_us: bool = False

    @property
    def cause(self) -> str:
        """
        >>> Death(-9).cause
        'killed by SIGKILL (signal 9), as the system does when memory runs out'
        >>> Death(3).cause
        'its process exited with code 3'
        """
        if self.by_us:
            return "killed because it did not react to an interrupt"
        if self.code >= 0:
            return f"its process exited with code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = "an unnamed signal"
        oom = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"killed by {name} (signal {-self.code}){oom}"


class RankKernel:
    """One rank: its process, its two Jupyter channels and its files in ``folder``.

    The channels are plain blocking ZeroMQ sockets over IPC, made and signed by jupyter_client
    (random key per rank). No event loop: a notebook kernel already runs one.
    """

    def __init__(
        self, rank: int, folder: Path, context: zmq.Context, environment: dict[str, str]
    ) -> None:
        self.rank = rank
        self.log_path = folder / f"rank{rank}.log"
        self.operation_path = folder / f"rank{rank}.operation"
        self._connection = ConnectionFileMixin(
            context=context,
            transport="ipc",
            ip=str(folder / f"rank{rank}"),
            connection_file=str(folder / f"rank{rank}.json"),
        )
        self._connection.write_connection_file()
        self.shell = self._connection.connect_shell()
        self.iopub = self._connection.connect_iopub()
        self.process = self._launch(folder, environment)
        self._log = open(self.log_path, "rb")
        self._killed = False
        self._death: Death | None = None

    def _launch(self, folder: Path, environment: dict[str, str]) -> subprocess.Popen:
        boot = {
            "path": [entry or os.getcwd() for entry in sys.path],
            "parent": os.getpid(),
            "folder": str(folder),
            "connection_file": self.connection_file,
        }
        with open(self.log_path, "ab") as log:
            return launch_kernel(
                [sys.executable, "-c", BOOT, json.dumps(boot)],
                env=os.environ | environment,
                stdout=log,
                stderr=log,
                independent=True,  # of ipykernel's watch over its parent: rank_side has its own
            )

    @property
    def connection_file(self) -> str:
        """For ``jupyter console --existing <this file>``: look inside the rank."""
        return self._connection.connection_file

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, code: str, silent: bool) -> str:
        """Ask the rank to run ``code``; returns the id that its messages carry."""
        content = {
            "code": code,
            "silent": silent,
            "store_history": not silent,
            "user_expressions": {},
            "allow_stdin": False,  # nobody could answer: input() raises instead of waiting
            "stop_on_error": False,  # would throw away a request that follows an error
        }
        message = self._connection.session.send(self.shell, "execute_request", content)
        return message["header"]["msg_id"]

    def receive(self, channel: zmq.Socket) -> dict | None:
        """Next message of a channel, or None."""
        return self._connection.session.recv(channel, mode=zmq.NOBLOCK)[1]

    def new_log_text(self) -> str:
        """What C and C++ code wrote to the process's own stdout and stderr since the last call."""
        return self._log.read().decode(errors="replace")

    def last_operation(self) -> str:
        """Where the rank's main thread is in its cell, or where its last cell failed."""
        try:
            return self.operation_path.read_text(errors="replace").rstrip("\0 \n")
        except OSError:
            return ""

    def death(self) -> Death | None:
        """None while the process lives. Children that a dead rank left behind are ended."""
        code = self.process.poll()
        if code is not None and self._death is None:
            self.signal(signal.SIGKILL)  # once: later the number may be another's
            operation = self._crash_place() or self.last_operation()
            self._death = Death(code, self.log_tail(), operation, self._killed)
        return self._death

    def _crash_place(self) -> str:
        try:
            return crash_place(Path(f"{self.operation_path}.crash").read_text(errors="replace"))
        except OSError:
            return ""  # it died before it kept a record

    def log_tail(self, lines: int = 12) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.strip().splitlines()[-lines:])

    def signal(self, number: int) -> None:
        """Signal the rank and what it started: they are a process group of their own."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # nothing is left to signal

    def kill(self) -> None:
        self._killed = True
        if self._death is None:
            self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and close the channels."""
        self.kill()
        self.process.wait(timeout=10)
        for channel in (self.shell, self.iopub):
            channel.close(linger=0)
        self._log.close()


def start_kernels(
    count: int,
    folder: Path,
    context: zmq.Context,
    environment: Callable[[int], dict[str, str]],
) -> dict[int, RankKernel]:
    """Start the processes of all ranks; none is left behind when one cannot be started."""
    kernels: dict[int, RankKernel] = {}
    try:
        for rank in range(count):
            kernels[rank] = RankKernel(rank, folder, context, environment(rank))
    except BaseException:
        for kernel in kernels.values():
            kernel.close()
        raise
    return kernels

"""The processes of one set of ranks from start to end, joined in a process group."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq

from labkit.devices.backends import backend
from labkit.devices.inventory import DeviceSet
from labkit.devices.ranks.rank_cell import FOR_A_CELL, CellRun, Patience, RankResult
from labkit.devices.ranks.rank_errors import (
    RankError,
    RanksInterrupted,
    failure_report,
    split_failures,
)
from labkit.devices.ranks.rank_kernels import RankKernel, start_kernels
from labkit.devices.ranks.rank_output import RankOutput
from labkit.devices.ranks.rank_values import load
from labkit.devices.ranks.stop_button import StopButton

# A new process group takes 20 ms; a rank that cannot join one is interrupted after this long.
FOR_A_NEW_GROUP = Patience(grace_s=0.5, kill_s=5, deadline_s=20)
RESTART = "call ranks.restart(), then run the cells that define what you need"


@dataclass(frozen=True)
class RankSettings:
    """What a set of ranks is started with, again at every restart; see ``Ranks``."""

    count: int
    devices: DeviceSet
    threads: int
    timeout_s: float
    start_timeout_s: float

    @property
    def torch_kind(self) -> str:
        # a virtual GPU executes on the CPU; only its clock is another
        return "cpu" if self.devices.kind == "virtual" else self.devices.kind

    def environment(self, rank: int) -> dict[str, str]:
        """What differs from the notebook's environment in the process of a rank."""
        index = self.devices.devices[rank].index
        return backend(self.torch_kind).visible_environment(index) | {
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # else each kernel prints a debugger's warning
        }


class RankSession:
    """Ranks from their start until ``close``.

    Raises:
        RankError: a rank did not start in time; nothing is left behind.
        RanksInterrupted: the stop button was pressed meanwhile; nothing is left behind.
    """

    def __init__(self, settings: RankSettings) -> None:
        self.settings = settings
        self.kernels: dict[int, RankKernel] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="labkit-ranks-", dir=_socket_home()))
        self._owner = os.getpid()
        self._context = zmq.Context()
        self._generation = -1  # of the process group
        with StopButton() as button:
            try:
                self.kernels.update(
                    start_kernels(settings.count, self.folder, self._context, settings.environment)
                )
                self._join(button)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End all ranks and remove their folder. Safe to call twice."""
        if os.getpid() != self._owner:
            return  # a forked child of the notebook does not own the ranks
        with StopButton():  # heard afterwards
            for kernel in self.kernels.values():
                kernel.close()
            self.kernels.clear()
            self._context.destroy(linger=0)  # with the sockets of a rank whose start failed
            shutil.rmtree(self.folder, ignore_errors=True)

    def call(
        self,
        module: str,
        function: str,
        arguments: Mapping[int, tuple],
        patience: Patience = FOR_A_CELL,
        button: StopButton | None = None,
    ) -> dict[int, RankResult]:
        """Call a function of this package on ranks, out of the reader's sight.

        Args:
            module: one of ``labkit.devices.ranks``.
            arguments: by rank; of types whose ``repr`` is their source.
            button: heard where given; a recovery takes its bounded time.
        """
        target = f"__import__('labkit.devices.ranks.{module}', fromlist=['{module}']).{function}"
        codes = {rank: f"{target}(*{args!r})" for rank, args in arguments.items()}
        return CellRun(self.kernels, codes, RankOutput(), True, patience, button).finish()

    def recover(self) -> str:
        """After a failure: give the living ranks a new process group; says what the reader does.

        A group in which one rank failed is lost for all: others wait for messages that it owes.
        """
        if any(kernel.death() for kernel in self.kernels.values()):
            return RESTART
        stale = self._stale_names()
        results = self.call("rank_side", "rejoin", self._places(), FOR_A_NEW_GROUP)
        if any(result.failed for result in results.values()):
            return f"no new process group could be made: {failure_report(results)}\n{RESTART}"
        again = f"; make these again before use: {', '.join(stale)}" if stale else ""
        return f"variables are kept and the process group is new{again}"

    def _join(self, button: StopButton) -> None:
        limit_s = self.settings.start_timeout_s
        patience = Patience(grace_s=0.5, kill_s=0, deadline_s=limit_s)
        results = self.call("rank_side", "join", self._places(), patience, button)
        if button.presses:
            raise RanksInterrupted("stopped while the ranks started; no process was left behind")
        causes, late = split_failures(results.values())
        if causes:
            raise RankError(f"the ranks did not start: {failure_report(results)}", results)
        if late:
            wrote = [f"rank {rank} wrote:\n{self.kernels[rank].log_tail()}" for rank in late]
            text = f"ranks {late} did not start within start_timeout_s={limit_s}"
            raise RankError("\n".join([text, *wrote]), results)

    def _places(self) -> dict[int, tuple]:
        self._generation += 1
        return {rank: (self._place(kernel),) for rank, kernel in self.kernels.items()}

    def _place(self, kernel: RankKernel) -> dict:
        return {
            "rank": kernel.rank,
            "world_size": self.settings.count,
            "kind": self.settings.torch_kind,
            "generation": self._generation,
            "timeout_s": self.settings.timeout_s,
            "group_file": str(self.folder / f"group{self._generation}"),
            "operation_file": str(kernel.operation_path),
        }

    def _stale_names(self) -> list[str]:
        files = {rank: self.folder / f"value{rank}" for rank in self.kernels}
        arguments = {rank: (str(file),) for rank, file in files.items()}
        results = self.call("rank_stale", "save_names", arguments, FOR_A_NEW_GROUP)
        found = [load(files[rank], "stale names") for rank in files if not results[rank].failed]
        return sorted(set().union(*found))


def _socket_home() -> str | None:
    # the path of a Unix socket may have some 100 characters only
    return None if len(tempfile.gettempdir()) <= 60 else "/tmp"

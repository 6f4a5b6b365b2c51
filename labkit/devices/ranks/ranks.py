"""Runs notebook code on every device: one process, one rank, one IPython kernel per device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

from labkit.devices.inventory import DeviceSet, choose_devices
from labkit.devices.ranks.cell_syntax import check_syntax
from labkit.devices.ranks.rank_cell import CellRun, RankResult
from labkit.devices.ranks.rank_errors import (
    RankError,
    RanksInterrupted,
    RanksUseError,
    call_report,
    failure_report,
    stop_report,
)
from labkit.devices.ranks.rank_output import RankOutput
from labkit.devices.ranks.rank_session import RESTART, RankSession, RankSettings
from labkit.devices.ranks.rank_values import dump, load
from labkit.devices.ranks.stop_button import StopButton

_current: weakref.ref[Ranks] | None = None


class Ranks:
    """The ranks of a notebook. ``torch``, ``dist``, ``rank``, ``world_size``, ``device`` and
    ``mesh`` (a ``DeviceMesh`` of all ranks) are defined on each; what a cell defines stays.

    A notebook has one set at a time: a new one ends the one before.

    Args:
        count: number of ranks, >= 1.
        devices: at least ``count`` devices; by default ``choose_devices("auto", count)``.
        threads: of torch on each rank; by default the cores divided by ``count``.
        timeout_s: how long a collective waits for the other ranks.
        start_timeout_s: how long the ranks may take to start.

    Raises:
        ValueError: an argument is out of range.
        RankError: a rank did not start; its standard error is in the message.
    """

    def __init__(
        self,
        count: int,
        devices: DeviceSet | None = None,
        threads: int | None = None,
        timeout_s: float = 60,
        start_timeout_s: float = 90,
    ) -> None:
        _require(count >= 1, f"count={count} must be at least 1; try Ranks(2)")
        _require(threads is None or threads >= 1, f"threads={threads} must be at least 1, or None")
        _require(timeout_s > 0, f"timeout_s={timeout_s} must be above 0; try 60")
        _require(start_timeout_s > 0, f"start_timeout_s={start_timeout_s} must be above 0; try 90")
        devices = choose_devices("auto", count) if devices is None else devices
        _require(
            devices.count >= count,
            f"count={count} ranks on {devices.count} devices: each rank needs its own; "
            f'pass choose_devices("{devices.kind}", {count})',
        )
        threads = threads or max(1, devices.physical_cores // count)
        self._settings = RankSettings(count, devices, threads, timeout_s, start_timeout_s)
        self._lock = threading.RLock()
        self._start()

    # -- life ---------------------------------------------------------------------------------

    def _start(self) -> None:
        self._ended_by = "a failed start"
        self._end: weakref.finalize | None = None
        _end_previous(self)
        self._session = RankSession(self._settings)
        # also when this object is garbage, and when the notebook's process exits
        self._end = weakref.finalize(self, self._session.close)

    def restart(self) -> None:
        """End all ranks and start them anew: their variables are gone."""
        with self._lock:
            self.shutdown()
            self._start()

    def shutdown(self) -> None:
        """End all ranks. Safe to call twice."""
        self._end_because("shutdown()")

    def _end_because(self, reason: str) -> None:
        if self.alive:
            self._ended_by = reason
            self._end()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error) -> None:
        self.shutdown()

    @property
    def count(self) -> int:
        return self._settings.count

    @property
    def devices(self) -> DeviceSet:
        return self._settings.devices

    @property
    def alive(self) -> bool:
        """False after ``shutdown``, or once newer ranks took the place of these."""
        return self._end is not None and self._end.alive

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty when not alive."""
        return [kernel.pid for kernel in self._session.kernels.values()]

    @property
    def connection_files(self) -> list[str]:
        """By rank, for ``jupyter console --existing FILE``: a console inside that rank."""
        return [kernel.connection_file for kernel in self._session.kernels.values()]

    def __repr__(self) -> str:
        state = f"pids {self.pids}" if self.alive else f"ended by {self._ended_by}"
        threads = self._settings.threads
        each = f"{threads} thread{'s' if threads > 1 else ''} each"
        return f"Ranks({self.count} x {self.devices.kind}, {each}, {state})"

    # -- work ---------------------------------------------------------------------------------

    def run(
        self, code: str, only: Iterable[int] | None = None, show: Iterable[int] | None = None
    ) -> None:
        """Run a cell on the ranks; what they print and display appears as it comes.

        Args:
            code: anything a notebook cell may hold: magics and top-level ``await`` too.
            only: the ranks that run it; by default all.
            show: the ranks whose output appears; by default all that run it.

        Raises:
            ValueError: the code cannot be compiled, so no rank ran it.
            RankError: it failed on a rank. The process group is made anew, variables are kept.
            RanksInterrupted: the stop button was pressed; otherwise the same.
        """
        ranks = self._chosen("only", only)
        output = RankOutput(None if show is None else self._chosen("show", show))
        check_syntax(code)
        with self._lock, StopButton() as button:
            self._require_alive(range(self.count))
            codes = dict.fromkeys(ranks, code)
            results = CellRun(self._session.kernels, codes, output, button=button).finish()
            if any(result.failed or result.interrupted for result in results.values()):
                self._raise(results, button)

    def pull(self, expression: str, only: Iterable[int] | None = None) -> dict[int, object]:
        """Values of an expression on the ranks, by rank; tensors come detached, on the CPU.

        Raises:
            RankError: it fails on a rank, or its value cannot be pickled.
            ValueError: its value cannot be unpickled here.
        """
        ranks = self._chosen("only", only)
        with self._lock, StopButton() as button:
            self._require_alive(ranks)
            files = {rank: self._session.folder / f"value{rank}" for rank in ranks}
            arguments = {rank: (expression, str(file)) for rank, file in files.items()}
            self._call(f"pull({expression!r})", "save", arguments, button)
            return {rank: load(file, f"pull({expression!r})") for rank, file in files.items()}

    def push(self, only: Iterable[int] | None = None, **values: object) -> None:
        """Define variables on the ranks: ``ranks.push(batch=x, steps=10)``.

        Raises:
            ValueError: a value cannot be pickled.
            RankError: a value cannot be unpickled on a rank.
        """
        ranks = self._chosen("only", only)
        what = f"push({', '.join(values)})"
        with self._lock, StopButton() as button:
            self._require_alive(ranks)
            file = self._session.folder / "pushed"
            file.write_bytes(dump(values, what))
            try:
                self._call(what, "define", {rank: (str(file),) for rank in ranks}, button)
            finally:
                file.unlink()

    # -- guards and failures ------------------------------------------------------------------

    def _chosen(self, name: str, ranks: Iterable[int] | None) -> list[int]:
        chosen = list(range(self.count)) if ranks is None else sorted(set(ranks))
        fits = bool(chosen) and all(rank in range(self.count) for rank in chosen)
        _require(fits, f"{name}={chosen}: name one or more of the ranks 0..{self.count - 1}")
        return chosen

    def _require_alive(self, ranks: Iterable[int]) -> None:
        remedy = f"make new ones: ranks = Ranks({self.count})"
        _require(self.alive, f"these ranks were ended by {self._ended_by}; {remedy}")
        deaths = {rank: self._session.kernels[rank].death() for rank in ranks}
        lines = [f"rank {rank} is dead, {death.cause}" for rank, death in deaths.items() if death]
        if lines:
            raise RankError("\n".join([*lines, RESTART]))

    def _call(
        self, what: str, function: str, arguments: dict[int, tuple], button: StopButton
    ) -> None:
        results = self._session.call("rank_values", function, arguments, button=button)
        if any(result.death or result.interrupted for result in results.values()):
            self._raise(results, button)
        failed = [result for result in results.values() if result.failed]
        if failed:  # an expression that fails leaves the process group in order
            raise RankError(call_report(what, failed), results)

    def _raise(self, results: dict[int, RankResult], button: StopButton) -> None:
        """Leave the ranks ready for the next cell where they can be, and report the failure."""
        ready = self._session.recover()
        if button.presses:
            raise RanksInterrupted(f"{stop_report(results)}\n{ready}")
        raise RankError(f"{failure_report(results)}\n{ready}", results)


def current() -> Ranks:
    """The ranks that ``%%ranks`` uses: the newest that live.

    Raises:
        ValueError: there are none.
    """
    ranks = _current() if _current else None
    _require(ranks is not None and ranks.alive, "no ranks are alive; run first: ranks = Ranks(2)")
    return ranks


def _end_previous(successor: Ranks) -> None:
    """End the ranks that were current, and make ``successor`` so."""
    global _current
    previous = _current() if _current else None
    if previous is not None and previous is not successor:
        previous._end_because(f"the newer Ranks({successor.count})")
    _current = weakref.ref(successor)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RanksUseError(otherwise)

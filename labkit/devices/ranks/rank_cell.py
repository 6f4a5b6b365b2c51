"""Runs one piece of code on several ranks and brings every one of them to an end."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import zmq

from labkit.devices.ranks.rank_kernels import Death, RankKernel
from labkit.devices.ranks.rank_output import RankOutput
from labkit.devices.ranks.stop_button import StopButton

TICK_S = 0.05  # how often deaths, the stop button and C++ output are looked at
SIGNAL_AGAIN_S = 1.0  # a rank that had not yet begun its cell ignores the first SIGINT
NOTICED_LATE_S = 0.5  # a death may be seen after the errors that it caused elsewhere
MOST_AT_ONCE = 200  # messages of one rank between two looks at the others
LATE_OUTPUT_S = 1.0  # how long to wait for output, or for a reply, when the other one came


@dataclass(frozen=True)
class Patience:
    """Seconds that ranks are given.

    Args:
        grace_s: between the first failure and the interrupt of the ranks that still run; in it,
            other ranks may fail by themselves and show their own error.
        kill_s: between the first interrupt and SIGKILL.
        deadline_s: for the whole; None for a reader's cell, which may train for hours.
    """

    grace_s: float = 1.0
    kill_s: float = 5.0
    deadline_s: float | None = None


FOR_A_CELL = Patience()


@dataclass
class RankResult:
    """What became of the code on one rank."""

    rank: int
    ename: str = ""
    evalue: str = ""
    traceback: list[str] = field(default_factory=list)
    ended_s: float = 0.0  # on the clock of time.time()
    death: Death | None = None
    interrupted: bool = False  # by this layer, while it still ran
    operation: str = ""  # what it was doing when it failed, was interrupted or died

    @property
    def failed(self) -> bool:
        return bool(self.ename) or self.death is not None


class Pending:
    """The code of one rank, on its way."""

    def __init__(self, kernel: RankKernel, code: str, silent: bool) -> None:
        self.kernel, self._silent = kernel, silent
        self.result = RankResult(kernel.rank)
        self.replied_at: float | None = None
        self.idle_at: float | None = None
        self.message_id = kernel.send(code, silent)

    def done(self, now: float) -> bool:
        """Both the reply and the end of the output came, or one of them and then nothing more."""
        if self.result.death is not None:
            return True
        if self.replied_at is not None and self.idle_at is not None:
            return True
        if self.replied_at is None and self.idle_at is None:
            return False
        return now - self._heard_at > LATE_OUTPUT_S

    def take_reply(self, message: dict) -> None:
        if message["parent_header"].get("msg_id") != self.message_id:
            return  # answers a request that was given up
        self.replied_at = self._heard_at = time.monotonic()
        content = message["content"]
        self.result.ended_s = message["header"]["date"].timestamp()
        if content["status"] != "ok":
            self.result.ename = content.get("ename", "Aborted")
            self.result.evalue = content.get("evalue", "")
            self.result.traceback = content.get("traceback", [])
            self.result.operation = self.operation()

    def operation(self) -> str:
        """What the rank is doing, or did last; our own silent calls keep no record of it."""
        return "" if self._silent else self.kernel.last_operation()

    def take_output(self, message: dict, output: RankOutput) -> None:
        self._heard_at = time.monotonic()
        kind, content = message["msg_type"], message["content"]
        ours = message["parent_header"].get("msg_id") == self.message_id
        if ours and kind == "status" and content["execution_state"] == "idle":
            self.idle_at = self._heard_at
        else:
            output.take(self.kernel.rank, kind, content)


class CellRun:
    """One execution on several ranks; ``finish`` returns when every rank has ended it.

    It ends in bounded time after the first failure or press of the stop button: the ranks that
    still run are interrupted, then killed. To be used while the button is being watched, so that
    no KeyboardInterrupt can part the request from its end.
    """

    def __init__(
        self,
        kernels: Mapping[int, RankKernel],
        codes: Mapping[int, str],
        output: RankOutput,
        silent: bool = False,
        patience: Patience = FOR_A_CELL,
        button: StopButton | None = None,
    ) -> None:
        self.output, self.patience, self._silent = output, patience, silent
        self._button = button
        self._began_at = time.monotonic()
        self._trouble_at: float | None = None
        self._signalled_at: list[float] = []
        self._pending = {r: Pending(kernels[r], code, silent) for r, code in codes.items()}
        self._poller = zmq.Poller()
        self._channels = {}
        for pending in self._pending.values():
            for channel in (pending.kernel.shell, pending.kernel.iopub):
                self._poller.register(channel, zmq.POLLIN)
                self._channels[channel] = pending

    def finish(self) -> dict[int, RankResult]:
        """Wait for every rank; never raises for what happens on a rank."""
        while waiting := self._waiting():
            self._take_messages(TICK_S)
            self._take_logs()
            self._note_deaths(waiting)
            self._press_on(waiting)
        self._take_logs()
        self.output.end()
        return {rank: pending.result for rank, pending in self._pending.items()}

    def _waiting(self) -> list[Pending]:
        now = time.monotonic()
        waiting = [pending for pending in self._pending.values() if not pending.done(now)]
        for pending in self._pending.values():
            # an interrupt at a bad moment ends the request without a reply
            if pending.idle_at and not pending.replied_at and pending not in waiting:
                pending.result.ename = pending.result.ename or "KeyboardInterrupt"
        return waiting

    def _take_messages(self, wait_s: float) -> None:
        for channel, _ in self._poller.poll(wait_s * 1000):
            self._take_from(channel)

    def _take_from(self, channel: zmq.Socket) -> int:
        """Handle some of what is there, lest a flood of output hide the stop button."""
        pending = self._channels[channel]
        for taken in range(MOST_AT_ONCE):
            message = pending.kernel.receive(channel)
            if message is None:
                return taken
            if channel is pending.kernel.iopub:
                pending.take_output(message, self.output)
            elif message["msg_type"] == "execute_reply":
                pending.take_reply(message)
        return MOST_AT_ONCE

    def _take_logs(self) -> None:
        for pending in self._pending.values():
            if text := pending.kernel.new_log_text():
                self.output.take(pending.kernel.rank, "stream", {"name": "stderr", "text": text})

    def _note_deaths(self, waiting: list[Pending]) -> None:
        for pending in waiting:
            if death := pending.kernel.death():
                while self._take_from(pending.kernel.iopub):
                    pass  # what it said before it died
                pending.result.death = death
                pending.result.ended_s = time.time() - NOTICED_LATE_S
                pending.result.operation = "" if self._silent else death.operation

    def _press_on(self, waiting: list[Pending]) -> None:
        """Interrupt, and later kill, the ranks that hold up the end."""
        now = time.monotonic()
        stop_at = self._stop_at(now)
        if stop_at is None or now < stop_at:
            return
        first = self._signalled_at[0] if self._signalled_at else now
        if now - first >= self.patience.kill_s:
            self._kill(waiting)
        elif not self._signalled_at or now - self._signalled_at[-1] >= SIGNAL_AGAIN_S:
            self._signalled_at.append(now)
            self._interrupt(waiting)

    def _stop_at(self, now: float) -> float | None:
        if self._button and self._button.presses:
            return now
        if self._trouble_at is None and any(p.result.failed for p in self._pending.values()):
            self._trouble_at = now
        ends = []
        if self._trouble_at is not None:
            ends.append(self._trouble_at + self.patience.grace_s)
        if self.patience.deadline_s is not None:
            ends.append(self._began_at + self.patience.deadline_s)
        return min(ends, default=None)

    def _interrupt(self, waiting: list[Pending]) -> None:
        for pending in waiting:
            if pending.replied_at is None:
                pending.result.interrupted = True
                pending.result.operation = pending.operation()
                pending.kernel.signal(signal.SIGINT)

    def _kill(self, waiting: list[Pending]) -> None:
        for pending in waiting:
            if pending.replied_at is None:
                pending.result.interrupted = True
                pending.kernel.kill()

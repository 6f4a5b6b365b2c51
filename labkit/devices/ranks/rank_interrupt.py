"""Runs inside a rank: makes an interrupt reach a rank that is blocked in a collective.

A collective blocks in C++. Python's handler of SIGINT runs only after it returns, and gloo returns
only after its time limit: ``abort``, ``shutdown`` and ``_abort_process_group`` all wait it out. But
the C-level handler of every signal writes to the *wakeup* file descriptor at once. A thread reads
that and cuts the TCP connections of the process group; the collective then fails, and
KeyboardInterrupt comes through. NCCL and its kin are told to abort instead
(``Backend.abort_process_group``), which has not been run on a machine with GPUs.

Order of events when rank 1 is stuck in an all-reduce:

    SIGINT -> C handler -> wakeup thread cuts the connections -> all_reduce raises RuntimeError
           -> Python handler, in the cell: KeyboardInterrupt; already out of it: nothing more to do
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import sys
import threading
import traceback
from types import FrameType

from labkit.devices.backends import Backend
from labkit.devices.ranks.rank_operation import is_cell

_backend: Backend | None = None
_foreign_connections: set[int] = set()  # TCP descriptors that were open before the group


def make_interruptible(shell, its_backend: Backend) -> None:
    """From now on SIGINT ends what a cell of this process waits in. Main thread only."""
    global _backend
    _backend = its_backend
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    arguments = (reader, writer, asyncio.get_running_loop())
    threading.Thread(
        target=_end_on_wakeup, args=arguments, daemon=True, name="labkit-interrupt"
    ).start()
    shell.events.register("pre_execute", _raise_in_cells_only)  # silent requests too


def _end_on_wakeup(reader: socket.socket, writer: socket.socket, loop) -> None:
    # the writer is held open here: only its number was given away
    while numbers := reader.recv(64):
        if signal.SIGINT in numbers:
            end_collectives()
            # ipykernel cancels an awaiting cell by a callback, but does not wake the loop for it
            loop.call_soon_threadsafe(lambda: None)


def _raise_in_cells_only() -> None:
    """Interrupt the reader's code, never IPython's own after it: the reply would get lost."""
    previous = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> None:
        stack = traceback.walk_stack(frame) if frame else ()
        if any(is_cell(f.f_code.co_filename) for f, _ in stack):
            raise KeyboardInterrupt
        if previous is not signal.default_int_handler:
            previous(number, frame)  # ipykernel's, for a cell that awaits

    if callable(previous) and getattr(previous, "__module__", "") != __name__:
        signal.signal(signal.SIGINT, interrupt)


def forget_connections() -> None:
    """The TCP connections that are open now belong to no process group: never cut them."""
    global _foreign_connections
    _foreign_connections = set(loopback_connections())


def end_collectives() -> None:
    """Make every thread that waits in a collective return with an error."""
    try:
        if not _backend.abort_process_group():
            sever_connections()
    except Exception as error:  # this thread must outlive a failed attempt
        print(f"could not end the collective: {error!r}", file=sys.stderr)


def sever_connections() -> int:
    """Shut down the loopback TCP connections made since the group was; returns how many."""
    severed = 0
    for descriptor in loopback_connections():
        if descriptor in _foreign_connections:
            continue
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            severed += 1
        except OSError:
            pass  # closed meanwhile
    return severed


def loopback_connections() -> list[int]:
    """Descriptors of this process's TCP connections with both ends on this machine."""
    return [int(name) for name in os.listdir("/dev/fd") if _is_loopback_connection(int(name))]


def _is_loopback_connection(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (
                socket.AF_INET,
                socket.AF_INET6,
            ):
                return False
            ends = connection.getsockname()[0], connection.getpeername()[0]
    except OSError:
        return False  # closed meanwhile, or it listens and has no peer
    return all(end.startswith(("127.", "::1", "::ffff:127.")) for end in ends)

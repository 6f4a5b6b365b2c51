"""Runs inside a rank: makes an interrupt reach a rank that is blocked in a collective.

A collective blocks in C++. Python's handler of SIGINT runs only after it returns, and gloo returns
only after its time limit: ``abort``, ``shutdown`` and ``_abort_process_group`` all wait it out. But
the C-level handler of every signal writes to the *wakeup* file descriptor at once. A thread reads
that and cuts the TCP connections of the process group; the collective then fails, and
KeyboardInterrupt comes through. NCCL and its kin are told to abort instead
(``Backend.abort_process_group``), which has not been run on a machine with GPUs.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import threading

_backend = None
_foreign_connections: set[int] = set()  # TCP descriptors that were open before the group
_wakeup: tuple[socket.socket, socket.socket] | None = None


def end_collectives_on_interrupt(its_backend) -> None:
    """From now on SIGINT ends whatever collective this process waits in. Main thread only."""
    global _backend, _wakeup
    _backend = its_backend
    _wakeup = socket.socketpair()
    for end in _wakeup:
        end.setblocking(end is _wakeup[0])
    signal.set_wakeup_fd(_wakeup[1].fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_on_wakeup, daemon=True, name="labkit-interrupt").start()


def _end_on_wakeup() -> None:
    while numbers := _wakeup[0].recv(64):
        if signal.SIGINT in numbers:
            end_collectives()


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

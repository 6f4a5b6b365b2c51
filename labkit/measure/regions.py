"""Name pieces of a program once; whatever watches, a stopwatch or a recorder, hears the names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

Listener = Callable[[str, str], AbstractContextManager]
_listeners: list[Listener] = []


@contextmanager
def region(label: str, kind: str = "compute") -> Iterator[None]:
    """Name what runs inside for everything that listens; without a listener it does nothing.

    Args:
        label: such as F3, the forward of microbatch 3.
        kind: a ``Span``'s: forward, backward, weight, optimizer, compute, transfer or wait.
    """
    with ExitStack() as stack:
        for listener in _listeners:
            stack.enter_context(listener(label, kind))
        yield


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let ``listener(label, kind)`` open a context around every region inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)

from __future__ import annotations

import socket

import pytest

from labkit.devices.ranks import rank_interrupt


class FakeBackend:
    """Stands for NCCL, which no test machine has: its collectives can be aborted."""

    def __init__(self, aborts):
        self.aborts, self.aborted = aborts, 0

    def abort_process_group(self):
        self.aborted += 1
        if isinstance(self.aborts, Exception):
            raise self.aborts
        return self.aborts


def connect():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    near.settimeout(2)
    return near, far


@pytest.fixture
def connection(monkeypatch):
    monkeypatch.setattr(rank_interrupt, "_foreign_connections", set())
    old = connect()
    rank_interrupt.forget_connections()
    new = connect()
    yield old, new
    for end in (*old, *new):
        end.close()


def is_cut(connection):
    near, far = connection
    try:
        near.sendall(b"x")
    except OSError:
        return True
    return far.recv(1) == b""


def test_gloo_is_ended_by_cutting_the_connections_made_since_the_group_was(connection, monkeypatch):
    old, new = connection
    monkeypatch.setattr(rank_interrupt, "_backend", FakeBackend(aborts=False))
    rank_interrupt.end_collectives()
    assert is_cut(new) and not is_cut(old)


def test_a_back_end_that_can_abort_is_told_to_and_keeps_its_connections(connection, monkeypatch):
    nccl = FakeBackend(aborts=True)
    monkeypatch.setattr(rank_interrupt, "_backend", nccl)
    rank_interrupt.end_collectives()
    assert nccl.aborted == 1 and not is_cut(connection[1])


def test_a_failed_abort_is_told_and_does_not_end_the_thread(monkeypatch, capsys):
    monkeypatch.setattr(rank_interrupt, "_backend", FakeBackend(RuntimeError("no group")))
    rank_interrupt.end_collectives()
    assert "could not end the collective: RuntimeError('no group')" in capsys.readouterr().err

"""Ports: who listens, and whether one is free."""

from __future__ import annotations

import os
import socket

import pytest
from routewise.port import (
    free_port,
    is_port_free,
    listening_inodes,
    mapped_files,
    socket_inodes,
)

#: An address that others hardly use, so that nobody is given the ports of these tests meanwhile.
HOST = f"127.{os.getpid() // 250 % 250 + 1}.{os.getpid() % 250 + 1}.7"


def listen(port: int, *, shared: bool = False) -> socket.socket:
    found = socket.socket()
    if shared:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    found.bind((HOST, port))
    found.listen()
    return found


def test_a_free_port_is_free_until_somebody_listens() -> None:
    port = free_port(HOST)
    assert is_port_free(HOST, port)
    with listen(port):
        assert not is_port_free(HOST, port)
    assert is_port_free(HOST, port)


def test_a_port_that_is_shared_is_not_free() -> None:
    port = free_port(HOST)
    with listen(port, shared=True), listen(port, shared=True):
        assert not is_port_free(HOST, port)
        assert len(listening_inodes(port) & socket_inodes(os.getpid())) == 2


def test_connections_that_fade_do_not_hold_a_port() -> None:
    port = free_port(HOST)
    with listen(port) as server:
        client = socket.create_connection((HOST, port))
        accepted, _ = server.accept()
        accepted.close()  # this side closes first: it waits in TIME_WAIT
        client.close()
    assert is_port_free(HOST, port)
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind((HOST, port))


def test_a_port_that_is_bound_and_silent_is_not_free() -> None:
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        assert not is_port_free(HOST, bound.getsockname()[1])


def test_a_listener_is_found_by_its_process() -> None:
    port = free_port(HOST)
    with listen(port):
        assert len(listening_inodes(port) & socket_inodes(os.getpid())) == 1
    assert not listening_inodes(port) & socket_inodes(os.getpid())


def test_a_bound_socket_that_does_not_listen_is_none() -> None:
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        assert not listening_inodes(bound.getsockname()[1]) & socket_inodes(os.getpid())


def test_a_process_that_is_gone_has_no_sockets() -> None:
    assert socket_inodes(2**22 + 1) == set()


def test_mapped_libraries_are_found() -> None:
    names = [path.name for path in mapped_files(os.getpid())]
    assert any(name.startswith("libc.so") or name.startswith("libc-") for name in names)
    with pytest.raises(FileNotFoundError):
        mapped_files(2**22 + 1)

"""A stopping router answers the clients that connected before it stopped."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cluster.fleet import Process, started, until

REQUEST = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Process]:
    with started(tmp_path / "router.log", "route", "--worker", "http://127.0.0.1:9") as process:
        until(lambda: _status(process) is not None, 60)
        yield process


def _connect(router: Process) -> socket.socket:
    address = urlsplit(router.url)
    assert address.hostname is not None
    return socket.create_connection((address.hostname, address.port or 80), timeout=30)


def _answer(client: socket.socket) -> bytes:
    with client, client.makefile("rb") as answer:
        return answer.readline()


def _status(router: Process) -> bytes | None:
    try:
        client = _connect(router)
    except ConnectionRefusedError:
        return None
    client.sendall(REQUEST)
    return _answer(client)


def test_connections_that_wait_to_be_accepted_are_answered(router: Process) -> None:
    expected = _status(router)
    assert expected is not None
    assert expected.startswith(b"HTTP/1.1 ")
    os.kill(router.process.pid, signal.SIGSTOP)
    clients = [_connect(router) for _ in range(20)]
    for client in clients:
        client.sendall(REQUEST)
    os.kill(router.process.pid, signal.SIGTERM)
    os.kill(router.process.pid, signal.SIGCONT)
    assert [_answer(client) for client in clients] == [expected] * 20
    router.process.wait(30)


def test_a_client_that_has_connected_may_send_its_request(router: Process) -> None:
    expected = _status(router)
    client = _connect(router)
    os.kill(router.process.pid, signal.SIGTERM)
    until(lambda: _status(router) is None, 30)
    client.sendall(REQUEST)
    assert _answer(client) == expected
    router.process.wait(30)


def test_a_silent_client_does_not_stop_the_router_from_ending(router: Process) -> None:
    with _connect(router):
        began = time.monotonic()
        os.kill(router.process.pid, signal.SIGTERM)
        router.process.wait(30)
        assert time.monotonic() - began < 15

"""Bytes over a socket with their checksums: equal with and without native code, within the timeout."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvloom.tiers.encoding import checksums
from kvloom.tiers.remote import ByteStream

from .test_checksums import plain

RUN = 10_000
SIZE = 130 * RUN  # more than one call transfers, in both directions


@pytest.fixture(params=["native", "plain"])
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ByteStream, ByteStream]]:
    if request.param == "plain":
        monkeypatch.setattr(checksums, "_native", None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    ends = ByteStream(near, 20.0), ByteStream(far, 20.0)
    yield ends
    for end in ends:
        end.close()


def test_both_sides_compute_the_checksums_of_sent_bytes(pair: tuple[ByteStream, ByteStream]) -> None:
    near, far = pair
    data, into = os.urandom(SIZE), bytearray(SIZE)
    sent: list[bytes] = []
    thread = threading.Thread(target=lambda: sent.append(near.send_checked(memoryview(data), RUN)))
    thread.start()
    came = far.receive_checked(memoryview(into), RUN)
    thread.join()
    assert into == data
    assert sent == [came] == [plain(data, RUN)]


def test_a_close_during_a_transfer_is_detected(pair: tuple[ByteStream, ByteStream]) -> None:
    near, far = pair
    far.send([bytes(RUN + 1)])
    far.close()
    with pytest.raises(ConnectionError):
        near.receive_checked(memoryview(bytearray(SIZE)), RUN)
    with pytest.raises(ConnectionError):
        near.send_checked(memoryview(bytes(20 * SIZE)), RUN)


def test_a_call_that_another_thread_closes_reads_no_bytes_of_a_new_socket() -> None:
    """The new socket gets the descriptor of the closed one, while the call still has bytes to receive."""
    for _ in range(20):
        near, far = socket.socketpair()
        stream, received = ByteStream(near, 20.0), bytearray(8 * RUN)

        def call(stream: ByteStream = stream, received: bytearray = received) -> None:
            with contextlib.suppress(OSError):
                stream.receive_checked(memoryview(received), RUN)

        thread = threading.Thread(target=call)
        thread.start()
        far.send(b"x")
        time.sleep(0.01)
        stream.close()
        new, other = socket.socketpair()
        other.send(b"of the new connection")
        thread.join(20)
        new.settimeout(0.2)
        try:
            assert new.recv(100) == b"of the new connection"
        finally:
            for each in (far, new, other):
                each.close()


@pytest.mark.parametrize("trickle", [False, True])
def test_a_silent_or_slow_peer_costs_a_bounded_wait(
    pair: tuple[ByteStream, ByteStream], trickle: bool
) -> None:
    near, far = pair
    short = ByteStream(near.socket, 0.2)
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.02):
            far.send([b"x"])

    thread = threading.Thread(target=drip)
    if trickle:
        thread.start()
    try:
        for verb in (
            lambda: short.receive_checked(memoryview(bytearray(SIZE)), RUN),
            lambda: short.send_checked(memoryview(bytes(20 * SIZE)), RUN),
        ):
            short.begin()
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                verb()
            assert time.monotonic() - began < 15
    finally:
        over.set()
        if trickle:
            thread.join()

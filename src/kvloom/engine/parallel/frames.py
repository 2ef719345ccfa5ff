"""Messages on the socket between rank 0 and another rank: a length of 8 bytes, then the message. For a step, the socket
carries only the length, because the step itself is in shared memory.
"""

from __future__ import annotations

import socket

__all__ = ["receive_frame", "receive_length", "send_frame", "send_length"]

LENGTH_BYTES = 8


def send_length(link: socket.socket, length: int) -> None:
    link.sendall(length.to_bytes(LENGTH_BYTES, "little"))


def send_frame(link: socket.socket, body: bytes) -> None:
    send_length(link, len(body))
    link.sendall(body)


def receive_length(link: socket.socket) -> int:
    """Wait for a length. Raises EOFError if the other side has closed the socket."""
    return int.from_bytes(_receive(link, LENGTH_BYTES), "little")


def receive_frame(link: socket.socket) -> bytes:
    """Wait for a message. Raises EOFError if the other side has closed the socket."""
    return _receive(link, receive_length(link))


def _receive(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = link.recv(count - len(data))
        if not part:
            raise EOFError("the other rank has closed the socket")
        data += part
    return data

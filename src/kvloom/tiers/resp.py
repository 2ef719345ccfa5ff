"""Redis's protocol on one socket: commands out in one go, long answers straight into the caller's memory.

A client library would hold every page twice more on its way: here 2 MiB pages go four to seven times faster than through
redis-py with hiredis. Knows commands and answers, no pages.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from .sockets import Bytestream

__all__ = ["RefusedError", "Resp"]

_END = b"\r\n"
_MOST_LINE = 1 << 16
_RECEIVE_BYTES = 1 << 20  # the server has one thread, and goes on with the next answer meanwhile
_MOST_SHORT = 64 << 10  # bytes of an answer without a place of its own: digests, counts
_MOST_ITEMS, _MOST_DEPTH = 1024, 4  # of an array; arrays in arrays
_MOST_VALUE = 512 << 20  # Redis itself takes no longer one
_AHEAD = 4096  # bytes read beyond a line: what they are of a long answer is copied, the rest is not


class RefusedError(RuntimeError):
    """The server's error answer to one command; the connection is all right."""


class Resp:
    """One connection; for one thread at a time. `timeout` bounds every exchange. OSError, TimeoutError, ValueError: it is
    of no further use."""

    def __init__(
        self,
        address: tuple[str, int] | str,
        timeout: float,
        tls: ssl.SSLContext | None = None,
        most: int = _MOST_SHORT,
    ) -> None:
        """`most` bounds the bytes of an answer that has no place of its own."""
        self._most = most
        if isinstance(address, str):
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connected.settimeout(timeout)
            connected.connect(address)
        else:
            connected = socket.create_connection(address, timeout)
            if tls is not None:
                connected = tls.wrap_socket(connected, server_hostname=address[0])
        self._stream = Bytestream(connected, timeout, _RECEIVE_BYTES)
        self._buffer = memoryview(bytearray(_AHEAD))
        self._at = self._end = 0

    def close(self) -> None:
        self._stream.close()

    def ask(self, *command: Any) -> Any:
        """One command and its answer; raises RefusedError."""
        self.send([command])
        answer = self.answer()
        if isinstance(answer, RefusedError):
            raise answer
        return answer

    def send(self, commands: Sequence[Sequence[Any]]) -> None:
        """Commands, without waiting for answers. An argument is bytes, text, a number, or a list of pieces that are sent
        from where they are. The time for the whole exchange begins here."""
        self._stream.begin()
        pieces: list[Any] = []
        for command in commands:
            short = [b"*%d\r\n" % len(command)]
            for argument in command:
                if isinstance(argument, list):
                    short.append(b"$%d\r\n" % sum(map(len, argument)))
                    pieces += [b"".join(short), *argument]
                    short = [_END]
                else:
                    data = argument if isinstance(argument, bytes) else str(argument).encode()
                    short.append(b"$%d\r\n%b\r\n" % (len(data), data))
            pieces.append(b"".join(short))
        self._stream.send(pieces)

    # --- answers

    def answer(self, depth: int = 0) -> Any:
        """The next answer: bytes, a number, None, a list, or a RefusedError (not raised: it is one command's). ValueError: it is longer
        than any short answer, so no memory is set aside for it."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"-":
            return RefusedError(rest.decode(errors="replace"))
        if kind == b"$":
            length = _bounded("a string of bytes", int(rest), self._most)
            if length < 0:
                return None
            data = bytearray(length)
            self._fill(memoryview(data))
            self._skip(2)
            return bytes(data)
        if kind == b"*":
            items = _bounded("an array of items", int(rest), _MOST_ITEMS)
            _bounded("arrays in arrays", depth + 1, _MOST_DEPTH)
            return None if items < 0 else [self.answer(depth + 1) for _ in range(items)]
        raise ValueError(f"not an answer of Redis: {line[:40]!r}")

    def long_answer(self, place: Callable[[int], Sequence[memoryview] | None]) -> int:
        """A string's length, -1 for none; its bytes go where `place(length)` says. RefusedError is raised."""
        line = self._line()
        if line[:1] == b"-":
            raise RefusedError(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise ValueError(f"not a string of Redis: {line[:40]!r}")
        length = _bounded("a value of bytes", int(line[1:]), _MOST_VALUE)
        if length < 0:
            return -1
        pieces = place(length)
        if pieces is None:
            self._skip(length + 2)
            return length
        if sum(map(len, pieces)) != length:
            raise ValueError(f"a place of {sum(map(len, pieces))} bytes for {length}")
        for piece in pieces:
            self._fill(piece)
        self._skip(2)
        return length

    def _line(self) -> bytes:
        line = b""
        while True:
            ahead = bytes(self._buffer[self._at : self._end])
            found = ahead.find(b"\n")
            if found >= 0:
                self._at += found + 1
                return (line + ahead[:found]).rstrip(b"\r")
            line += ahead
            if len(line) > _MOST_LINE:
                raise ValueError("a line without an end")
            self._at, self._end = 0, self._stream.receive_some(self._buffer)

    def _fill(self, into: memoryview) -> None:
        done = min(len(into), self._end - self._at)
        into[:done] = self._buffer[self._at : self._at + done]
        self._at += done
        self._stream.receive(into[done:])

    def _skip(self, count: int) -> None:
        while count:
            if self._at == self._end:
                self._at, self._end = 0, self._stream.receive_some(self._buffer)
            step = min(count, self._end - self._at)
            self._at += step
            count -= step


def _bounded(what: str, length: int, most: int) -> int:
    """Returns a length that the server named. ValueError: it is above `most`."""
    if length > most:
        raise ValueError(f"Redis announced {what}: {length}, the limit is {most}; is it a Redis server?")
    return length

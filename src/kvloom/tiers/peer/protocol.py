"""What two peers say to each other: a fixed header, then as many bytes as it says.

    hello    server: "KVPEER" version u16, nonce 32       client: nonce 32, proof 32       server: yes u8, proof 32
    message  "KVPM" verb u8 status u8 0 u16 count u32 page_bytes u32 run_bytes u32 a u64 b u64 payload u64

A proof is HMAC-SHA256 under the shared secret of both nonces, so neither side tells it, and each knows the other has it. What
is sent afterwards is checked, not hidden. Every length is checked before memory is taken. Knows no tiers.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from kvloom.tiers.remote.sockets import Bytestream

__all__ = ["MOST_OBJECTS", "WIRE_VERSION", "Channel", "Message", "PeerError", "Verb", "greet", "welcome"]

WIRE_VERSION = 3
MOST_OBJECTS = 1 << 16
_MOST_PAYLOAD = 64 << 20  # of keys, offsets and checksums; pages are not payload
_HELLO = struct.Struct("<6sH32s")
_HEADER = struct.Struct("<4sBBHIIIQQQ")
_MAGIC, _HELLO_MAGIC = b"KVPM", b"KVPEER"


class PeerError(RuntimeError):
    """The other side said no, or what is no message; the connection is not used again."""


class Verb(IntEnum):
    ABOUT = 1  # slab and capacity in a, b; payload: where the shared memory is
    LOOKUP = 2  # keys -> a byte each
    HOLD = 3  # keys -> lease in a; results, offsets, checksums of those found
    RELEASE = 4  # lease in a; no answer
    RESERVE = 5  # keys -> lease in a; results, offsets
    COMMIT = 6  # lease in a, written in b, checksums -> done
    READ = 7  # keys, part in a, b -> results, checksums of those found; then their bytes
    WRITE = 8  # keys -> results; then the pages that are PENDING, then their checksums -> done
    DROP = 9  # keys -> count in a
    USAGE = 10  # -> objects, bytes, evicted, u64 each


@dataclass(slots=True)
class Message:
    verb: Verb
    count: int = 0
    page_bytes: int = 0
    run_bytes: int = 0
    a: int = 0
    b: int = 0
    payload: bytes = b""
    status: int = 0  # 1: refused, and the payload says why


class Channel:
    """One connection; for one thread at a time. `timeout` bounds every exchange (`begin` starts one, of `size` bytes)."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        self._stream = Bytestream(connected, timeout)

    def begin(self, size: int = 0) -> None:
        self._stream.begin(size)

    def close(self) -> None:
        self._stream.close()

    def send(self, message: Message, pieces: Sequence[Any] = ()) -> None:
        """A message, and after it pieces of memory from where they are."""
        header = _HEADER.pack(
            _MAGIC,
            message.verb,
            message.status,
            0,
            message.count,
            message.page_bytes,
            message.run_bytes,
            message.a,
            message.b,
            len(message.payload),
        )
        self.push([header + message.payload, *pieces])

    def push(self, pieces: Sequence[Any]) -> None:
        self._stream.send(pieces)

    def receive(self, patient: bool = False) -> Message:
        """The next message; `patient` waits for its first byte as long as it takes."""
        if patient:
            self._stream.wait_readable()
            self.begin()
        data = bytes(self.take(_HEADER.size))
        magic, verb, status, _, count, page_bytes, run_bytes, a, b, size = _HEADER.unpack(data)
        if magic != _MAGIC or verb not in Verb.__members__.values():
            raise PeerError("what came is no message of a peer")
        if count > MOST_OBJECTS or size > _MOST_PAYLOAD:
            raise PeerError(f"a message of {count} objects and {size} bytes is beyond what is taken")
        payload = bytes(self.take(size))
        message = Message(Verb(verb), count, page_bytes, run_bytes, a, b, payload, status)
        if status:
            raise PeerError(payload.decode(errors="replace")[:500])
        return message

    def take(self, size: int) -> bytearray:
        data = bytearray(size)
        self.fill(memoryview(data))
        return data

    def fill(self, into: memoryview) -> None:
        self._stream.receive(into)

    def fill_checked(self, into: memoryview, run_bytes: int) -> bytes:
        """Fills whole runs; their checksums."""
        return self._stream.receive_checked(into, run_bytes)

    def push_checked(self, data: memoryview, run_bytes: int) -> bytes:
        """Sends whole runs; their checksums."""
        return self._stream.send_checked(data, run_bytes)


def _proof(secret: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, who + b"".join(nonces), "sha256")


def welcome(channel: Channel, secret: bytes) -> bool:
    """The server's side of a hello: has the client the secret?"""
    nonce = os.urandom(32)
    channel.push([_HELLO.pack(_HELLO_MAGIC, WIRE_VERSION, nonce)])
    answer = bytes(channel.take(64))
    theirs, proof = answer[:32], answer[32:]
    good = hmac.compare_digest(proof, _proof(secret, b"client", nonce, theirs))
    channel.push([bytes([good]) + (_proof(secret, b"server", theirs, nonce) if good else bytes(32))])
    return good


def greet(channel: Channel, secret: bytes) -> None:
    """The client's side. A PeerError says what is wrong."""
    magic, version, nonce = _HELLO.unpack(bytes(channel.take(_HELLO.size)))
    if magic != _HELLO_MAGIC:
        raise PeerError("what answers there is no peer of kvloom")
    if version != WIRE_VERSION:
        raise PeerError(f"the peer speaks version {version}, we {WIRE_VERSION}: run the same release")
    ours = os.urandom(32)
    channel.push([ours + _proof(secret, b"client", nonce, ours)])
    answer = bytes(channel.take(33))
    if answer[0] != 1:
        raise PeerError("the peer refused our secret: give both sides the same")
    if not hmac.compare_digest(answer[1:], _proof(secret, b"server", ours, nonce)):
        raise PeerError("what answers there does not have the secret")

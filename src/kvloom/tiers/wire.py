"""What two peers say to each other: a fixed header, then as many bytes as it says.

    hello    server: "KVPEER" version u16, nonce 32       client: nonce 32, proof 32       server: verdict u8, proof 32
    message  "KVPM" verb u8 status u8 0 u16 count u32 page_bytes u32 run_bytes u32 a u64 b u64 payload u64, the payload, tag 16

A proof is HMAC-SHA256 under the shared secret of both nonces, so neither side tells it, and each knows the other has it. A tag
is keyed BLAKE2b of a message and its number, under a key of this connection and direction: nobody adds, changes or repeats
messages. Pages follow messages as they are, and nothing is encrypted. Every length is checked before memory is taken. Knows no tiers.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Any

from .sockets import Bytestream

__all__ = [
    "MOST_OBJECTS",
    "WIRE_VERSION",
    "Channel",
    "Message",
    "PeerError",
    "Verb",
    "Verdict",
    "greet",
    "welcome",
]

WIRE_VERSION = 4
MOST_OBJECTS = 1 << 16
_MOST_PAYLOAD = 64 << 20  # of keys, offsets and checksums; pages are not payload
_HELLO = struct.Struct("<6sH32s")
_HEADER = struct.Struct("<4sBBHIIIQQQ")
_MAGIC, _HELLO_MAGIC = b"KVPM", b"KVPEER"
_TAG_BYTES = 16


class PeerError(RuntimeError):
    """The other side said no, or what is no message; the connection is not used again."""


class Verdict(IntEnum):
    """The server's answer to a hello."""

    WRONG_SECRET = 0
    WELCOME = 1
    TOO_MANY = 2
    WRONG_USER = 3


_REFUSALS = {
    Verdict.WRONG_SECRET: "the peer refused our secret: give both sides the same file (`kvloom share --secret FILE`, "
    "`peer://…?secret=FILE`), or run both as one user",
    Verdict.TOO_MANY: "the peer has as many connections as it allows: end other clients, or raise its limit",
    Verdict.WRONG_USER: "the peer does not serve this user: start it with --allow-uid, or run both as one user",
}


class Verb(IntEnum):
    ABOUT = 1  # owner's token -> slab and capacity in a, b; payload: where the shared memory is, and limits
    LOOKUP = 2  # keys -> a byte each
    HOLD = 3  # keys -> lease in a; results, offsets, checksums of those found
    RELEASE = 4  # lease in a; no answer
    RESERVE = 5  # keys -> lease in a; results, offsets
    COMMIT = 6  # lease in a, written in b, checksums -> done
    READ = 7  # keys, part in a, b -> results, checksums of those found; then their bytes
    WRITE = 8  # keys -> results; then the pages that are PENDING, then a WRITE with their checksums -> done
    DROP = 9  # keys -> count in a: of pages that the same owner wrote, or that are damaged
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
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0

    def secure(self, send_key: bytes, receive_key: bytes) -> None:
        """Tags every message from now on."""
        self._send_key, self._receive_key = send_key, receive_key

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
        tag = _tag(self._send_key, self._sent, header, message.payload)
        self._sent += 1
        self.push([header + message.payload + tag, *pieces])

    def push(self, pieces: Sequence[Any]) -> None:
        self._stream.send(pieces)

    def receive(self, patient: bool = False, most: Callable[[Verb, int], int] | None = None) -> Message:
        """The next message; `patient` waits for its first byte as long as it takes. `most` returns the largest payload for a
        verb and a count."""
        if patient:
            self._stream.wait_readable()
            self.begin()
        data = bytes(self.take(_HEADER.size))
        magic, verb, status, _, count, page_bytes, run_bytes, a, b, size = _HEADER.unpack(data)
        if magic != _MAGIC or verb not in Verb.__members__.values():
            raise PeerError("what came is no message of a peer")
        limit = _MOST_PAYLOAD if most is None else min(_MOST_PAYLOAD, most(Verb(verb), count))
        if count > MOST_OBJECTS or size > limit:
            raise PeerError(
                f"a message of {count} objects and {size} bytes is beyond the limits of {MOST_OBJECTS} and {limit}"
            )
        payload = bytes(self.take(size))
        tag = bytes(self.take(_TAG_BYTES))
        if not hmac.compare_digest(tag, _tag(self._receive_key, self._received, data, payload)):
            raise PeerError("a message was changed on its way: the connection is closed")
        self._received += 1
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


def _tag(key: bytes, number: int, header: bytes, payload: bytes) -> bytes:
    tag = blake2b(number.to_bytes(8, "little"), digest_size=_TAG_BYTES, key=key)
    tag.update(header)
    tag.update(payload)
    return tag.digest()


def _proof(secret: bytes, role: bytes, server: bytes, client: bytes) -> bytes:
    """A value that only a holder of the secret computes: of a role, this version and both nonces."""
    return hmac.digest(secret, b"kvloom peer %d %b:" % (WIRE_VERSION, role) + server + client, "sha256")


def welcome(
    channel: Channel, secret: bytes, admit: Callable[[], Verdict] = lambda: Verdict.WELCOME
) -> Verdict:
    """The server's side of a hello. `admit` decides about a client that has the secret."""
    ours = os.urandom(32)
    channel.push([_HELLO.pack(_HELLO_MAGIC, WIRE_VERSION, ours)])
    answer = bytes(channel.take(64))
    theirs, proof = answer[:32], answer[32:]
    good = hmac.compare_digest(proof, _proof(secret, b"client", ours, theirs))
    verdict = admit() if good else Verdict.WRONG_SECRET
    proof = _proof(secret, b"server %d" % verdict, ours, theirs) if good else bytes(32)
    channel.push([bytes([verdict]) + proof])
    channel.secure(_proof(secret, b"answers", ours, theirs), _proof(secret, b"requests", ours, theirs))
    return verdict


def greet(channel: Channel, secret: bytes) -> None:
    """The client's side. A PeerError says what is wrong."""
    magic, version, theirs = _HELLO.unpack(bytes(channel.take(_HELLO.size)))
    if magic != _HELLO_MAGIC:
        raise PeerError("what answers there is no peer of kvloom")
    if version != WIRE_VERSION:
        raise PeerError(f"the peer speaks version {version}, we {WIRE_VERSION}: run the same release")
    ours = os.urandom(32)
    channel.push([ours + _proof(secret, b"client", theirs, ours)])
    answer = bytes(channel.take(33))
    verdict = answer[0]
    if verdict == Verdict.WRONG_SECRET:
        raise PeerError(_REFUSALS[Verdict.WRONG_SECRET])
    if not hmac.compare_digest(answer[1:], _proof(secret, b"server %d" % verdict, theirs, ours)):
        raise PeerError("what answers there does not have the secret")
    if verdict != Verdict.WELCOME:
        raise PeerError(_REFUSALS.get(Verdict(verdict), "the peer refused us"))
    channel.secure(_proof(secret, b"requests", theirs, ours), _proof(secret, b"answers", theirs, ours))

"""The wire protocol between peers. A message is a fixed header and a payload. The header contains the length
of the payload.

    hello    server: "KVPEER" version u16, nonce 32    TLS handshake, if bit 15 of the version is set
             client: nonce 32, proof 32                server: verdict u8, proof 32
    message  "KVPM" verb u8 status u8 0 u16 count u32 page_bytes u32 run_bytes u32 a u64 b u64
             payload u64, the payload, tag 16

A proof is an HMAC-SHA256 of both nonces and the digest of the server's TLS certificate, under the shared secret. A
proof shows that a process has the secret, without sending the secret. A machine between the peers may answer with its
own certificate, or clear bit 15 of the version. The proofs then differ, and the connection is refused.

A tag is a keyed BLAKE2b of the message and its number, with one key per connection and direction. An
attacker therefore cannot add, change or repeat messages. Pages follow after a message and have no tag.
Without TLS, nothing is encrypted. Lengths are checked before memory is allocated.
"""

from __future__ import annotations

import hmac
import os
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b, sha256
from typing import Any

from kvloom.tiers.remote import ByteStream

from .tls import ServerTLS, client_context

__all__ = [
    "MAX_OBJECTS",
    "WIRE_VERSION",
    "Channel",
    "Message",
    "PeerError",
    "Verb",
    "Verdict",
    "client_handshake",
    "server_handshake",
]

WIRE_VERSION = 6
_TLS = 1 << 15  # bit of the version in a hello
MAX_OBJECTS = 1 << 16
_MAX_PAYLOAD = 64 << 20  # largest payload: keys, offsets and checksums, but not pages
_HELLO = struct.Struct("<6sH32s")
_HEADER = struct.Struct("<4sBBHIIIQQQ")
_MAGIC, _HELLO_MAGIC = b"KVPM", b"KVPEER"
_TAG_BYTES = 16


class PeerError(RuntimeError):
    """Raised if the peer refused a request or sent an invalid message. The connection is not used again."""


class Verdict(IntEnum):
    """The server's reply to the first message (hello) of a client: the connection is accepted, or refused with a
    reason."""

    WRONG_SECRET = 0
    ACCEPTED = 1
    TOO_MANY_CONNECTIONS = 2
    WRONG_USER = 3


_REFUSALS = {
    Verdict.WRONG_SECRET: "the peer rejected the secret: give both sides the same file (`kvloom share --secret FILE`, "
    "`peer://…?secret=FILE`), or run both as one user",
    Verdict.TOO_MANY_CONNECTIONS: "the peer has reached its limit of connections: end other clients, or raise the limit",
    Verdict.WRONG_USER: "the peer does not serve this user: start it with --allow-uid, or run both as one user",
}


class Verb(IntEnum):
    """The requests of a client. The comment of each request lists its fields and, after `->`, the fields of the
    reply.

    In these comments, `share` is the tenant's share of the tier's capacity. If the tenant has a share, the
    tenant's id follows the keys in the payload. The header fields `a` and `b` are the limit and the
    guaranteed part of the share, in bytes. If the tenant has no share, the id is left out, and `a` and `b`
    are not used.
    """

    ABOUT = 1  # client's token -> slab and capacity in a, b; payload: address of the shared memory, limits
    LOOKUP = 2  # keys -> one byte each
    ACQUIRE = 3  # keys -> lease in a; results, offsets, checksums of the hits
    RELEASE = 4  # lease in a; no reply
    RESERVE = 5  # keys, share -> lease in a; results, offsets
    COMMIT = 6  # lease in a, written in b, checksums -> done
    READ = 7  # keys, part in a, b -> results, checksums of the hits; then their bytes
    WRITE = 8  # keys, share -> results; then the PENDING pages, then a WRITE with their checksums -> done
    DROP = 9  # keys -> count in a: of pages that the same client wrote, or that are damaged
    USAGE = 10  # tenant ids -> objects, bytes, evicted, bytes of each tenant, u64 each


@dataclass(slots=True)
class Message:
    """A request or a reply. `count` is the number of objects or tenant ids. `Verb` states the meaning of `a`, `b` and
    `payload`."""

    verb: Verb
    count: int = 0
    page_bytes: int = 0
    run_bytes: int = 0
    a: int = 0
    b: int = 0
    payload: bytes = b""
    status: int = 0  # 1: refused; the payload is the reason


class Channel:
    """One connection, used by one thread at a time. `begin` starts an exchange of messages, which may take `timeout`
    seconds."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        self._stream = ByteStream(connected, timeout)
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0

    def set_keys(self, send_key: bytes, receive_key: bytes) -> None:
        """Set the keys of both directions. From now on every message has a tag."""
        self._send_key, self._receive_key = send_key, receive_key

    def start_tls(self, context: ssl.SSLContext, server_side: bool) -> bytes:
        """Encrypt the rest of the connection. Return the SHA-256 digest of the server's certificate on the client's
        side, and b"" on the server's side. Raises OSError if the TLS handshake fails."""
        secured = self._stream.start_tls(context, server_side)
        return b"" if server_side else sha256(secured.getpeercert(binary_form=True) or b"").digest()

    def begin(self, size: int = 0) -> None:
        self._stream.begin(size)

    def close(self) -> None:
        self._stream.close()

    def send(self, message: Message, pieces: Sequence[Any] = ()) -> None:
        """Send a message, then `pieces`, which are sent from the caller's memory without a copy."""
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
        self.send_bytes([header + message.payload + tag, *pieces])

    def send_bytes(self, pieces: Sequence[Any]) -> None:
        self._stream.send(pieces)

    def receive(self, wait: bool = False, max_payload: Callable[[Verb, int], int] | None = None) -> Message:
        """Return the next message. If `wait` is set, waits for its first byte without a timeout.

        `max_payload` returns the largest allowed payload for a verb and a count. Raises PeerError if the message is
        invalid.
        """
        if wait:
            self._stream.wait_readable()
            self.begin()
        data = bytes(self.receive_bytes(_HEADER.size))
        magic, verb, status, _, count, page_bytes, run_bytes, a, b, size = _HEADER.unpack(data)
        if magic != _MAGIC or verb not in Verb.__members__.values():
            raise PeerError("received bytes that are not a peer message")
        limit = _MAX_PAYLOAD if max_payload is None else min(_MAX_PAYLOAD, max_payload(Verb(verb), count))
        if count > MAX_OBJECTS or size > limit:
            raise PeerError(
                f"a message of {count} objects and {size} bytes exceeds the limits of {MAX_OBJECTS} and {limit}"
            )
        payload = bytes(self.receive_bytes(size))
        tag = bytes(self.receive_bytes(_TAG_BYTES))
        if not hmac.compare_digest(tag, _tag(self._receive_key, self._received, data, payload)):
            raise PeerError("a message was modified in transit: the connection is closed")
        self._received += 1
        message = Message(Verb(verb), count, page_bytes, run_bytes, a, b, payload, status)
        if status:
            raise PeerError(payload.decode(errors="replace")[:500])
        return message

    def receive_bytes(self, size: int) -> bytearray:
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return data

    def receive_into(self, into: memoryview) -> None:
        self._stream.receive(into)

    def receive_checked(self, into: memoryview, run_bytes: int) -> bytes:
        """Receive bytes into `into`, whose size is a multiple of `run_bytes`. Return one checksum for each layer
        run (`run_bytes` bytes)."""
        return self._stream.receive_checked(into, run_bytes)

    def send_checked(self, data: memoryview, run_bytes: int) -> bytes:
        """Send the layer runs in `data`. Return their checksums."""
        return self._stream.send_checked(data, run_bytes)


def _tag(key: bytes, number: int, header: bytes, payload: bytes) -> bytes:
    tag = blake2b(number.to_bytes(8, "little"), digest_size=_TAG_BYTES, key=key)
    tag.update(header)
    tag.update(payload)
    return tag.digest()


@dataclass(frozen=True, slots=True)
class _Session:
    """The data that both sides of a connection have after the hello: the secret, both nonces, and the digest of the
    server's certificate, which is empty without TLS."""

    secret: bytes
    server_nonce: bytes
    client_nonce: bytes
    certificate: bytes

    def proof(self, role: bytes) -> bytes:
        """Return an HMAC of the role, the protocol version, both nonces and the certificate. Only a process with the
        secret can compute this HMAC."""
        data = b"kvloom peer %d %b:" % (WIRE_VERSION, role)
        return hmac.digest(
            self.secret, data + self.server_nonce + self.client_nonce + self.certificate, "sha256"
        )


def server_handshake(
    channel: Channel,
    secret: bytes,
    admit: Callable[[], Verdict] = lambda: Verdict.ACCEPTED,
    tls: ServerTLS | None = None,
) -> Verdict:
    """Run the server's side of the handshake and return the verdict. If the client has proved that it has the
    secret, `admit` decides the verdict. Otherwise the verdict is WRONG_SECRET. With `tls`, the connection is
    encrypted."""
    nonce = os.urandom(32)
    channel.send_bytes([_HELLO.pack(_HELLO_MAGIC, WIRE_VERSION | (_TLS if tls else 0), nonce)])
    if tls is not None:
        channel.start_tls(tls.context, server_side=True)
    answer = bytes(channel.receive_bytes(64))
    session = _Session(secret, nonce, answer[:32], b"" if tls is None else tls.digest)
    is_good = hmac.compare_digest(answer[32:], session.proof(b"client"))
    verdict = admit() if is_good else Verdict.WRONG_SECRET
    proof = session.proof(b"server %d" % verdict) if is_good else bytes(32)
    channel.send_bytes([bytes([verdict]) + proof])
    channel.set_keys(session.proof(b"answers"), session.proof(b"requests"))
    return verdict


def client_handshake(channel: Channel, secret: bytes) -> None:
    """Run the client's side of the handshake. Raises PeerError with the reason of a refusal."""
    magic, version, theirs = _HELLO.unpack(bytes(channel.receive_bytes(_HELLO.size)))
    if magic != _HELLO_MAGIC:
        raise PeerError("the server is not a kvloom peer")
    if version & ~_TLS != WIRE_VERSION:
        raise PeerError(
            f"the peer uses protocol version {version & ~_TLS}, this process {WIRE_VERSION}: run the same release"
        )
    certificate = channel.start_tls(client_context(), server_side=False) if version & _TLS else b""
    session = _Session(secret, theirs, os.urandom(32), certificate)
    channel.send_bytes([session.client_nonce + session.proof(b"client")])
    answer = bytes(channel.receive_bytes(33))
    verdict = answer[0]
    if verdict == Verdict.WRONG_SECRET:
        raise PeerError(_REFUSALS[Verdict.WRONG_SECRET])
    if not hmac.compare_digest(answer[1:], session.proof(b"server %d" % verdict)):
        raise PeerError("the server does not have the secret")
    if verdict != Verdict.ACCEPTED:
        raise PeerError(_REFUSALS.get(Verdict(verdict), "the peer refused the connection"))
    channel.set_keys(session.proof(b"requests"), session.proof(b"answers"))

"""Serves a host tier to other processes, with one thread per connection. A lease ends with its connection or at a
deadline.

A client on the same host maps the arena and copies pages itself. It copies only during a lease: between `ACQUIRE` and
`RELEASE`, or between `RESERVE` and `COMMIT`. Other clients receive pages on the connection. The writer computes
checksums, and the reader compares them. Nothing is ever unpickled. A stored page is never overwritten. Only its writer
may drop it, unless the page is damaged. This module does not depend on engines.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from kvloom.tiers.host import MAX_TENANTS, HostTier, Lease, SharedMemory
from kvloom.tiers.shares import SHARED_OWNER
from kvloom.tiers.tier import KEY_BYTES, Form, Objects
from kvloom.tiers.transfer import Outcome

from .connections import LeaseBudget, PeerClient, PeerClients
from .nixl_arena import NixlArena
from .protocol import Channel, Message, PeerError, Verb, Verdict, server_handshake
from .secret import MIN_SECRET_BYTES, default_secret
from .tls import make_server_tls
from .unix_socket import UnixListener, listen_loopback, listen_unix, peer_uid

__all__ = ["PeerConfig", "PeerServer", "UseTLS", "objects_from_keys"]

UseTLS = Literal["auto", "on", "off"]

_HASH_BYTES = 16
_MAX_LEASES, _MAX_LEASED = (
    4,
    8192,
)  # leases per connection, and objects per lease; our client has one lease of at most 4096 objects
_MAX_LEASE_BYTES = 64 << 20
_MIN_PAGE, _MIN_RUN = 512, 64  # smaller pages cost more in bookkeeping than in bytes


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """The address of a server and the limits of its clients.

    - `port`: 0 selects a free port.
    - `secret`: empty selects this user's default secret (secret.py), which is allowed only on loopback. A given secret
      needs at least 16 bytes. On loopback, the server also opens a Unix
      socket for clients of this user.
    - `unix_socket`: the path of a second Unix socket, for `allowed_uids`, this user and root.
    - `tls`: whether TCP connections are encrypted. "auto" encrypts unless `host` is loopback.
    - `read_only`: clients cannot store or drop pages.
    - `timeout`: the largest number of seconds for one exchange of messages.
    - `handshake_seconds`, `lease_seconds`: the server closes a connection whose handshake takes longer, or whose
      client holds a lease (the right to read pages in shared memory) longer.
    - `max_handshakes`: the largest number of connections that have not ended their handshake.
    - `max_connections`: the largest number of admitted connections. One user or address may have at most half of them. Above
      the limit, a new connection replaces one that was idle for `idle_seconds`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    secret: bytes = b""
    read_only: bool = False
    max_connections: int = 256
    timeout: float = 30.0
    unix_socket: Path | None = None
    allowed_uids: tuple[int, ...] = ()
    handshake_seconds: float = 5.0
    lease_seconds: float = 60.0
    idle_seconds: float = 60.0
    max_handshakes: int = 64
    tls: UseTLS = "auto"

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_BYTES and not _loopback(self.host):
            raise ValueError(
                f"host={self.host!r} is reachable from other hosts: give a secret of {MIN_SECRET_BYTES} bytes or more "
                f"(this has {len(self.secret)}), or listen on 127.0.0.1"
            )
        if 0 < len(self.secret) < MIN_SECRET_BYTES:
            raise ValueError(
                f"a secret of {len(self.secret)} bytes is too short: use {MIN_SECRET_BYTES} or more"
            )
        if self.tls not in get_args(UseTLS):
            raise ValueError(f"tls={self.tls!r} is none of {', '.join(get_args(UseTLS))}")
        for field in (
            "max_connections",
            "timeout",
            "handshake_seconds",
            "lease_seconds",
            "idle_seconds",
            "max_handshakes",
        ):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}={getattr(self, field)} must be positive")
        if self.allowed_uids and self.unix_socket is None:
            raise ValueError(
                "allowed_uids needs unix_socket: give the path of a socket that these users can reach"
            )

    @property
    def uses_tls(self) -> bool:
        """Whether TCP connections are encrypted."""
        return self.tls == "on" or (self.tls == "auto" and not _loopback(self.host))


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def objects_from_keys(keys: list[bytes], page_bytes: int, run_bytes: int, tenant: str = "") -> Objects:
    """Return a batch of objects from their keys. A key contains the block hash, the group and the fingerprint
    of the form. Raises ValueError if the keys have different groups or forms."""
    tail = keys[0][_HASH_BYTES:] if keys else bytes(KEY_BYTES - _HASH_BYTES)
    if any(key[_HASH_BYTES:] != tail for key in keys):
        raise ValueError("a message contains keys of several groups or forms: send one message per form")
    form = Form("", "", page_bytes, run_bytes)
    form.__dict__["fingerprint"] = tail[4:]  # the fingerprint that the client computed
    group = int.from_bytes(tail[:4], "little")
    objects = Objects([key[:_HASH_BYTES] for key in keys], group, form, tenant)
    objects.__dict__["keys"] = keys  # the keys exist already, so they are not computed
    return objects


class PeerServer:
    """Serves a tier until `close`. Does not close the tier. With `memory`, processes on this host can map the arena
    (the memory of the tier). With `nixl`, NIXL can access the arena. `refused` counts connections that the server
    refused or closed at a deadline.

    Raises OSError if the address is unavailable. Raises ValueError if there is no secret, or if TLS is on but
    unavailable."""

    def __init__(
        self,
        tier: HostTier,
        config: PeerConfig,
        memory: SharedMemory | None = None,
        nixl: NixlArena | None = None,
    ) -> None:
        self._tier, self._config = tier, config
        self._secret = config.secret or default_secret(create=True)
        self._tls = make_server_tls() if config.uses_tls else None
        self._limits, self._guarantees = _LeaseLimits(tier, config), _Guarantees(tier)
        self._about: dict[str, Any] = dict(nixl.about) if nixl is not None else {}
        self._about["lease_bytes"] = self._limits.each
        if memory is not None:
            self._about |= {"path": memory.path, "token": memory.token, "size": memory.size}
        # These references keep both objects alive while clients may use them.
        self._memory, self._nixl = memory, nixl
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self._socket = socket.create_server((config.host, config.port), family=family, backlog=128)
        self._unix_listeners: list[UnixListener] = []
        try:
            if config.unix_socket is not None:
                self._unix_listeners.append(
                    listen_unix(config.unix_socket, 0o666 if config.allowed_uids else 0o600)
                )
        except BaseException:
            self._socket.close()
            raise
        loopback = listen_loopback(config.host, self.address[1])
        if loopback is not None:
            self._unix_listeners.append(loopback)
        self._uids = frozenset((os.geteuid(), 0, *config.allowed_uids))
        self._clients = PeerClients(config.max_handshakes, config.max_connections, config.idle_seconds)
        self._ended = threading.Event()
        self._count = threading.Lock()
        self.refused = 0
        self._start(self._accept, self._socket, False)
        for is_unix in self._unix_listeners:
            self._start(self._accept, is_unix.socket, True)
        self._start(self._end_overdue)

    @staticmethod
    def _start(run: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=run, args=arguments, name="kvloom-peer", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """The host name as configured, and the port. Clients can connect to this address if they resolve the host name
        to this machine."""
        return self._config.host, int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Close every connection. A client that is reading pages gets an error and recomputes them."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for is_unix in self._unix_listeners:
            is_unix.close()
        for client in self._clients.end():
            client.channel.close()
        if self._nixl is not None:
            self._nixl.close()

    def _accept(self, listening: socket.socket, is_unix: bool) -> None:
        while not self._ended.is_set():
            try:
                connected, where = listening.accept()
            except OSError:
                # The listener is closed, or no descriptors are left. Other connections continue.
                self._ended.wait(0.05)
                continue
            try:
                user = peer_uid(connected) if is_unix else -1
                channel = Channel(connected, self._config.timeout)
            except OSError:  # disconnected already
                connected.close()
                continue
            origin = f"user {user}" if is_unix else str(where[0])
            client = PeerClient(channel, origin, time.monotonic() + self._config.handshake_seconds)
            for ended in self._clients.add(client):
                self._refuse(ended)
            try:
                self._start(self._serve, client, is_unix, user)
            except RuntimeError:  # the system has no more threads
                self._clients.remove(client)
                self._refuse(client)

    def _refuse(self, client: PeerClient) -> None:
        with self._count:
            self.refused += 1
        client.channel.close()

    def _end_overdue(self) -> None:
        """Close connections whose handshake or lease has passed its deadline."""
        period = min(1.0, self._config.handshake_seconds / 4, self._config.lease_seconds / 4)
        while not self._ended.wait(period):
            for client in self._clients.overdue():
                self._refuse(client)
                self._clients.remove(client)

    def _admit(self, client: PeerClient, allowed: bool) -> Verdict:
        """Return the verdict on an authenticated connection. Its client has proved that it has the secret, or has used
        a Unix socket. `allowed` is false if the client's user may not connect."""
        if not allowed:
            return Verdict.WRONG_USER
        admitted, idle = self._clients.admit(client)
        for other in idle:
            other.channel.close()
        if not admitted:
            return Verdict.TOO_MANY_CONNECTIONS
        client.deadline = math.inf
        return Verdict.ACCEPTED

    def _serve(self, client: PeerClient, is_unix: bool, user: int) -> None:
        channel = client.channel
        maps = self._nixl is not None or (is_unix and user in (os.geteuid(), 0))
        requests = _RequestHandler(
            self._tier,
            client,
            self._about,
            self._config.read_only,
            self._nixl,
            self._limits,
            self._guarantees,
            maps,
        )
        try:
            allowed = not is_unix or user in self._uids
            # On a Unix socket the kernel identifies the user, so the handshake proves nothing.
            secret, tls = (b"", None) if is_unix else (self._secret, self._tls)
            verdict = server_handshake(channel, secret, lambda: self._admit(client, allowed), tls)
            if verdict != Verdict.ACCEPTED:
                with self._count:
                    self.refused += 1
                return
            while True:
                message = channel.receive(wait=True, max_payload=requests.max_payload)
                client.busy = True
                requests.answer(message)
                client.busy, client.used = bool(requests.leases), time.monotonic()
        except OSError:
            pass  # disconnected
        except (PeerError, ValueError, struct.error) as error:
            with contextlib.suppress(OSError):
                channel.send(Message(Verb.ABOUT, payload=str(error).encode(), status=1))
        finally:
            requests.close()
            channel.close()
            self._clients.remove(client)


class _LeaseLimits:
    """Limits on the bytes of leases. `each` is the limit of one connection. `reading` and `writing` are the limits of
    all connections together.

    Without limits, a client could lease so many pages that all other pages are evicted.
    """

    def __init__(self, tier: HostTier, config: PeerConfig) -> None:
        self.seconds = config.lease_seconds
        self.each = max(tier.slab_bytes, min(_MAX_LEASE_BYTES, tier.capacity // 8))
        self.min_page = min(_MIN_PAGE, tier.slab_bytes)
        self.reading, self.writing = (LeaseBudget(max(tier.capacity // 2, tier.slab_bytes)) for _ in range(2))
        self._key = os.urandom(32)

    def writer(self, token: bytes) -> int:
        """Return the number that identifies a client as a writer, computed from its `token`. Other clients cannot
        guess the number. The number is never 0, because 0 stands for this process."""
        return int.from_bytes(blake2b(token, digest_size=8, key=self._key).digest(), "little") >> 2 | 1


class _Guarantees:
    """Counts the connections that write for each tenant. While a tenant has such a connection, its guaranteed part of
    the tier is protected. When the last one closes, the tenant's pages remain, but can be evicted for other tenants.
    Thread-safe."""

    def __init__(self, tier: HostTier) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._connections = Counter[str]()

    def add(self, tenant: str) -> None:
        with self._lock:
            self._connections[tenant] += 1

    def remove(self, tenants: Iterable[str]) -> None:
        with self._lock:
            for tenant in tenants:
                self._connections[tenant] -= 1
                if not self._connections[tenant]:
                    del self._connections[tenant]
                    self._tier.end_guarantee(tenant)


@dataclass(slots=True)
class _ActiveLease:
    """A lease of one connection. Its `size` bytes count against `budget`. At `deadline`, the server closes the
    connection."""

    lease: Lease
    budget: LeaseBudget
    size: int
    deadline: float


class _RequestHandler:
    """Handles the requests and leases of one connection."""

    def __init__(
        self,
        tier: HostTier,
        client: PeerClient,
        about: dict[str, Any],
        read_only: bool,
        nixl: NixlArena | None,
        limits: _LeaseLimits,
        guarantees: _Guarantees,
        maps: bool,
    ) -> None:
        """`maps` states that the client may access all memory of the tier, through shared memory or NIXL. Such a client
        can read every page without a lease."""
        self._tier, self._client, self._channel, self._published = tier, client, client.channel, about
        self._read_only, self._nixl, self._limits, self._maps = read_only, nixl, limits, maps
        self._guarantees, self._tenants = guarantees, set[str]()
        self._writer = limits.writer(os.urandom(16))
        self.leases: dict[int, _ActiveLease] = {}
        self._next = 1
        self._verbs: dict[Verb, Callable[[Message], None]] = {
            Verb.ABOUT: self._about,
            Verb.LOOKUP: self._lookup,
            Verb.ACQUIRE: self._hold,
            Verb.RELEASE: self._release,
            Verb.RESERVE: self._reserve,
            Verb.COMMIT: self._commit,
            Verb.READ: self._read,
            Verb.WRITE: self._write,
            Verb.DROP: self._drop,
            Verb.USAGE: self._usage,
        }

    def answer(self, message: Message) -> None:
        self._verbs[message.verb](message)

    def close(self) -> None:
        """Release all leases and guaranteed parts of the connection. Reserved pages that were not committed are
        freed. Pages that were leased for reading can be evicted again."""
        for number in list(self.leases):
            self._remove_lease(number).release(written=False)
        self._guarantees.remove(self._tenants)

    def max_payload(self, verb: Verb, count: int) -> int:
        """Return the largest allowed payload of a request, in bytes. A payload contains keys, the checksums of a
        lease, the token of a client, or ids of tenants."""
        if verb == Verb.COMMIT:
            return max((active.lease.checksum_bytes for active in self.leases.values()), default=0)
        ids = min(count, MAX_TENANTS) * len(SHARED_OWNER)
        fixed = {Verb.ABOUT: _HASH_BYTES, Verb.USAGE: ids, Verb.RELEASE: 0}
        share = len(SHARED_OWNER) if verb in (Verb.RESERVE, Verb.WRITE) else 0
        return fixed.get(verb, count * KEY_BYTES + share)

    def _split_share(self, message: Message) -> str:
        """Remove the tenant's id from the payload of a RESERVE or WRITE message, and apply the share in the
        message. Return the name under which the tier counts the tenant. The name is empty if the message has no
        share, if the server is read-only, or if too many tenants have a share."""
        end = message.count * KEY_BYTES
        if len(message.payload) != end + len(SHARED_OWNER):
            return ""
        message.payload, tenant = message.payload[:end], message.payload[end:].hex()
        if self._read_only or (tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS):
            return ""
        if tenant not in self._tenants:
            self._tenants.add(tenant)
            self._guarantees.add(tenant)
        return tenant if self._tier.set_account(tenant, message.a, message.b) else ""

    @staticmethod
    def _keys(message: Message) -> list[bytes]:
        if len(message.payload) != message.count * KEY_BYTES:
            raise ValueError(
                f"a payload of {len(message.payload)} bytes is not {message.count} keys of {KEY_BYTES} bytes"
            )
        data = message.payload
        return [data[at : at + KEY_BYTES] for at in range(0, message.count * KEY_BYTES, KEY_BYTES)]

    def _objects(self, message: Message) -> Objects:
        """Return the objects whose keys are in the payload."""
        return objects_from_keys(self._keys(message), message.page_bytes, message.run_bytes)

    def _make_lease(
        self, message: Message, budget: LeaseBudget, take: Callable[[Objects], Lease]
    ) -> tuple[int, Lease, list[int]]:
        """Lease as many objects as the limits allow, from the first on. `take` makes the lease. Return the number of
        the lease, the lease, and one BUSY result for each remaining object."""
        objects = message.count + sum(len(active.lease.offsets) for active in self.leases.values())
        if objects > _MAX_LEASED:
            raise ValueError(
                f"{objects} objects in leases of one connection exceed the limit of {_MAX_LEASED}: release some"
            )
        if len(self.leases) >= _MAX_LEASES:
            raise ValueError(
                f"the connection has {len(self.leases)} leases, the limit is {_MAX_LEASES}: release some"
            )
        tenant = self._split_share(message) if message.verb in (Verb.RESERVE, Verb.WRITE) else ""
        keys, size = self._keys(message), message.page_bytes
        every = objects_from_keys(keys, size, message.run_bytes, tenant)
        if size > self._tier.slab_bytes:
            raise ValueError(f"a page of {size} bytes does not fit a slab of {self._tier.slab_bytes} bytes")
        free = self._limits.each - sum(active.size for active in self.leases.values())
        count = budget.take(size, min(len(keys), max(0, free) // size))
        try:
            lease = take(
                every
                if count == len(keys)
                else objects_from_keys(keys[:count], size, message.run_bytes, tenant)
            )
        except BaseException:
            budget.release(count * size)
            raise
        active = int((lease.offsets >= 0).sum())
        budget.release((count - active) * size)  # missing objects are not leased
        number, self._next = self._next, self._next + 1
        self.leases[number] = _ActiveLease(
            lease, budget, active * size, time.monotonic() + self._limits.seconds
        )
        self._set_deadline()
        if self._nixl is not None:
            self._nixl.change_leases(1)
        return number, lease, [Outcome.BUSY] * (len(keys) - count)

    def _remove_lease(self, number: int) -> Lease:
        """Remove a lease from the connection and return it."""
        active = self.leases.pop(number, None)
        if active is None:
            raise ValueError(f"lease {number} does not exist")
        active.budget.release(active.size)
        self._set_deadline()
        if self._nixl is not None:
            self._nixl.change_leases(-1)
        return active.lease

    def _set_deadline(self) -> None:
        self._client.deadline = min((active.deadline for active in self.leases.values()), default=math.inf)

    def _about(self, message: Message) -> None:
        if len(message.payload) == _HASH_BYTES:
            self._writer = self._limits.writer(message.payload)
        slab = self._tier.slab_bytes
        self._channel.send(
            Message(Verb.ABOUT, a=slab, b=self._tier.capacity, payload=json.dumps(self._published).encode())
        )

    def _lookup(self, message: Message) -> None:
        found = self._tier.lookup(self._objects(message))
        self._channel.send(Message(Verb.LOOKUP, message.count, payload=found.tobytes()))

    def _hold(self, message: Message) -> None:
        number, lease, busy = self._make_lease(message, self._limits.reading, self._tier.acquire)
        payload = _results(lease, busy) + _offsets(lease, busy) + b"".join(lease.page_checksums())
        self._channel.send(Message(Verb.ACQUIRE, message.count, a=number, payload=payload))

    def _release(self, message: Message) -> None:
        if message.a in self.leases:
            self._remove_lease(message.a).release(written=False)

    def _reserve_pages(self, objects: Objects) -> Lease:
        """Reserve pages for a client. If the server is read-only, the lease has no pages."""
        form = objects.form
        if self._read_only:
            none = np.full(len(objects), -1, np.int64)
            return Lease(self._tier, objects, none, none, np.full(len(objects), Outcome.FULL, np.uint8))
        if form.page_bytes < self._limits.min_page or (form.runs > 1 and form.run_bytes < _MIN_RUN):
            raise ValueError(
                f"pages of {form.page_bytes} bytes in runs of {form.run_bytes} are too small for a peer: "
                f"the minimum is {self._limits.min_page} and {_MIN_RUN}"
            )
        return self._tier.reserve(objects, self._writer)

    def _reserve(self, message: Message) -> None:
        number, lease, busy = self._make_lease(message, self._limits.writing, self._reserve_pages)
        if (
            not self._maps
        ):  # otherwise a client could reserve a page, write nothing, and read the bytes of an evicted page
            for at, stop in _merge_neighbours(lease.offsets[lease.offsets >= 0].tolist(), message.page_bytes):
                self._tier.arena[at:stop] = 0
        payload = _results(lease, busy) + _offsets(lease, busy)
        self._channel.send(Message(Verb.RESERVE, message.count, a=number, payload=payload))

    def _commit(self, message: Message) -> None:
        lease = self._remove_lease(message.a)
        written = bool(message.b)
        try:
            if written:
                lease.set_checksums(message.payload)
        except ValueError:
            written = False
            raise
        finally:
            lease.release(written)
        self._channel.send(Message(Verb.COMMIT))

    def _read(self, message: Message) -> None:
        if not 0 <= message.a < message.b <= message.page_bytes:
            raise ValueError(
                f"part {message.a} to {message.b} is not inside a page of {message.page_bytes} bytes"
            )
        number, lease, busy = self._make_lease(message, self._limits.reading, self._tier.acquire)
        try:
            payload = _results(lease, busy) + b"".join(lease.page_checksums())
            pieces = [
                self._tier.arena[at + message.a : at + message.b].data
                for at in lease.offsets.tolist()
                if at >= 0
            ]
            self._channel.begin(len(pieces) * (message.b - message.a))
            self._channel.send(Message(Verb.READ, message.count, payload=payload), pieces)
        finally:
            self._remove_lease(number).release(written=False)

    def _write(self, message: Message) -> None:
        """Reply with one result per page, then receive the pages with the result PENDING. The checksums follow
        after the pages, so the client can compute them during the transfer."""
        size = message.page_bytes
        number, lease, busy = self._make_lease(message, self._limits.writing, self._reserve_pages)
        written = False
        try:
            self._channel.send(Message(Verb.WRITE, message.count, payload=_results(lease, busy)))
            offsets = lease.offsets[lease.offsets >= 0].tolist()
            if not offsets:
                return
            for at, stop in _merge_neighbours(offsets, size):
                self._channel.begin(stop - at)
                self._channel.receive_into(self._tier.arena[at:stop].data)
            checks = self._channel.receive(max_payload=lambda verb, count: lease.checksum_bytes)
            if checks.verb != Verb.WRITE:
                raise ValueError(f"received {checks.verb.name} instead of the pages' checksums")
            lease.set_checksums(checks.payload)
            written = True
        finally:
            self._remove_lease(number).release(written)
        self._channel.send(Message(Verb.WRITE))

    def _drop(self, message: Message) -> None:
        """Drop pages that this client wrote, and damaged pages of any client."""
        dropped, objects = 0, self._objects(message)
        if not self._read_only:
            dropped = self._tier.drop(objects, self._writer)
            dropped += self._tier.drop_damaged(objects.keys, self._limits.each)
        self._channel.send(Message(Verb.DROP, a=dropped))

    def _usage(self, message: Message) -> None:
        stats, size = self._tier.stats(), len(SHARED_OWNER)
        used = []
        for at in range(0, len(message.payload), size):
            owner = message.payload[at : at + size]
            common = owner == SHARED_OWNER
            used.append(self._tier.used_by("") if common else stats.tenants.get(owner.hex(), 0))
        payload = struct.pack(f"<{3 + len(used)}Q", stats.objects, stats.bytes, stats.evicted, *used)
        self._channel.send(Message(Verb.USAGE, payload=payload))


def _results(lease: Lease, busy: list[int]) -> bytes:
    return lease.results.tobytes() + bytes(busy)


def _offsets(lease: Lease, busy: list[int]) -> bytes:
    return lease.offsets.tobytes() + np.full(len(busy), -1, np.int64).tobytes()


def _merge_neighbours(offsets: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Return the byte ranges of pages of `size` bytes, in order. Adjacent pages become one range."""
    spans: list[tuple[int, int]] = []
    for at in offsets:
        if spans and spans[-1][1] == at:
            spans[-1] = (spans[-1][0], at + size)
        else:
            spans.append((at, at + size))
    return spans

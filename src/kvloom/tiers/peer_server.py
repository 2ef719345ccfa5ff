"""Serves a host tier to other processes: a thread for every connection, and leases that end with it, or after a deadline.

On one host a peer maps the arena and copies by itself, between `HOLD` and `RELEASE` (or `RESERVE` and `COMMIT`); elsewhere
pages travel on the connection. Checksums are made where a page is written and compared where it is read. Nothing here is
ever unpickled. A stored page is never overwritten, and only its writer drops it. Knows no engines and no names beyond their bytes.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np

from .host import HostTier
from .lease import Lease
from .peer_guests import Budget, Guest, Guests
from .peer_local import LocalListener, listen_local, listen_near, user_of
from .peer_nixl import NixlArena
from .secret import LEAST_SECRET, default_secret
from .shared import SharedMemory
from .tier import KEY_BYTES, Form, Objects
from .transfer import Outcome
from .wire import Channel, Message, PeerError, Verb, Verdict, welcome

__all__ = ["PeerConfig", "PeerServer", "keyed"]

_NAME_BYTES = 16
_MOST_LEASES, _MOST_LEASED = (
    4,
    8192,
)  # of one connection, and their objects; a client has one lease of 4096 at most
_MOST_LEASE_BYTES = 64 << 20
_LEAST_PAGE, _LEAST_RUN = 512, 64  # smaller ones cost more bookkeeping than bytes


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """Where to listen, and what clients may use.

    `port` 0 is any free one. An empty `secret` is this user's own (secret.py), on loopback alone; beyond it give one of 16 bytes or
    more. On loopback clients of this user connect by a Unix socket, too. `local` is another path of such a socket; `users` may use it
    beside this user and root. `read_only`: clients read and change nothing.

    A hello has `handshake_seconds`, a lease `lease_seconds`; then the connection ends. Of `connections` half may come from one user or
    address; beyond that one that was idle for `idle_seconds` ends for a new one.
    """

    host: str = "127.0.0.1"
    port: int = 0
    secret: bytes = b""
    read_only: bool = False
    connections: int = 256
    timeout: float = 30.0
    local: Path | None = None
    users: tuple[int, ...] = ()
    handshake_seconds: float = 5.0
    lease_seconds: float = 60.0
    idle_seconds: float = 60.0
    pending: int = 64

    def __post_init__(self) -> None:
        if len(self.secret) < LEAST_SECRET and not _loopback(self.host):
            raise ValueError(
                f"host={self.host!r} can be reached from elsewhere: give a secret of {LEAST_SECRET} bytes or more "
                f"(this has {len(self.secret)}), or listen on 127.0.0.1"
            )
        if 0 < len(self.secret) < LEAST_SECRET:
            raise ValueError(
                f"a secret of {len(self.secret)} bytes is too short: give {LEAST_SECRET} or more"
            )
        for field in (
            "connections",
            "timeout",
            "handshake_seconds",
            "lease_seconds",
            "idle_seconds",
            "pending",
        ):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}={getattr(self, field)} must be positive")
        if self.users and self.local is None:
            raise ValueError("other users need a socket that they can reach: give its path, too")


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def keyed(keys: list[bytes], page_bytes: int, run_bytes: int) -> Objects:
    """Objects of which only the keys are known. A ValueError for keys of several groups or forms."""
    tail = keys[0][_NAME_BYTES:] if keys else bytes(KEY_BYTES - _NAME_BYTES)
    if any(key[_NAME_BYTES:] != tail for key in keys):
        raise ValueError("keys of several groups or forms in one message")
    form = Form("", "", page_bytes, run_bytes)
    form.__dict__["fingerprint"] = tail[4:]  # as its owner made it
    group = int.from_bytes(tail[:4], "little")
    objects = Objects([key[:_NAME_BYTES] for key in keys], group, form)
    objects.__dict__["keys"] = keys  # known, too
    return objects


class PeerServer:
    """Runs until `close`. The tier stays its owner's; OSError where the address cannot be had, ValueError where there is no secret.
    `memory` is its arena if others on this host may map it, `nixl` if NIXL may reach it."""

    def __init__(
        self,
        tier: HostTier,
        config: PeerConfig,
        memory: SharedMemory | None = None,
        nixl: NixlArena | None = None,
    ) -> None:
        self._tier, self._config = tier, config
        self._secret = config.secret or default_secret(create=True)
        self._lends = _Lends(tier, config)
        self._about: dict[str, Any] = dict(nixl.about) if nixl is not None else {}
        self._about["lease_bytes"] = self._lends.each
        if memory is not None:
            self._about |= {"path": memory.path, "token": memory.token, "size": memory.size}
        self._memory, self._nixl = memory, nixl  # while guests may use them
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self._socket = socket.create_server((config.host, config.port), family=family, backlog=128)
        self._locals: list[LocalListener] = []
        try:
            if config.local is not None:
                self._locals.append(listen_local(config.local, 0o666 if config.users else 0o600))
        except BaseException:
            self._socket.close()
            raise
        near = listen_near(config.host, self.address[1])
        if near is not None:
            self._locals.append(near)
        self._users = frozenset((os.geteuid(), 0, *config.users))
        self._guests = Guests(config.pending, config.connections, config.idle_seconds)
        self._ended = threading.Event()
        self._count = threading.Lock()
        self.refused = 0
        self._start(self._accept, self._socket, False)
        for local in self._locals:
            self._start(self._accept, local.socket, True)
        self._start(self._end_overdue)

    @staticmethod
    def _start(run: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=run, args=arguments, name="kvloom-peer", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Ends every connection; who reads from the arena gets an error and computes again."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for local in self._locals:
            local.close()
        for guest in self._guests.end():
            guest.channel.close()
        if self._nixl is not None:
            self._nixl.close()

    def _accept(self, listening: socket.socket, local: bool) -> None:
        while not self._ended.is_set():
            try:
                connected, where = listening.accept()
            except OSError:
                # Closed; or out of descriptors, say: then the others go on.
                self._ended.wait(0.05)
                continue
            try:
                user = user_of(connected) if local else -1
                channel = Channel(connected, self._config.timeout)
            except OSError:  # it has gone already
                connected.close()
                continue
            origin = f"user {user}" if local else str(where[0])
            guest = Guest(channel, origin, time.monotonic() + self._config.handshake_seconds)
            for ended in self._guests.arrive(guest):
                self._refuse(ended)
            try:
                self._start(self._serve, guest, local, user)
            except RuntimeError:  # the system gives no more threads
                self._guests.leave(guest)
                self._refuse(guest)

    def _refuse(self, guest: Guest) -> None:
        with self._count:
            self.refused += 1
        guest.channel.close()

    def _end_overdue(self) -> None:
        """Ends connections whose hello or lease takes too long."""
        period = min(1.0, self._config.handshake_seconds / 4, self._config.lease_seconds / 4)
        while not self._ended.wait(period):
            for guest in self._guests.overdue():
                self._refuse(guest)
                self._guests.leave(guest)

    def _admit(self, guest: Guest, allowed: bool) -> Verdict:
        """What becomes of a connection that has the secret, or came by a Unix socket."""
        if not allowed:
            return Verdict.WRONG_USER
        admitted, idle = self._guests.admit(guest)
        for other in idle:
            other.channel.close()
        if not admitted:
            return Verdict.TOO_MANY
        guest.deadline = math.inf
        return Verdict.WELCOME

    def _serve(self, guest: Guest, local: bool, user: int) -> None:
        channel = guest.channel
        maps = self._nixl is not None or (local and user in (os.geteuid(), 0))
        requests = _Requests(
            self._tier, guest, self._about, self._config.read_only, self._nixl, self._lends, maps
        )
        try:
            allowed = not local or user in self._users
            # By a Unix socket the system says who it is: there the hello proves nothing.
            if (
                welcome(channel, b"" if local else self._secret, lambda: self._admit(guest, allowed))
                != Verdict.WELCOME
            ):
                with self._count:
                    self.refused += 1
                return
            while True:
                message = channel.receive(patient=True, most=requests.most_payload)
                guest.busy = True
                requests.answer(message)
                guest.busy, guest.used = bool(requests.leases), time.monotonic()
        except OSError:
            pass  # it has gone
        except (PeerError, ValueError, struct.error) as error:
            with contextlib.suppress(OSError):
                channel.send(Message(Verb.ABOUT, payload=str(error).encode(), status=1))
        finally:
            requests.leave()
            channel.close()
            self._guests.leave(guest)


class _Lends:
    """What connections may borrow of a tier: each of them, and all together for reading and for writing. So neither pages that are
    held nor places that are never filled push out all others."""

    def __init__(self, tier: HostTier, config: PeerConfig) -> None:
        self.seconds = config.lease_seconds
        self.each = max(tier.slab_bytes, min(_MOST_LEASE_BYTES, tier.capacity // 8))
        self.least_page = min(_LEAST_PAGE, tier.slab_bytes)
        self.held, self.reserved = (Budget(max(tier.capacity // 2, tier.slab_bytes)) for _ in range(2))
        self._key = os.urandom(32)

    def writer(self, token: bytes) -> int:
        """The number of a client, which others cannot guess; never 0."""
        return int.from_bytes(blake2b(token, digest_size=8, key=self._key).digest(), "little") >> 2 | 1


@dataclass(slots=True)
class _Lent:
    """A lease of a connection: its bytes, of which budget, and when it ends at the latest."""

    lease: Lease
    budget: Budget
    size: int
    deadline: float


class _Requests:
    """One connection's requests and leases."""

    def __init__(
        self,
        tier: HostTier,
        guest: Guest,
        about: dict[str, Any],
        read_only: bool,
        nixl: NixlArena | None,
        lends: _Lends,
        maps: bool,
    ) -> None:
        """`maps`: this client may read all of the arena anyway."""
        self._tier, self._guest, self._channel, self._where = tier, guest, guest.channel, about
        self._read_only, self._nixl, self._lends, self._maps = read_only, nixl, lends, maps
        self._writer = lends.writer(os.urandom(16))
        self.leases: dict[int, _Lent] = {}
        self._next = 1
        self._verbs: dict[Verb, Callable[[Message], None]] = {
            Verb.ABOUT: self._about,
            Verb.LOOKUP: self._lookup,
            Verb.HOLD: self._hold,
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

    def leave(self) -> None:
        """What it was about to write is not there; what it read may leave."""
        for number in list(self.leases):
            self._taken(number).release(written=False)

    def most_payload(self, verb: Verb, count: int) -> int:
        """The largest payload of a request: keys, checksums of a lease, or the token of a client."""
        if verb == Verb.COMMIT:
            return max((lent.lease.check_bytes for lent in self.leases.values()), default=0)
        return {Verb.ABOUT: _NAME_BYTES, Verb.USAGE: 0, Verb.RELEASE: 0}.get(verb, count * KEY_BYTES)

    @staticmethod
    def _keys(message: Message) -> list[bytes]:
        if len(message.payload) != message.count * KEY_BYTES:
            raise ValueError(f"{len(message.payload)} bytes are not {message.count} keys of {KEY_BYTES}")
        data = message.payload
        return [data[at : at + KEY_BYTES] for at in range(0, message.count * KEY_BYTES, KEY_BYTES)]

    def _objects(self, message: Message) -> Objects:
        """The objects whose keys are the payload."""
        return keyed(self._keys(message), message.page_bytes, message.run_bytes)

    def _lend(
        self, message: Message, budget: Budget, take: Callable[[Objects], Lease]
    ) -> tuple[int, Lease, list[int]]:
        """A lease of as many objects as the limits allow: its number, the lease, results of the others (BUSY)."""
        objects = message.count + sum(len(lent.lease.offsets) for lent in self.leases.values())
        if objects > _MOST_LEASED:
            raise ValueError(f"{objects} objects in leases of one connection: the limit is {_MOST_LEASED}")
        if len(self.leases) >= _MOST_LEASES:
            raise ValueError(
                f"{len(self.leases)} leases of one connection: release some, the limit is {_MOST_LEASES}"
            )
        keys, size = self._keys(message), message.page_bytes
        every = keyed(keys, size, message.run_bytes)
        if size > self._tier.slab_bytes:
            raise ValueError(f"a page of {size} bytes does not fit a slab of {self._tier.slab_bytes}")
        left = self._lends.each - sum(lent.size for lent in self.leases.values())
        count = budget.take(size, min(len(keys), max(0, left) // size))
        try:
            lease = take(every if count == len(keys) else keyed(keys[:count], size, message.run_bytes))
        except BaseException:
            budget.give(count * size)
            raise
        lent = int((lease.offsets >= 0).sum())
        budget.give((count - lent) * size)  # what is not there is not borrowed
        number, self._next = self._next, self._next + 1
        self.leases[number] = _Lent(lease, budget, lent * size, time.monotonic() + self._lends.seconds)
        self._set_deadline()
        if self._nixl is not None:
            self._nixl.count(1)
        return number, lease, [Outcome.BUSY] * (len(keys) - count)

    def _taken(self, number: int) -> Lease:
        """A lease, no longer kept."""
        lent = self.leases.pop(number, None)
        if lent is None:
            raise ValueError(f"there is no lease {number}")
        lent.budget.give(lent.size)
        self._set_deadline()
        if self._nixl is not None:
            self._nixl.count(-1)
        return lent.lease

    def _set_deadline(self) -> None:
        self._guest.deadline = min((lent.deadline for lent in self.leases.values()), default=math.inf)

    def _about(self, message: Message) -> None:
        if len(message.payload) == _NAME_BYTES:
            self._writer = self._lends.writer(message.payload)
        slab = self._tier.slab_bytes
        self._channel.send(
            Message(Verb.ABOUT, a=slab, b=self._tier.capacity, payload=json.dumps(self._where).encode())
        )

    def _lookup(self, message: Message) -> None:
        found = self._tier.lookup(self._objects(message))
        self._channel.send(Message(Verb.LOOKUP, message.count, payload=found.tobytes()))

    def _hold(self, message: Message) -> None:
        number, lease, busy = self._lend(message, self._lends.held, self._tier.hold)
        payload = _results(lease, busy) + _offsets(lease, busy) + b"".join(lease.checks())
        self._channel.send(Message(Verb.HOLD, message.count, a=number, payload=payload))

    def _release(self, message: Message) -> None:
        if message.a in self.leases:
            self._taken(message.a).release(written=False)

    def _places(self, objects: Objects) -> Lease:
        """Places for a guest's pages; none where it may only read."""
        form = objects.form
        if self._read_only:
            none = np.full(len(objects), -1, np.int64)
            return Lease(self._tier, objects, none, none, np.full(len(objects), Outcome.FULL, np.uint8))
        if form.page_bytes < self._lends.least_page or (form.runs > 1 and form.run_bytes < _LEAST_RUN):
            raise ValueError(
                f"pages of {form.page_bytes} bytes in runs of {form.run_bytes} are too small to be stored by a peer: "
                f"the limits are {self._lends.least_page} and {_LEAST_RUN}"
            )
        return self._tier.reserve(objects, self._writer)

    def _reserve(self, message: Message) -> None:
        number, lease, busy = self._lend(message, self._lends.reserved, self._places)
        if not self._maps:  # else a client that writes nothing would read what an evicted page left there
            for at, stop in _joined(lease.offsets[lease.offsets >= 0].tolist(), message.page_bytes):
                self._tier.arena[at:stop] = 0
        payload = _results(lease, busy) + _offsets(lease, busy)
        self._channel.send(Message(Verb.RESERVE, message.count, a=number, payload=payload))

    def _commit(self, message: Message) -> None:
        lease = self._taken(message.a)
        written = bool(message.b)
        try:
            if written:
                lease.keep_checks(message.payload)
        except ValueError:
            written = False
            raise
        finally:
            lease.release(written)
        self._channel.send(Message(Verb.COMMIT))

    def _read(self, message: Message) -> None:
        if not 0 <= message.a < message.b <= message.page_bytes:
            raise ValueError(f"part {message.a} to {message.b} of a page of {message.page_bytes}")
        number, lease, busy = self._lend(message, self._lends.held, self._tier.hold)
        try:
            payload = _results(lease, busy) + b"".join(lease.checks())
            pieces = [
                self._tier.arena[at + message.a : at + message.b].data
                for at in lease.offsets.tolist()
                if at >= 0
            ]
            self._channel.begin(len(pieces) * (message.b - message.a))
            self._channel.send(Message(Verb.READ, message.count, payload=payload), pieces)
        finally:
            self._taken(number).release(written=False)

    def _write(self, message: Message) -> None:
        """Says which pages are wanted, and takes those: a page is long, a question short. Their checksums come last, so that
        they are made while pages travel."""
        size = message.page_bytes
        number, lease, busy = self._lend(message, self._lends.reserved, self._places)
        written = False
        try:
            self._channel.send(Message(Verb.WRITE, message.count, payload=_results(lease, busy)))
            places = lease.offsets[lease.offsets >= 0].tolist()
            if not places:
                return
            for at, stop in _joined(places, size):
                self._channel.begin(stop - at)
                self._channel.fill(self._tier.arena[at:stop].data)
            checks = self._channel.receive(most=lambda verb, count: lease.check_bytes)
            if checks.verb != Verb.WRITE:
                raise ValueError(f"{checks.verb.name} came in place of the pages' checksums")
            lease.keep_checks(checks.payload)
            written = True
        finally:
            self._taken(number).release(written)
        self._channel.send(Message(Verb.WRITE))

    def _drop(self, message: Message) -> None:
        """Drops what this client wrote, and what is damaged, whoever wrote it."""
        dropped, objects = 0, self._objects(message)
        if not self._read_only:
            dropped = self._tier.drop(objects, self._writer)
            dropped += self._tier.drop_damaged(objects.keys, self._lends.each)
        self._channel.send(Message(Verb.DROP, a=dropped))

    def _usage(self, message: Message) -> None:
        stats = self._tier.stats()
        payload = struct.pack("<QQQ", stats.objects, stats.bytes, stats.evicted)
        self._channel.send(Message(Verb.USAGE, payload=payload))


def _results(lease: Lease, busy: list[int]) -> bytes:
    return lease.results.tobytes() + bytes(busy)


def _offsets(lease: Lease, busy: list[int]) -> bytes:
    return lease.offsets.tobytes() + np.full(len(busy), -1, np.int64).tobytes()


def _joined(offsets: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Where pages of `size` bytes lie, in that order, neighbours as one."""
    spans: list[tuple[int, int]] = []
    for at in offsets:
        if spans and spans[-1][1] == at:
            spans[-1] = (spans[-1][0], at + size)
        else:
            spans.append((at, at + size))
    return spans

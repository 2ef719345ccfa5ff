"""Another process's host memory as a tier: `peer://host:port`, `peer:///path/of/socket`. Its pages are read where they lie.

    shared       same host: hold -> copy from the shared arena -> compare checksums -> release     no byte on a socket
    nixl         hold -> NIXL brings them (RDMA where there is any) -> compare checksums -> release
    connection   read -> bytes on the connection, straight into the caller's memory -> compare checksums

The other side is a `PeerServer`. Knows no stores.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, cast, get_args
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from .checks import checksums, copy_checked
from .codec import Head, unseal
from .options import Options
from .peer_local import LocalAddress, connect_local, connect_near
from .peer_nixl import NixlReach
from .remote import Connection, Job, Link, RemoteConfig, RemoteTier, StoreError, Usage
from .secret import default_secret, read_secret
from .shared import map_shared
from .tier import TierError
from .transfer import Outcome
from .wire import MOST_OBJECTS, Channel, Message, Verb, greet
from .workers import Tools

__all__ = ["By", "PeerConnection", "open_peer", "opener"]

_BATCH_BYTES = 32 << 20  # between two batches a connection waits for an answer: the fewer, the faster
_LOST: list[Channel] = []  # connections that are kept for what they have reserved
Address = tuple[str, int] | LocalAddress
By = Literal["auto", "shared", "nixl", "connection"]


class PeerConnection(Connection):
    """One connection to a PeerServer. `by="auto"` is shared memory where it can be reached, else the connection.

    An empty `secret` is this user's own; then a server of this user on loopback is reached by its Unix socket, without a secret.
    Connections with the same `token` may drop each other's pages."""

    def __init__(
        self, address: Address, secret: bytes, timeout: float, by: By = "auto", token: bytes = b""
    ) -> None:
        connected, proves = _connect(address, secret, timeout, by)
        self._channel = Channel(connected, timeout)
        try:
            greet(self._channel, (secret or default_secret()) if proves else b"")
            about = self._ask(Message(Verb.ABOUT, payload=token))
            self.slab_bytes, self.capacity = about.a, about.b
            self.arena: npt.NDArray[np.uint8] | None = None
            self.nixl: NixlReach | None = None
            where = json.loads(about.payload or b"{}")
            self.lease_bytes = max(1, int(where["lease_bytes"]))
            if by in ("auto", "shared") and "path" in where:
                self.arena = map_shared(str(where["path"]), str(where["token"]), int(where["size"]))
            if by == "shared" and self.arena is None:
                raise StoreError(
                    "the peer's memory cannot be mapped from here: another host, user or container"
                )
            if by == "nixl":
                if "nixl" not in where:
                    raise StoreError("the peer does not offer NIXL: start it with --nixl")
                self.nixl = NixlReach(where, timeout)
        except BaseException:
            self._channel.close()
            raise

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for at in range(0, len(keys), MOST_OBJECTS):
            some = keys[at : at + MOST_OBJECTS]
            answer = self._ask(_about(Verb.LOOKUP, some))
            found += np.frombuffer(answer.payload, np.bool_, len(some)).tolist()
        return found

    def remove(self, keys: Sequence[bytes]) -> int:
        parts = [keys[at : at + MOST_OBJECTS] for at in range(0, len(keys), MOST_OBJECTS)]
        return sum(self._ask(_about(Verb.DROP, part)).a for part in parts)

    def usage(self) -> Usage:
        return Usage(*struct.unpack("<QQQ", self._ask(Message(Verb.USAGE)).payload))

    def close(self) -> None:
        if self._channel not in _LOST:
            self._channel.close()
        if self.nixl is not None:
            self.nixl.close()

    def _ask(self, message: Message) -> Message:
        self._channel.begin()
        self._channel.send(message)
        return self._channel.receive()

    # --- pages

    def read(self, job: Job, tools: Tools) -> dict[int, Outcome]:
        if self.nixl is not None:
            return self._read_nixl(job, tools, self.nixl)
        return self._read_shared(job, self.arena) if self.arena is not None else self._read(job)

    def write(self, job: Job) -> dict[int, Outcome]:
        if self.nixl is not None:
            return self._write_nixl(job, self.nixl)
        return self._write_shared(job, self.arena) if self.arena is not None else self._write(job)

    def _lease(self, verb: Verb, job: Job) -> tuple[Message, list[int], list[int], _Checks]:
        """HOLD or RESERVE: the answer, with results, offsets and checksums."""
        form, count = job.objects.form, len(job.which)
        answer = self._ask(_about(verb, job.keys(), form.page_bytes, form.run_bytes))
        results = np.frombuffer(answer.payload, np.uint8, count).tolist()
        offsets = np.frombuffer(answer.payload, np.int64, count, count).tolist()
        return answer, results, offsets, _Checks(answer.payload, 9 * count, form.runs)

    def _read_nixl(self, job: Job, tools: Tools, nixl: NixlReach) -> dict[int, Outcome]:
        form, (start, stop) = job.objects.form, job.part
        answer, results, offsets, checks = self._lease(Verb.HOLD, job)
        outcomes = {index: Outcome(result) for index, result in zip(job.which, results, strict=True)}
        found = [number for number, result in enumerate(results) if result == Outcome.OK]
        step = nixl.room(form.page_bytes)
        for at in range(0, len(found), step):
            some = found[at : at + step]
            nixl.move("READ", [offsets[number] for number in some], form.page_bytes, start, stop)
            for place, number in enumerate(some):
                index = job.which[number]
                head = Head(job.objects.keys[index], 0, form.run_bytes, checks.next())
                came = nixl.page(place, form.page_bytes)[start:stop]
                first = start // form.run_bytes
                outcomes[index] = unseal(head, came, first, job.target(index), tools.codec)
        self._channel.send(Message(Verb.RELEASE, a=answer.a))
        return outcomes

    def _write_nixl(self, job: Job, nixl: NixlReach) -> dict[int, Outcome]:
        form = job.objects.form
        answer, results, offsets, _ = self._lease(Verb.RESERVE, job)
        outcomes = {index: Outcome(result) for index, result in zip(job.which, results, strict=True)}
        fresh = [number for number, result in enumerate(results) if result == Outcome.PENDING]
        checks = []
        step = nixl.room(form.page_bytes)
        for at in range(0, len(fresh), step):
            some = fresh[at : at + step]
            for place, number in enumerate(some):
                source = job.target(job.which[number])
                nixl.page(place, form.page_bytes)[:] = source
                checks.append(checksums(source, form.run_bytes))
                outcomes[job.which[number]] = Outcome.OK
            try:
                nixl.move("WRITE", [offsets[number] for number in some], form.page_bytes, 0, form.page_bytes)
            except TimeoutError:
                # It may still arrive: as long as the connection stays, those places are nobody else's.
                _LOST.append(self._channel)
                raise
        self._ask(Message(Verb.COMMIT, a=answer.a, b=1, payload=b"".join(checks)))
        return outcomes

    def _read_shared(self, job: Job, arena: npt.NDArray[np.uint8]) -> dict[int, Outcome]:
        form, (start, stop) = job.objects.form, job.part
        answer, results, offsets, checks = self._lease(Verb.HOLD, job)
        last, view = len(arena) - form.page_bytes, arena.data
        outcomes = {}
        for index, result, offset in zip(job.which, results, offsets, strict=True):
            outcome = Outcome(result)
            if outcome == Outcome.OK:
                wanted = checks.next(job.part, form.run_bytes)
                page = view[offset + start : offset + stop] if 0 <= offset <= last else None
                good = page is not None and wanted == copy_checked(
                    job.target(index), page, form.run_bytes, arrived=True
                )
                outcome = Outcome.OK if good else Outcome.CORRUPT
            outcomes[index] = outcome
        self._channel.send(Message(Verb.RELEASE, a=answer.a))
        return outcomes

    def _read(self, job: Job) -> dict[int, Outcome]:
        form, (start, stop) = job.objects.form, job.part
        message = _about(Verb.READ, job.keys(), form.page_bytes, form.run_bytes)
        message.a, message.b = start, stop
        answer = self._ask(message)
        results = np.frombuffer(answer.payload, np.uint8, len(job.which)).tolist()
        checks = _Checks(answer.payload, len(job.which), form.runs)
        outcomes = {index: Outcome(result) for index, result in zip(job.which, results, strict=True)}
        found = [index for index, outcome in outcomes.items() if outcome == Outcome.OK]
        self._channel.begin(len(found) * (stop - start))
        came = b"".join(self._channel.fill_checked(span, form.run_bytes) for span in job.spans(found))
        size = (stop - start) // form.run_bytes * 8
        for number, index in enumerate(found):
            if checks.next(job.part, form.run_bytes) != came[number * size : (number + 1) * size]:
                outcomes[index] = Outcome.CORRUPT
        return outcomes

    def _write_shared(self, job: Job, arena: npt.NDArray[np.uint8]) -> dict[int, Outcome]:
        form = job.objects.form
        size, view = form.page_bytes, arena.data
        answer, results, offsets, _ = self._lease(Verb.RESERVE, job)
        outcomes, checks = {}, []
        for index, result, offset in zip(job.which, results, offsets, strict=True):
            outcomes[index] = Outcome(result)
            if result == Outcome.PENDING:
                if not 0 <= offset <= len(arena) - size:
                    raise StoreError(f"the peer lends bytes {offset} to {offset + size} of {len(arena)}")
                # Checksums of the source, not of the copy: what went wrong between is then seen.
                page = view[offset : offset + size]
                checks.append(copy_checked(page, job.target(index), form.run_bytes, arrived=False))
                outcomes[index] = Outcome.OK
        self._ask(Message(Verb.COMMIT, a=answer.a, b=1, payload=b"".join(checks)))
        return outcomes

    def _write(self, job: Job) -> dict[int, Outcome]:
        form, channel = job.objects.form, self._channel
        answer = self._ask(_about(Verb.WRITE, job.keys(), form.page_bytes, form.run_bytes))
        results = np.frombuffer(answer.payload, np.uint8, len(job.which)).tolist()
        outcomes = {index: Outcome(result) for index, result in zip(job.which, results, strict=True)}
        wanted = [index for index, outcome in outcomes.items() if outcome == Outcome.PENDING]
        if wanted:
            channel.begin(len(wanted) * form.page_bytes)
            checks = b"".join(channel.push_checked(span, form.run_bytes) for span in job.spans(wanted))
            channel.send(Message(Verb.WRITE, payload=checks))
            channel.receive()
            outcomes |= dict.fromkeys(wanted, Outcome.OK)
        return outcomes


def _connect(address: Address, secret: bytes, timeout: float, by: By) -> tuple[socket.socket, bool]:
    """A connection, and whether it needs a secret: a Unix socket does not, because the system names the user there."""
    try:
        if isinstance(address, LocalAddress):
            return connect_local(address, timeout), False
        if not secret and by in ("auto", "shared"):
            near = connect_near(*address, timeout)
            if near is not None:
                return near, False
        return socket.create_connection(address, timeout), True
    except OSError as error:
        raise StoreError(f"the {_name(address)} cannot be reached: {error}") from error


def _name(address: Address) -> str:
    return f"peer {address}" if isinstance(address, LocalAddress) else f"peer {address[0]}:{address[1]}"


class _Checks:
    """The checksums of the pages that were found, one page after the other, from `at` of a payload."""

    def __init__(self, payload: bytes, at: int, runs: int) -> None:
        self._payload, self._at, self._size = payload, at, 8 * runs

    def next(self, part: tuple[int, int] | None = None, run_bytes: int = 1) -> bytes:
        """Of the next page, or of a part of it."""
        found = self._payload[self._at : self._at + self._size]
        if len(found) < self._size:
            raise StoreError("the peer's answer is short")
        self._at += self._size
        return found if part is None else found[part[0] // run_bytes * 8 : part[1] // run_bytes * 8]


def _about(verb: Verb, keys: Sequence[bytes], page_bytes: int = 1, run_bytes: int = 1) -> Message:
    return Message(verb, len(keys), page_bytes, run_bytes, payload=b"".join(keys))


class _Read(Job):
    __slots__ = ()

    def run(self, link: Link, tools: Tools) -> None:
        outcomes = link.call(lambda peer: peer.read(self, tools))
        bad = [self.objects.keys[index] for index, got in outcomes.items() if got == Outcome.CORRUPT]
        if bad:
            link.call(lambda peer: peer.remove(bad))
        self.settle(outcomes)


class _Write(Job):
    __slots__ = ()

    def run(self, link: Link, tools: Tools) -> None:
        self.settle(link.call(lambda peer: peer.write(self)))


def open_peer(
    address: Address, secret: bytes = b"", by: By = "auto", config: RemoteConfig | None = None
) -> RemoteTier:
    """Another process's host tier. Its capacity is the peer's own; of `config` only how to ask counts. An empty `secret` is this
    user's own."""
    asked = config or RemoteConfig(capacity=1)
    if asked.compression != "none" or asked.keys is not None:
        raise ValueError("a peer keeps pages as its own engine uses them: neither compressed nor encrypted")
    name = f"peer://{_name(address).removeprefix('peer ')}"
    token = os.urandom(16)

    def connect() -> PeerConnection:
        return PeerConnection(address, secret, asked.timeout, by, token)

    try:
        first = connect()
    except Exception as error:
        raise TierError(f"the tier {name} cannot be opened: {error}") from error
    first.close()
    batch = min(first.lease_bytes, max(asked.batch_bytes, _BATCH_BYTES))
    config = replace(asked, capacity=first.capacity, batch_bytes=batch)
    return RemoteTier(name, config, connect, (_Read, _Write), largest=first.slab_bytes)


def opener(text: str) -> Callable[[], RemoteTier]:
    """`peer://host:port?secret=FILE&by=auto&readers=2&writers=2&timeout=2`; by auto, shared, nixl or connection.
    `peer:///path/of/socket?uid=1001` names a Unix socket, and the user that may serve there beside this one and root."""
    url = urlsplit(text)
    options = Options(text, url.query)
    try:
        port = url.port
    except ValueError as error:
        raise ValueError(f"{options.told}: {error}") from None
    path = unquote(url.path) if not url.netloc else ""
    if len(path) < 2 and (url.hostname is None or port is None):
        raise ValueError(f"{options.told}: write peer://host:port, or peer:///path/of/socket")
    plain = RemoteConfig(capacity=1)
    config = replace(
        plain,
        readers=options.whole("readers", plain.readers),
        writers=options.whole("writers", plain.writers),
        timeout=options.seconds("timeout", plain.timeout),
    )
    by = options.text("by", "auto")
    file, user = ("", options.whole("uid", -1)) if path else (options.text("secret", ""), -1)
    options.done()
    if by not in get_args(By):
        raise ValueError(f"{options.told}: by={by!r} is none of {', '.join(get_args(By))}")
    address: Address = LocalAddress(path, (user,)) if path else (url.hostname or "", port or 0)

    def opened() -> RemoteTier:
        try:
            secret = read_secret(file) if file else b""
        except ValueError as error:
            raise TierError(f"{options.told}: {error}") from error
        return open_peer(address, secret, cast(By, by), config)

    return opened

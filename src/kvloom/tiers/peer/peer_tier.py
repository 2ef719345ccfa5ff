"""The host memory of another process as a tier: `peer://host:port`, `peer:///path/of/socket`.

    shared       same host: acquire -> copy from the shared arena -> compare checksums -> release     no socket traffic
    nixl         acquire -> NIXL transfer (RDMA if available) -> compare checksums -> release
    connection   read -> bytes on the connection, directly into the caller's memory -> compare checksums

The first column is the transfer method, which the URL option `by` selects. The other process runs a `PeerServer`.
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

from kvloom.tiers.encoding import Head, copy_checked, run_checksums, unseal
from kvloom.tiers.host import MAX_TENANTS, map_shared_memory
from kvloom.tiers.options import Options
from kvloom.tiers.remote import Connection, Job, Link, RemoteConfig, RemoteTier, StoreError, Usage
from kvloom.tiers.shares import SHARED_OWNER, TenantAccounts, tenant_owner
from kvloom.tiers.tier import TierError
from kvloom.tiers.transfer import Outcome
from kvloom.tiers.workers import Tools

from .nixl_arena import NixlClient
from .protocol import MAX_OBJECTS, Channel, Message, Verb, client_handshake
from .secret import default_secret, read_secret
from .unix_socket import UnixAddress, connect_loopback, connect_unix

__all__ = ["PeerConnection", "TransferMethod", "open_peer", "parse_url"]

_BATCH_BYTES = (
    32 << 20
)  # fewer, larger batches are faster, because a connection waits for a reply between batches
_ABANDONED: list[Channel] = []  # open connections that keep reserved pages
Address = tuple[str, int] | UnixAddress
TransferMethod = Literal["auto", "shared", "nixl", "connection"]


class PeerConnection(Connection):
    """A client connection to a PeerServer.

    - `by`: with "auto", the client uses shared memory if it can map the server's memory, else the socket.
    - `secret`: empty means the user's default secret. If `by` is auto or shared and the secret is empty, the client
      first tries the Unix socket of this user's server on loopback. The socket needs no secret.
    - `token`: connections with the same token count as one writer, and may drop each other's pages.
    - `accounts`: the shares of tenants, which the server applies to the pages that this client writes.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        timeout: float,
        by: TransferMethod = "auto",
        token: bytes = b"",
        accounts: TenantAccounts | None = None,
    ) -> None:
        self._accounts = accounts or TenantAccounts(0)
        connected, proves = _connect(address, secret, timeout, by)
        self._channel = Channel(connected, timeout)
        try:
            client_handshake(self._channel, (secret or default_secret()) if proves else b"")
            details = self._ask(Message(Verb.ABOUT, payload=token))
            self.slab_bytes, self.capacity = details.a, details.b
            self.arena: npt.NDArray[np.uint8] | None = None
            self.nixl: NixlClient | None = None
            fields = json.loads(details.payload or b"{}")
            self.lease_bytes = max(1, int(fields["lease_bytes"]))
            if by in ("auto", "shared") and "path" in fields:
                self.arena = map_shared_memory(str(fields["path"]), str(fields["token"]), int(fields["size"]))
            if by == "shared" and self.arena is None:
                raise StoreError(
                    "the peer's memory cannot be mapped: it is on another host, or of another user or container"
                )
            if by == "nixl":
                if "nixl" not in fields:
                    raise StoreError("the peer does not offer NIXL: start it with --nixl")
                self.nixl = NixlClient(fields, timeout)
        except BaseException:
            self._channel.close()
            raise

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for at in range(0, len(keys), MAX_OBJECTS):
            some = keys[at : at + MAX_OBJECTS]
            answer = self._ask(_keys_message(Verb.LOOKUP, some))
            found += np.frombuffer(answer.payload, np.bool_, len(some)).tolist()
        return found

    def remove(self, keys: Sequence[bytes]) -> int:
        parts = [keys[at : at + MAX_OBJECTS] for at in range(0, len(keys), MAX_OBJECTS)]
        return sum(self._ask(_keys_message(Verb.DROP, part)).a for part in parts)

    def usage(self) -> Usage:
        tenants = self._accounts.tenants
        counts, used = self._usage(list(map(tenant_owner, tenants)))
        return Usage(*counts, dict(zip(tenants, used, strict=False)))

    def used_by(self, tenant: str) -> int:
        has_share = self._accounts.get(tenant) is not None
        return self._usage([tenant_owner(tenant) if has_share else SHARED_OWNER])[1][0]

    def _usage(self, owners: Sequence[bytes]) -> tuple[tuple[int, int, int], tuple[int, ...]]:
        """Return (objects, bytes, evicted objects) of the peer, and the bytes of each of `owners`."""
        owners = owners[:MAX_TENANTS]
        answer = self._ask(Message(Verb.USAGE, len(owners), payload=b"".join(owners)))
        objects, size, evicted, *used = struct.unpack(f"<{3 + len(owners)}Q", answer.payload)
        return (objects, size, evicted), tuple(used)

    def close(self) -> None:
        if self._channel not in _ABANDONED:
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
            outcomes = self._read_nixl(job, tools, self.nixl)
        else:
            outcomes = self._read_shared(job, self.arena) if self.arena is not None else self._read(job)
        if Outcome.PENDING in outcomes.values():
            raise StoreError("the peer replied to a read with the result of a write")
        return outcomes

    def write(self, job: Job) -> dict[int, Outcome]:
        if self.nixl is not None:
            return self._write_nixl(job, self.nixl)
        return self._write_shared(job, self.arena) if self.arena is not None else self._write(job)

    def _lease(self, verb: Verb, job: Job) -> tuple[Message, list[int], list[int], _ChecksumReader]:
        """Send ACQUIRE or RESERVE. Return four values: the reply, one result per object, one arena offset per
        object, and a reader of the checksums."""
        form, count = job.objects.form, len(job.which)
        message = _keys_message(verb, job.keys(), form.page_bytes, form.run_bytes)
        answer = self._ask(self._with_share(message, job) if verb == Verb.RESERVE else message)
        results = np.frombuffer(answer.payload, np.uint8, count).tolist()
        offsets = np.frombuffer(answer.payload, np.int64, count, count).tolist()
        return answer, results, offsets, _ChecksumReader(answer.payload, 9 * count, form.runs)

    def _with_share(self, message: Message, job: Job) -> Message:
        """Return the message with the share of the job's tenant, or unchanged if the tenant has no share."""
        tenant = job.objects.tenant
        account = self._accounts.get(tenant)
        if account is not None:
            message.payload += tenant_owner(tenant)
            message.a, message.b = account.limit, account.guaranteed
        return message

    def _read_nixl(self, job: Job, tools: Tools, nixl: NixlClient) -> dict[int, Outcome]:
        form, (start, stop) = job.objects.form, job.part
        answer, results, offsets, checks = self._lease(Verb.ACQUIRE, job)
        outcomes = {index: Outcome(result) for index, result in zip(job.which, results, strict=True)}
        found = [number for number, result in enumerate(results) if result == Outcome.OK]
        step = nixl.prepare_buffer(form.page_bytes)
        for at in range(0, len(found), step):
            some = found[at : at + step]
            nixl.transfer("READ", [offsets[number] for number in some], form.page_bytes, start, stop)
            for position, number in enumerate(some):
                index = job.which[number]
                head = Head(job.objects.keys[index], 0, form.run_bytes, checks.next())
                received = nixl.buffer_page(position, form.page_bytes)[start:stop]
                first = start // form.run_bytes
                outcomes[index] = unseal(head, received, first, job.target(index), tools.codec)
        self._channel.send(Message(Verb.RELEASE, a=answer.a))
        return outcomes

    def _write_nixl(self, job: Job, nixl: NixlClient) -> dict[int, Outcome]:
        form = job.objects.form
        answer, results, offsets, _ = self._lease(Verb.RESERVE, job)
        outcomes = {index: Outcome(result) for index, result in zip(job.which, results, strict=True)}
        fresh = [number for number, result in enumerate(results) if result == Outcome.PENDING]
        checks = []
        step = nixl.prepare_buffer(form.page_bytes)
        for at in range(0, len(fresh), step):
            some = fresh[at : at + step]
            for position, number in enumerate(some):
                source = job.target(job.which[number])
                nixl.buffer_page(position, form.page_bytes)[:] = source
                checks.append(run_checksums(source, form.run_bytes))
                outcomes[job.which[number]] = Outcome.OK
            try:
                nixl.transfer(
                    "WRITE", [offsets[number] for number in some], form.page_bytes, 0, form.page_bytes
                )
            except TimeoutError:
                # The write may still arrive, so the connection stays open and keeps these pages reserved.
                _ABANDONED.append(self._channel)
                raise
        self._ask(Message(Verb.COMMIT, a=answer.a, b=1, payload=b"".join(checks)))
        return outcomes

    def _read_shared(self, job: Job, arena: npt.NDArray[np.uint8]) -> dict[int, Outcome]:
        form, (start, stop) = job.objects.form, job.part
        answer, results, offsets, checks = self._lease(Verb.ACQUIRE, job)
        last, view = len(arena) - form.page_bytes, arena.data
        outcomes = {}
        for index, result, offset in zip(job.which, results, offsets, strict=True):
            outcome = Outcome(result)
            if outcome == Outcome.OK:
                wanted = checks.next(job.part, form.run_bytes)
                page = view[offset + start : offset + stop] if 0 <= offset <= last else None
                good = page is not None and wanted == copy_checked(
                    job.target(index), page, form.run_bytes, of_target=True
                )
                outcome = Outcome.OK if good else Outcome.CORRUPT
            outcomes[index] = outcome
        self._channel.send(Message(Verb.RELEASE, a=answer.a))
        return outcomes

    def _read(self, job: Job) -> dict[int, Outcome]:
        form, (start, stop) = job.objects.form, job.part
        message = _keys_message(Verb.READ, job.keys(), form.page_bytes, form.run_bytes)
        message.a, message.b = start, stop
        answer = self._ask(message)
        results = np.frombuffer(answer.payload, np.uint8, len(job.which)).tolist()
        checks = _ChecksumReader(answer.payload, len(job.which), form.runs)
        outcomes = {index: Outcome(result) for index, result in zip(job.which, results, strict=True)}
        found = [index for index, outcome in outcomes.items() if outcome == Outcome.OK]
        self._channel.begin(len(found) * (stop - start))
        received = b"".join(self._channel.receive_checked(span, form.run_bytes) for span in job.spans(found))
        size = (stop - start) // form.run_bytes * 8
        for number, index in enumerate(found):
            if checks.next(job.part, form.run_bytes) != received[number * size : (number + 1) * size]:
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
                    raise StoreError(
                        f"the peer leased bytes {offset} to {offset + size} of an arena of {len(arena)}"
                    )
                # The checksums are those of the source, so that they detect a faulty copy.
                page = view[offset : offset + size]
                checks.append(copy_checked(page, job.target(index), form.run_bytes, of_target=False))
                outcomes[index] = Outcome.OK
        self._ask(Message(Verb.COMMIT, a=answer.a, b=1, payload=b"".join(checks)))
        return outcomes

    def _write(self, job: Job) -> dict[int, Outcome]:
        form, channel = job.objects.form, self._channel
        message = _keys_message(Verb.WRITE, job.keys(), form.page_bytes, form.run_bytes)
        answer = self._ask(self._with_share(message, job))
        results = np.frombuffer(answer.payload, np.uint8, len(job.which)).tolist()
        outcomes = {index: Outcome(result) for index, result in zip(job.which, results, strict=True)}
        wanted = [index for index, outcome in outcomes.items() if outcome == Outcome.PENDING]
        if wanted:
            channel.begin(len(wanted) * form.page_bytes)
            checks = b"".join(channel.send_checked(span, form.run_bytes) for span in job.spans(wanted))
            channel.send(Message(Verb.WRITE, payload=checks))
            channel.receive()
            outcomes |= dict.fromkeys(wanted, Outcome.OK)
        return outcomes


def _connect(
    address: Address, secret: bytes, timeout: float, by: TransferMethod
) -> tuple[socket.socket, bool]:
    """Connect to a server. Return the socket, and whether a secret is needed. A Unix socket needs no secret, because
    the kernel identifies the user. Without `secret`, the transfer methods (`by`) "auto" and "shared" first try the Unix
    socket of a server on loopback.
    """
    try:
        if isinstance(address, UnixAddress):
            return connect_unix(address, timeout), False
        if not secret and by in ("auto", "shared"):
            loopback = connect_loopback(*address, timeout)
            if loopback is not None:
                return loopback, False
        return socket.create_connection(address, timeout), True
    except OSError as error:
        raise StoreError(f"the {_address_text(address)} cannot be reached: {error}") from error


def _address_text(address: Address) -> str:
    return f"peer {address}" if isinstance(address, UnixAddress) else f"peer {address[0]}:{address[1]}"


class _ChecksumReader:
    """Reads checksums from `payload` page by page, starting at byte `at`. The payload has `runs` checksums for each
    page that was found, and none for other pages."""

    def __init__(self, payload: bytes, at: int, runs: int) -> None:
        self._payload, self._at, self._size = payload, at, 8 * runs

    def next(self, part: tuple[int, int] | None = None, run_bytes: int = 1) -> bytes:
        """Return the checksums of the next page, or only of its byte range `part`. Raises StoreError if the payload is
        too short."""
        found = self._payload[self._at : self._at + self._size]
        if len(found) < self._size:
            raise StoreError("the peer's reply is too short")
        self._at += self._size
        return found if part is None else found[part[0] // run_bytes * 8 : part[1] // run_bytes * 8]


def _keys_message(verb: Verb, keys: Sequence[bytes], page_bytes: int = 1, run_bytes: int = 1) -> Message:
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
    address: Address, secret: bytes = b"", by: TransferMethod = "auto", config: RemoteConfig | None = None
) -> RemoteTier:
    """Open the host tier of another process as a tier. The tier has the capacity of the peer. An empty `secret`
    selects the user's default secret. `by` selects how pages are transferred. From `config`, only timeout, threads,
    `batch_bytes` and `pending_bytes` are used. Raises TierError if the peer cannot be reached, and ValueError if
    `config` has compression or keys."""
    requested = config or RemoteConfig(capacity=1)
    if requested.compression != "none" or requested.keys is not None:
        raise ValueError(
            "a peer stores pages as its engine uses them: compression and keys are not supported"
        )
    name = f"peer://{_address_text(address).removeprefix('peer ')}"
    token = os.urandom(16)
    try:
        first = PeerConnection(address, secret, requested.timeout, by, token)
    except Exception as error:
        raise TierError(f"the tier {name} cannot be opened: {error}") from error
    first.close()
    batch = min(first.lease_bytes, max(requested.batch_bytes, _BATCH_BYTES))
    config = replace(requested, capacity=first.capacity, batch_bytes=batch)
    accounts = TenantAccounts(first.capacity)
    return RemoteTier(
        name,
        config,
        lambda: PeerConnection(address, secret, requested.timeout, by, token, accounts),
        (_Read, _Write),
        accounts.set_shares,
        max_page_bytes=first.slab_bytes,
    )


def parse_url(url: str) -> Callable[[], RemoteTier]:
    """Parse `peer://host:port?secret=FILE&by=auto&readers=2&writers=2&timeout=2`. Return the function that opens
    the tier.

    `by` is auto, shared, nixl or connection. `peer:///path/of/socket?uid=1001` is a Unix socket. Its server must
    run as this user, as root, or as the user `uid`.
    """
    parts = urlsplit(url)
    options = Options(url, parts.query)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{options.url}: {error}") from None
    path = unquote(parts.path) if not parts.netloc else ""
    if len(path) < 2 and (parts.hostname is None or port is None):
        raise ValueError(f"{options.url}: write peer://host:port, or peer:///path/of/socket")
    plain = RemoteConfig(capacity=1)
    config = replace(
        plain,
        readers=options.integer("readers", plain.readers),
        writers=options.integer("writers", plain.writers),
        timeout=options.seconds("timeout", plain.timeout),
    )
    by = options.text("by", "auto")
    file, user = ("", options.integer("uid", -1)) if path else (options.text("secret", ""), -1)
    options.reject_unknown()
    if by not in get_args(TransferMethod):
        raise ValueError(f"{options.url}: by={by!r} is none of {', '.join(get_args(TransferMethod))}")
    address: Address = UnixAddress(path, (user,)) if path else (parts.hostname or "", port or 0)

    def opened() -> RemoteTier:
        try:
            secret = read_secret(file) if file else b""
        except ValueError as error:
            raise TierError(f"{options.url}: {error}") from error
        return open_peer(address, secret, cast(TransferMethod, by), config)

    return opened

"""Serves a host tier to other processes: a thread for every connection, and leases that end with it.

On one host a peer maps the arena and copies by itself, between `HOLD` and `RELEASE` (or `RESERVE` and `COMMIT`); elsewhere
pages travel on the connection. Checksums are made where a page is written and compared where it is read. Nothing here is
ever unpickled. Knows no engines and no names beyond their bytes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import numpy as np

from kvloom.tiers.host.host_tier import HostTier
from kvloom.tiers.host.lease import Lease
from kvloom.tiers.host.shared_memory import SharedMemory
from kvloom.tiers.tier import KEY_BYTES, Form, Objects
from kvloom.tiers.transfer import Outcome

from .nixl_arena import NixlArena
from .protocol import Channel, Message, PeerError, Verb, welcome

__all__ = ["PeerConfig", "PeerServer", "keyed"]

_NAME_BYTES = 16


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """Where to listen. `port` 0 is any free one. Beyond loopback a secret of 16 bytes or more is a must. `read_only`: others
    may read what is there, and change nothing."""

    host: str = "127.0.0.1"
    port: int = 0
    secret: bytes = b""
    read_only: bool = False
    connections: int = 64
    timeout: float = 30.0

    def __post_init__(self) -> None:
        if len(self.secret) < 16 and not _loopback(self.host):
            raise ValueError(
                f"host={self.host!r} can be reached from elsewhere: give a secret of 16 bytes or more "
                f"(this has {len(self.secret)}), or listen on 127.0.0.1"
            )
        if self.connections < 1:
            raise ValueError(f"connections={self.connections} must be positive")


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
    """Runs until `close`. The tier stays its owner's; OSError where the address cannot be had. `memory` is its arena if
    others on this host may map it, `nixl` if NIXL may reach it."""

    def __init__(
        self,
        tier: HostTier,
        config: PeerConfig,
        memory: SharedMemory | None = None,
        nixl: NixlArena | None = None,
    ) -> None:
        self._tier, self._config = tier, config
        self._about: dict[str, Any] = dict(nixl.about) if nixl is not None else {}
        if memory is not None:
            self._about |= {"path": memory.path, "token": memory.token, "size": memory.size}
        self._memory, self._nixl = memory, nixl  # while guests may use them
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self._socket = socket.create_server((config.host, config.port), family=family)
        self._lock = threading.Lock()
        self._open: set[Channel] = set()
        self._ended = threading.Event()
        self.refused = 0
        threading.Thread(target=self._accept, name="kvloom-peer-accept", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Ends every connection; who reads from the arena gets an error and computes again."""
        with self._lock:
            self._ended.set()
            channels = list(self._open)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for channel in channels:
            channel.close()
        if self._nixl is not None:
            self._nixl.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connected, _ = self._socket.accept()
            except OSError:
                # Closed; or out of descriptors, say: then the others go on.
                self._ended.wait(0.05)
                continue
            channel = Channel(connected, self._config.timeout)
            with self._lock:
                room = not self._ended.is_set() and len(self._open) < self._config.connections
                if room:
                    self._open.add(channel)
                else:
                    self.refused += 1
            if not room:
                channel.close()
                continue
            threading.Thread(target=self._serve, args=(channel,), name="kvloom-peer", daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        guest = _Guest(self._tier, channel, self._about, self._config.read_only, self._nixl)
        try:
            if not welcome(channel, self._config.secret):
                with self._lock:
                    self.refused += 1
                return
            while True:
                guest.answer(channel.receive(patient=True))
        except (OSError, PeerError):
            pass  # it has gone, or is no peer
        except (ValueError, struct.error) as error:
            with contextlib.suppress(OSError):
                channel.send(Message(Verb.ABOUT, payload=str(error).encode(), status=1))
        finally:
            guest.leave()
            channel.close()
            with self._lock:
                self._open.discard(channel)


class _Guest:
    """One connection's requests and leases."""

    def __init__(
        self, tier: HostTier, channel: Channel, about: dict[str, Any], read_only: bool, nixl: NixlArena | None
    ) -> None:
        self._tier, self._channel, self._where = tier, channel, about
        self._read_only, self._nixl = read_only, nixl
        self._leases: dict[int, Lease] = {}
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
        for number in list(self._leases):
            self._taken(number).release(written=False)

    @staticmethod
    def _objects(message: Message) -> Objects:
        """The objects whose keys are the payload."""
        if len(message.payload) != message.count * KEY_BYTES:
            raise ValueError(f"{len(message.payload)} bytes are not {message.count} keys of {KEY_BYTES}")
        data = message.payload
        keys = [data[at : at + KEY_BYTES] for at in range(0, message.count * KEY_BYTES, KEY_BYTES)]
        return keyed(keys, message.page_bytes, message.run_bytes)

    def _keep(self, lease: Lease) -> int:
        number, self._next = self._next, self._next + 1
        self._leases[number] = lease
        if self._nixl is not None:
            self._nixl.count(1)
        return number

    def _taken(self, number: int) -> Lease:
        """A lease, no longer kept."""
        lease = self._leases.pop(number, None)
        if lease is None:
            raise ValueError(f"there is no lease {number}")
        if self._nixl is not None:
            self._nixl.count(-1)
        return lease

    def _about(self, message: Message) -> None:
        slab = self._tier.slab_bytes
        self._channel.send(
            Message(Verb.ABOUT, a=slab, b=self._tier.capacity, payload=json.dumps(self._where).encode())
        )

    def _lookup(self, message: Message) -> None:
        found = self._tier.lookup(self._objects(message))
        self._channel.send(Message(Verb.LOOKUP, message.count, payload=found.tobytes()))

    def _hold(self, message: Message) -> None:
        lease = self._tier.hold(self._objects(message))
        number = self._keep(lease)
        payload = lease.results.tobytes() + lease.offsets.tobytes() + b"".join(lease.checks())
        self._channel.send(Message(Verb.HOLD, message.count, a=number, payload=payload))

    def _release(self, message: Message) -> None:
        if message.a in self._leases:
            self._taken(message.a).release(written=False)

    def _places(self, objects: Objects) -> Lease:
        """Places for a guest's pages; none where it may only read."""
        if self._read_only:
            none = np.full(len(objects), -1, np.int64)
            return Lease(self._tier, objects, none, none, np.full(len(objects), Outcome.FULL, np.uint8))
        return self._tier.reserve(objects)

    def _reserve(self, message: Message) -> None:
        lease = self._places(self._objects(message))
        payload = lease.results.tobytes() + lease.offsets.tobytes()
        self._channel.send(Message(Verb.RESERVE, message.count, a=self._keep(lease), payload=payload))

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
        objects = self._objects(message)
        if not 0 <= message.a < message.b <= message.page_bytes:
            raise ValueError(f"part {message.a} to {message.b} of a page of {message.page_bytes}")
        lease = self._tier.hold(objects)
        try:
            payload = lease.results.tobytes() + b"".join(lease.checks())
            pieces = [
                self._tier.arena[at + message.a : at + message.b].data
                for at in lease.offsets.tolist()
                if at >= 0
            ]
            self._channel.send(Message(Verb.READ, message.count, payload=payload), pieces)
        finally:
            lease.release(written=False)

    def _write(self, message: Message) -> None:
        """Says which pages are wanted, and takes those: a page is long, a question short. Their checksums come last, so that
        they are made while pages travel."""
        size, objects = message.page_bytes, self._objects(message)
        lease = self._places(objects)
        written = False
        try:
            self._channel.send(Message(Verb.WRITE, message.count, payload=lease.results.tobytes()))
            places = lease.offsets[lease.offsets >= 0].tolist()
            if not places:
                return
            for at, stop in _joined(places, size):
                self._channel.begin(stop - at)
                self._channel.fill(self._tier.arena[at:stop].data)
            lease.keep_checks(bytes(self._channel.take(len(places) * 8 * objects.form.runs)))
            written = True
        finally:
            lease.release(written)
        self._channel.send(Message(Verb.WRITE))

    def _drop(self, message: Message) -> None:
        dropped = 0 if self._read_only else self._tier.drop(self._objects(message))
        self._channel.send(Message(Verb.DROP, a=dropped))

    def _usage(self, message: Message) -> None:
        stats = self._tier.stats()
        payload = struct.pack("<QQQ", stats.objects, stats.bytes, stats.evicted)
        self._channel.send(Message(Verb.USAGE, payload=payload))


def _joined(offsets: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Where pages of `size` bytes lie, in that order, neighbours as one."""
    spans: list[tuple[int, int]] = []
    for at in offsets:
        if spans and spans[-1][1] == at:
            spans[-1] = (spans[-1][0], at + size)
        else:
            spans.append((at, at + size))
    return spans

"""The connections of a PeerServer: admission, deadlines, and the memory budget of leases.

    connected -> pending (at most `handshake_seconds`) -> admitted (at most `max_connections`, half per origin)

An origin is a user on this host, or a network address. If too many connections are pending, the oldest pending
connection of the origin with the most pending connections is closed. A flood of connections therefore closes its
own connections first, and never an admitted connection. This module does not depend on tiers.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable

from .protocol import Channel

__all__ = ["LeaseBudget", "PeerClient", "PeerClients"]


class PeerClient:
    """One connection of a client to this peer server. The server closes the connection at `deadline` (monotonic
    seconds). `busy` is set during a request or a lease. `used` is the time of the last request."""

    def __init__(self, channel: Channel, origin: str, deadline: float) -> None:
        self.channel, self.origin, self.deadline = channel, origin, deadline
        self.used = time.monotonic()
        self.busy = False


class PeerClients:
    """Decides which connections of a peer server stay open. At most `pending` connections wait for admission, and at
    most `admitted` are admitted. An admitted connection that was idle for `idle_seconds` may be replaced by a new one.
    The methods return the connections to close, and the caller closes them. Thread-safe."""

    def __init__(self, pending: int, admitted: int, idle_seconds: float) -> None:
        self._max_pending, self._max_admitted, self._idle = pending, admitted, idle_seconds
        self._max_per_origin = max(1, admitted // 2)
        self._lock = threading.Lock()
        self._pending: dict[PeerClient, None] = {}
        self._admitted: dict[PeerClient, None] = {}
        self._ended = False

    def add(self, client: PeerClient) -> list[PeerClient]:
        """Add a connection before its handshake. Return the connections to close."""
        with self._lock:
            if self._ended:
                return [client]
            self._pending[client] = None
            if len(self._pending) <= self._max_pending:
                return []
            oldest = _oldest(self._pending)
            del self._pending[oldest]
            return [oldest]

    def admit(self, client: PeerClient) -> tuple[bool, list[PeerClient]]:
        """Decide whether to admit an authenticated connection. Return the decision, and the idle connections that
        the caller must close to admit this connection."""
        with self._lock:
            if client not in self._pending:
                return False, []
            same_origin = [other for other in self._admitted if other.origin == client.origin]
            ended = []
            if len(self._admitted) >= self._max_admitted or len(same_origin) >= self._max_per_origin:
                full = same_origin if len(same_origin) >= self._max_per_origin else self._admitted
                idle = min(
                    (other for other in full if not other.busy), key=lambda other: other.used, default=None
                )
                if idle is None or time.monotonic() - idle.used < self._idle:
                    return False, []
                del self._admitted[idle]
                ended = [idle]
            del self._pending[client]
            self._admitted[client] = None
            client.used = time.monotonic()
            return True, ended

    def remove(self, client: PeerClient) -> None:
        with self._lock:
            self._pending.pop(client, None)
            self._admitted.pop(client, None)

    def overdue(self) -> list[PeerClient]:
        """Return the connections whose deadline has passed."""
        now = time.monotonic()
        with self._lock:
            return [client for client in (*self._pending, *self._admitted) if client.deadline < now]

    def end(self) -> list[PeerClient]:
        """End admission and return all connections, so that the caller can close them."""
        with self._lock:
            self._ended = True
            return [*self._pending, *self._admitted]


def _oldest(pending: Iterable[PeerClient]) -> PeerClient:
    """Return the oldest pending connection of the origin with the most pending connections."""
    pending = list(pending)
    counts = Counter(client.origin for client in pending)
    largest = max(counts.values())
    return next(client for client in pending if counts[client.origin] == largest)


class LeaseBudget:
    """Limits the bytes that the leases of all connections use together. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._lock = threading.Lock()

    def take(self, size: int, count: int) -> int:
        """Take up to `count` pages of `size` bytes from the budget. Return the number of pages taken."""
        with self._lock:
            taken = min(count, self._free // size)
            self._free -= taken * size
            return taken

    def release(self, size: int) -> None:
        with self._lock:
            self._free += size

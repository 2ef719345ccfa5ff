"""The connections of a PeerServer: who may stay, for how long, and what all of them together may borrow.

    arrives -> pending (a hello has `handshake_seconds`) -> admitted (at most `connections`, half of them of one origin)

An origin is a user on this host or an address. Where too many are pending, the oldest of the origin with the most ends: a
stranger ends its own connections first, and never takes a place of an admitted one. Knows no tiers.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable

from .wire import Channel

__all__ = ["Budget", "Guest", "Guests"]


class Guest:
    """One connection. The server ends it after `deadline`, in monotonic seconds."""

    def __init__(self, channel: Channel, origin: str, deadline: float) -> None:
        self.channel, self.origin, self.deadline = channel, origin, deadline
        self.used = time.monotonic()
        self.busy = False


class Guests:
    """Safe from any thread. Closes no connection: returns those to close."""

    def __init__(self, pending: int, admitted: int, idle_seconds: float) -> None:
        self._most_pending, self._most_admitted, self._idle = pending, admitted, idle_seconds
        self._most_of_one = max(1, admitted // 2)
        self._lock = threading.Lock()
        self._pending: dict[Guest, None] = {}
        self._admitted: dict[Guest, None] = {}
        self._ended = False

    def arrive(self, guest: Guest) -> list[Guest]:
        """Enters a connection that has proved nothing yet."""
        with self._lock:
            if self._ended:
                return [guest]
            self._pending[guest] = None
            if len(self._pending) <= self._most_pending:
                return []
            oldest = _oldest(self._pending)
            del self._pending[oldest]
            return [oldest]

    def admit(self, guest: Guest) -> tuple[bool, list[Guest]]:
        """Whether a connection that proved itself may stay, and an idle one that ends for it."""
        with self._lock:
            if guest not in self._pending:
                return False, []
            of_one = [other for other in self._admitted if other.origin == guest.origin]
            ended = []
            if len(self._admitted) >= self._most_admitted or len(of_one) >= self._most_of_one:
                full = of_one if len(of_one) >= self._most_of_one else self._admitted
                idle = min(
                    (other for other in full if not other.busy), key=lambda other: other.used, default=None
                )
                if idle is None or time.monotonic() - idle.used < self._idle:
                    return False, []
                del self._admitted[idle]
                ended = [idle]
            del self._pending[guest]
            self._admitted[guest] = None
            guest.used = time.monotonic()
            return True, ended

    def leave(self, guest: Guest) -> None:
        with self._lock:
            self._pending.pop(guest, None)
            self._admitted.pop(guest, None)

    def overdue(self) -> list[Guest]:
        """Connections whose deadline has passed."""
        now = time.monotonic()
        with self._lock:
            return [guest for guest in (*self._pending, *self._admitted) if guest.deadline < now]

    def end(self) -> list[Guest]:
        """All connections; none is entered from now on."""
        with self._lock:
            self._ended = True
            return [*self._pending, *self._admitted]


def _oldest(pending: Iterable[Guest]) -> Guest:
    """The oldest connection of the origin that has the most."""
    pending = list(pending)
    counts = Counter(guest.origin for guest in pending)
    most = max(counts.values())
    return next(guest for guest in pending if counts[guest.origin] == most)


class Budget:
    """Bytes that connections may borrow together. Safe from any thread."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._lock = threading.Lock()

    def take(self, size: int, count: int) -> int:
        """Takes up to `count` pages of `size` bytes; returns how many."""
        with self._lock:
            taken = min(count, self._left // size)
            self._left -= taken * size
            return taken

    def give(self, size: int) -> None:
        with self._lock:
            self._left += size

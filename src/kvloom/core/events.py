"""Events report which blocks were stored and removed, by block hash. Tiers, routers and dashboards listen to events.

Events are frozen data. If there is no listener, the cache computes no hash and builds no event. Compaction publishes
no event, because pages stay in the same medium.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["BlockRemoved", "BlockStored", "Event", "EventBus"]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """For each of `hashes`, the pages of the layer groups `groups` were stored in `medium`. The hashes form a chain:
    `parent` is the parent of the first hash, and each hash is the parent of the next hash.

    - `tail_tokens` is 0 if each hash covers HASH_TOKENS tokens. Otherwise there is one hash, which covers a partial
      last block of `tail_tokens` tokens.
    - `tokens` are the token ids of all hashes, as bytes. The id of an image's token is computed from the content of the
      image.
    - `adapter` is the adapter that salts the hashes, or "".

    Events of tiers contain neither tokens nor adapter.
    """

    parent: bytes
    hashes: tuple[bytes, ...]
    groups: tuple[int, ...]
    medium: str
    tail_tokens: int = 0
    tokens: bytes = field(default=b"", compare=False, repr=False)
    adapter: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The pages of `groups` for each of `hashes` were removed from `medium`. `reason` states why."""

    hashes: tuple[bytes, ...]
    groups: tuple[int, ...]
    medium: str
    reason: str


Event = BlockStored | BlockRemoved
"""An event of the cache."""


class EventBus:
    """Calls every listener with every event, in order and synchronously. A listener must not call the cache."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []
        self.listening = False
        """Whether there is a listener. The cache reads this flag before it computes a hash."""

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Add a listener. Return a function that removes the listener."""
        self._listeners.append(listener)
        self.listening = True

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
            self.listening = bool(self._listeners)

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Call every listener."""
        for listener in self._listeners:
            listener(event)

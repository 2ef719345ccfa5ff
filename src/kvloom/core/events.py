"""Events: blocks stored and removed, published by block hash for tiers, routers and dashboards.

Events are frozen data. Without a listener nothing is hashed and no event is built. Compaction publishes nothing: it does
not change the medium.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["BlockRemoved", "BlockStored", "Event", "EventBus"]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages of `groups` were stored in `medium` for each of `hashes`, a chain below `parent`.

    Without `tail_tokens` each hash covers HASH_TOKENS tokens. With it there is one hash, of a partial tail of
    `tail_tokens` tokens after `parent`. `tokens` are the token bytes of all hashes; a media token has an id that depends on
    its content. Tiers publish no tokens.
    """

    parent: bytes
    hashes: tuple[bytes, ...]
    groups: tuple[int, ...]
    medium: str
    tail_tokens: int = 0
    tokens: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages of `groups` with `hashes` were removed from `medium`, for `reason`."""

    hashes: tuple[bytes, ...]
    groups: tuple[int, ...]
    medium: str
    reason: str


Event = BlockStored | BlockRemoved


class EventBus:
    """Calls every listener with every event, in order and synchronously. A listener must not call the cache."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []
        self.listening = False
        """Whether there is a listener. Checked before anything is hashed."""

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Add a listener and return a function that removes it."""
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

"""Events report which blocks were stored and removed, by block hash. Tiers, routers and dashboards use them.

Events are frozen data. Without a listener no hash is computed and no event is built. Compaction publishes no event,
because pages stay in the same medium.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["BlockRemoved", "BlockStored", "Event", "EventBus"]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages of `groups` were stored in `medium` for each of `hashes`. The hashes form a chain after `parent`.

    Without `tail_tokens` each hash covers HASH_TOKENS tokens. With `tail_tokens` there is one hash, which covers a
    partial last block of `tail_tokens` tokens. `tokens` are the token bytes of all hashes. The id of a media token
    depends on the content of the image. Tiers publish no tokens.
    """

    parent: bytes
    hashes: tuple[bytes, ...]
    groups: tuple[int, ...]
    medium: str
    tail_tokens: int = 0
    tokens: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The pages of `groups` for each of `hashes` were removed from `medium`. `reason` states why."""

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
        """Whether there is a listener. It is checked before any hash is computed."""

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Add a listener. Return a function that removes it."""
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

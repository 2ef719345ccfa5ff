"""What happened to cached pages, told by name, for tiers, routers and dashboards.

Events are plain frozen data. With no listener nothing is named and nothing is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["BlockMoved", "BlockRemoved", "BlockStored", "Event", "EventBus"]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages of `groups` are now in `place` for each of `names`, a chain that hangs below `parent`.

    Without `tail_tokens` each name covers one grain. With it there is one name, of a partial tail
    that covers so many tokens after `parent`.
    """

    parent: bytes
    hashes: tuple[bytes, ...]
    groups: tuple[int, ...]
    medium: str
    tail_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages of `groups` under `names` left `place`, and `why`."""

    hashes: tuple[bytes, ...]
    groups: tuple[int, ...]
    medium: str
    reason: str


@dataclass(frozen=True, slots=True)
class BlockMoved:
    """Pages of `groups` under `names` went from one place to another."""

    hashes: tuple[bytes, ...]
    groups: tuple[int, ...]
    source: str
    target: str


Event = BlockStored | BlockRemoved | BlockMoved


class EventBus:
    """Calls every listener with every event, in order, at once. A listener must not call the cache back."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []
        self.listening = False
        """Whether anyone would hear. To ask is what a cache without listeners pays."""

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Add a listener; the returned call removes it."""
        self._listeners.append(listener)
        self.listening = True

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
            self.listening = bool(self._listeners)

        return unsubscribe

    def emit(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)

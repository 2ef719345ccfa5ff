"""RequestPins: prompts that stay in the pool after their request has finished. The request sets the number of seconds
(`cache.pin`).

All pins together use at most a quarter of the pool. A pin ends when its time is over, when its session ends, or when a
request needs its pages.
"""

from __future__ import annotations

from collections import deque

from kvloom.core import CacheControl, Media, Pin
from kvloom.engine import Engine

from .messages import Add

__all__ = ["RequestPins"]

POOL_PARTS = 4
"""All pins together use at most 1 / POOL_PARTS of the pool."""


class RequestPins:
    """The pins of one engine. A pin keeps the cached pages of a prompt in the pool. Pins are stored oldest first, each
    with the session of its request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pins: deque[tuple[str | None, Pin]] = deque()

    def check(self, message: Add) -> str | None:
        """Return the reason why the prompt of a request cannot be pinned. Return None if it can, or if the request sets
        no pin.
        """
        if message.pin is None:
            return None
        needed, used = self._bytes(len(message.prompt)), self._pinned_bytes()
        limit = self._pool_bytes() // POOL_PARTS
        if used + needed <= limit:
            return None
        return (
            f"cache.pin: the prompt needs {needed:,} bytes of the pool, pins use {used:,}, and the limit is {limit:,}: "
            "pin less, or end a session that has pins"
        )

    def add(self, message: Add, control: CacheControl, activation: Media | None = None) -> None:
        """Pin the cached prefix of a finished request's prompt. Does nothing if the prompt is not cached, if
        `message.pin` is None, or if pins would exceed their limit. If the request used an activated LoRA,
        `activation` marks the token from which the adapter applies.
        """
        if message.pin is not None and self.check(message) is None:
            media = () if activation is None else (activation,)
            pin = self._engine.cache.pin(message.prompt, message.pin, control, media)
            self._pins.append((control.session, pin))

    def end_session(self, session: str) -> None:
        """End the pins of a session. `session` is the session key of the cache (`CacheControl.session`), not the
        client's session id."""
        self._end([pin for name, pin in self._pins if name == session])

    def free(self, needed: int) -> None:
        """End the oldest pins until a request that needs `needed` bytes fits into the pool."""
        while self._pins and self._pinned_bytes() + needed > self._pool_bytes():
            self._end([self._pins[0][1]])

    def _end(self, pins: list[Pin]) -> None:
        for pin in pins:
            self._engine.cache.unpin(pin)
        self._forget_ended()

    def _forget_ended(self) -> None:
        self._engine.cache.release_expired()
        self._pins = deque(item for item in self._pins if item[1].is_active)

    def _pinned_bytes(self) -> int:
        self._forget_ended()
        return sum(self._bytes(pin.length) for _, pin in self._pins)

    def _bytes(self, tokens: int) -> int:
        return self._engine.layout.slab_bytes_for(tokens) if tokens else 0

    def _pool_bytes(self) -> int:
        return self._engine.cache.usable_slabs * self._engine.layout.slab_bytes

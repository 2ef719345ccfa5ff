"""Where an HTTP request's answers arrive: pieces that wait are merged, so that a slow reader gets fewer and larger ones.

What waits is bounded by the answers themselves, and for streams by `most_characters`: who falls further behind is cut off.
"""

from __future__ import annotations

import asyncio

from kvloom.serve.errors import ApiError, slow_reader

from .messages import Delta

__all__ = ["Mailbox"]


class Mailbox:
    """`n` answers to each of the prompts `ids`. `take` is called by one task; the rest by whoever reads from the engine.
    `open` are the prompts of which more is to come."""

    def __init__(self, ids: list[int], n: int = 1, most_characters: int | None = None) -> None:
        self.open = set(ids)
        self._left = dict.fromkeys(ids, n)
        self.gone = False
        self._most = most_characters
        self._pieces: dict[tuple[int, int], Delta] = {}
        self._characters = 0
        self._error: ApiError | None = None
        self._news = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """A piece of an answer came."""
        key = delta.id, delta.index
        before = self._pieces.get(key)
        self._pieces[key] = delta if before is None else _merged(before, delta)
        self._characters += len(delta.text)
        if delta.finish is not None:
            self._left[delta.id] -= 1
            if not self._left[delta.id]:
                self.open.discard(delta.id)
        if self._most is not None and self._characters > self._most:
            self.fail(slow_reader(f"{self._characters:,} characters waited, {self._most:,} may"))
        self._news.set()

    def fail(self, error: ApiError) -> None:
        """Nothing more comes at all. The first reason is the one that is told."""
        self._error = self._error or error
        self._news.set()

    def hang_up(self) -> None:
        """The client went away."""
        self.gone = True
        self._news.set()

    async def take(self) -> list[Delta]:
        """Wait for something new, then all of it; empty when everything has come, or nobody wants it any more. Raises
        what went wrong, after the pieces that came before it."""
        while not self._pieces and self._error is None and self.open and not self.gone:
            self._news.clear()
            await self._news.wait()
        if self.gone:
            return []
        pieces = list(self._pieces.values())
        self._pieces.clear()
        self._characters = 0
        if not pieces and self._error is not None:
            raise self._error
        return pieces


def _merged(a: Delta, b: Delta) -> Delta:
    logprobs = None if b.logprobs is None else [*(a.logprobs or []), *b.logprobs]
    return Delta(
        a.id, a.index, a.text + b.text, a.tokens + b.tokens, b.cached, b.finish, b.stop_reason, logprobs
    )

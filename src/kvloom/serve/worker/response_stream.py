"""The answers of one HTTP request, between the engine and the client.

Deltas (new tokens) that the client has not read yet are merged, so a slow client gets fewer and larger deltas. In
streams, `max_characters` limits the unread text. A client above this limit is disconnected.
"""

from __future__ import annotations

import asyncio

from kvloom.serve.errors import ApiError, slow_reader

from .messages import Delta

__all__ = ["ResponseStream"]


class ResponseStream:
    """Collects the deltas (new tokens) of one HTTP request, which has `n` answers to each prompt in `ids`. Only one
    task may call `take`.

    `pending` are the prompts that have not finished.
    """

    def __init__(self, ids: list[int], n: int = 1, max_characters: int | None = None) -> None:
        self.pending = set(ids)
        self._remaining = dict.fromkeys(ids, n)
        self.is_disconnected = False
        self._max_characters = max_characters
        self._pieces: dict[tuple[int, int], Delta] = {}
        self._characters = 0
        self._error: ApiError | None = None
        self._changed = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """Add a delta of the engine. Unread deltas of the same answer are merged."""
        key = delta.id, delta.index
        before = self._pieces.get(key)
        self._pieces[key] = delta if before is None else _merged(before, delta)
        self._characters += len(delta.text)
        if delta.finish_reason is not None:
            self._remaining[delta.id] -= 1
            if not self._remaining[delta.id]:
                self.pending.discard(delta.id)
        if self._max_characters is not None and self._characters > self._max_characters:
            self.fail(
                slow_reader(
                    f"{self._characters:,} characters are unread, the limit is {self._max_characters:,}"
                )
            )
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """End the stream with an error. The first error is kept."""
        self._error = self._error or error
        self._changed.set()

    def disconnect(self) -> None:
        """End the stream because the client disconnected."""
        self.is_disconnected = True
        self._changed.set()

    async def take(self) -> list[Delta]:
        """Wait for deltas, and return all that have arrived. Return an empty list at the end of the answers, or after
        a disconnect. If the stream has failed, earlier deltas are returned first. The next call raises the error.
        """
        while not self._pieces and self._error is None and self.pending and not self.is_disconnected:
            self._changed.clear()
            await self._changed.wait()
        if self.is_disconnected:
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
        a.id,
        a.index,
        a.text + b.text,
        a.tokens + b.tokens,
        b.cached_tokens,
        b.finish_reason,
        b.stop_reason,
        logprobs,
        prompt_tokens=b.prompt_tokens,
        reused_tokens=b.reused_tokens,
    )

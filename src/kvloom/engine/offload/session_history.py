"""The tokens of past sessions, so that their pages can be prefetched before the next request.

A prefetch needs the tokens. The prefix cache drops the tokens of evicted pages, and tiers store only hashes. The
number of tokens is limited. This module does not use the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvloom.core import CacheControl
from kvloom.engine.request import Request

__all__ = ["SessionHistory"]

MAX_TOKENS = 16 << 20
"""Largest number of tokens of all sessions together. A token takes 4 bytes."""
MAX_SESSIONS = 1 << 14


class SessionHistory:
    """The tokens and cache control of each session's last request. The least recently used session is dropped
    first."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._sessions: OrderedDict[str, tuple[npt.NDArray[np.int32], CacheControl]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def record_requests(self, requests: Iterable[Request]) -> None:
        """Record finished requests that have a session id. Skips requests with images, because tokens do not identify
        images.
        """
        for request in requests:
            if request.finish_reason is not None and request.control.session and request.images is None:
                self.record(request.control.session, request.tokens, request.control)

    def record(self, session: str, tokens: Sequence[int], control: CacheControl) -> None:
        """Store the tokens and cache control of a session's last request."""
        self.forget(session)
        self._sessions[session] = np.array(tokens, np.int32), control
        self._tokens += len(tokens)
        while self._tokens > self._max_tokens or len(self._sessions) > MAX_SESSIONS:
            self.forget(next(iter(self._sessions)))

    def of(self, session: str) -> tuple[npt.NDArray[np.int32], CacheControl] | None:
        """Return the tokens and cache control of a session, or None."""
        return self._sessions.get(session)

    def forget(self, session: str) -> None:
        """Drop a session."""
        dropped = self._sessions.pop(session, None)
        if dropped is not None:
            self._tokens -= len(dropped[0])

"""What sessions have said, so that their pages can be brought up before they come back. Bounded; knows no cache.

The pool forgets a text when its pages leave, and tiers know names alone: whoever hints that a session is about to come back
names it, and the tokens are remembered here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvloom.core import CacheControl
from kvloom.engine.request import Request

__all__ = ["SessionHistory"]

MOST_TOKENS = 16 << 20
"""Of all sessions together, 4 bytes each."""
MOST_SESSIONS = 1 << 14


class SessionHistory:
    """The least recently heard of are forgotten first."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self._tokens = 0
        self._known: OrderedDict[str, tuple[npt.NDArray[np.int32], CacheControl]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def record_requests(self, requests: Iterable[Request]) -> None:
        """Remember what was said in sessions by those that have ended. (Of images the tokens do not tell.)"""
        for request in requests:
            if request.finish_reason is not None and request.control.session and request.images is None:
                self.record(request.control.session, request.tokens, request.control)

    def record(self, session: str, tokens: Sequence[int], control: CacheControl) -> None:
        """A turn has ended: this is all that was said."""
        self.forget(session)
        self._known[session] = np.array(tokens, np.int32), control
        self._tokens += len(tokens)
        while self._tokens > self._most or len(self._known) > MOST_SESSIONS:
            self.forget(next(iter(self._known)))

    def of(self, session: str) -> tuple[npt.NDArray[np.int32], CacheControl] | None:
        return self._known.get(session)

    def forget(self, session: str) -> None:
        known = self._known.pop(session, None)
        if known is not None:
            self._tokens -= len(known[0])

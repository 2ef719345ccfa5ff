"""The interface of proposers: everything that guesses the next tokens of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvloom.core import CacheControl, Sequence as PageSequence
from kvloom.engine.sampling import Finish, SamplingRequest

from .token_index import TokenIndex

__all__ = ["DraftedRequest", "Proposer"]


class DraftedRequest(SamplingRequest, Protocol):
    """The part of a request that speculation reads and writes."""

    control: CacheControl
    sequence: PageSequence | None
    limit: int
    inflight_tokens: int
    computed: int
    finish_reason: Finish | None
    token_index: TokenIndex | None
    draft_tokens: int
    accepted_tokens: int

    @property
    def output_count(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def mask_pending(self) -> bool: ...


class Proposer(Protocol):
    """Proposes draft tokens. Wrong drafts cost time, never correctness."""

    name: str

    def propose(self, requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[list[int]]:
        """Return up to `counts[i]` tokens that may follow all tokens of `requests[i]`; an empty list if it has no guess."""
        ...

    def request_finished(self, request: DraftedRequest) -> None:
        """Learn from a finished request, and drop what was kept for it."""
        ...

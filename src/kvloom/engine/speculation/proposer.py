"""The interface of proposers, which guess the next tokens of requests."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import CacheControl, Sequence as PageSequence
from kvloom.engine.sampling import Finish, SamplingRequest
from kvloom.models.paged import Work

from .controller import Estimate
from .draft import Draft
from .token_index import TokenIndex

__all__ = ["DraftRunner", "DraftedRequest", "Proposer"]


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
    draft_missing: int | None
    estimates: dict[str, Estimate]
    is_long: bool

    @property
    def output_count(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def mask_pending(self) -> bool: ...


class DraftRunner(Protocol):
    """The part of a model runner that runs a draft model."""

    chosen: torch.Tensor
    tokens: int

    def run(self, works: Sequence[Work], wanted: Sequence[int] | None = None) -> torch.Tensor: ...
    def generate(
        self, works: Sequence[Work], counts: Sequence[int], last_too: bool
    ) -> npt.NDArray[np.int64] | None: ...


class Proposer(Protocol):
    """Proposes draft tokens. Wrong drafts cost time, but never change the output."""

    name: str
    is_lookup: bool
    """Whether the proposer only searches tokens on the host, without the device and without pages."""

    def propose(
        self, requests: Sequence[DraftedRequest], counts: Sequence[int]
    ) -> Sequence[list[int] | Draft]:
        """Return, for each request i, at most `counts[i]` tokens that may follow its tokens. A list of tokens is a
        chain, and a `Draft` may be a tree. An empty list means that there is no draft."""
        ...

    def request_finished(self, request: DraftedRequest) -> None:
        """Record the tokens of a finished request for later proposals, and drop the data that was stored for the
        request."""
        ...

    def step_computed(self, work: Sequence[tuple[DraftedRequest, Work]], own: Set[int]) -> None:
        """Process a step that the target has launched, before the cache commits its tokens. `own` contains the `id` of
        each request whose draft this proposer made.
        """
        ...

    def draft_verified(self, request: DraftedRequest, drafted: int, accepted: int, own: bool) -> None:
        """Record how many tokens of a request's draft were accepted. `own` states that this proposer made the
        draft."""
        ...

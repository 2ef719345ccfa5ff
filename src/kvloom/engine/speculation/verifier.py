"""Verification: which draft tokens are the ones that the sampler chooses without a draft.

    position        0           1            …   k
    input           last token  draft 1          draft k
    sampled         t0          t1               tk           the sampler's choice after the input
    accepted        t0          t1 if t0 = draft 1, t2 if also t1 = draft 2, …

Position j samples with the request's seed and the number of tokens before it, after penalties, masks and the grammar
for the tokens before it. An accepted token is therefore the token that plain decoding samples. A draft of fixed tokens
is accepted with the target's own probability, which is what rejection sampling does with a point mass. A draft model
samples with the same noise (`noise.py`), so that both choose the same token if their distributions agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvloom.engine.sampling import GrammarState, SamplingParams, SamplingRequest, TokenCounts

from .proposer import DraftedRequest

__all__ = ["NO_DRAFT", "Draft", "DraftPosition", "accepted_places", "draft_positions"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens of a request, and its state in the grammar after each of them, if it has one."""

    tokens: list[int]
    structures: list[GrammarState] = field(default_factory=list)


NO_DRAFT = Draft([])


class DraftPosition:
    """A request after some tokens of its draft, as the sampler sees it."""

    __slots__ = (
        "params",
        "prompt",
        "sampled_tokens",
        "seed",
        "structure",
        "token_counts",
        "tokens",
        "top_logprobs",
    )

    def __init__(self, request: DraftedRequest, draft: Draft, count: int) -> None:
        self.prompt: tuple[int, ...] = request.prompt
        self.params: SamplingParams = request.params
        self.seed: int = request.seed
        self.top_logprobs: int = request.top_logprobs
        self.tokens: list[int] = request.tokens
        if request.params.needs_last_token:
            self.tokens = request.tokens + draft.tokens[:count]
        counts = request.token_counts
        self.token_counts: TokenCounts | None = None if counts is None else counts.copy()
        self.structure: GrammarState | None = draft.structures[count - 1] if draft.structures else None
        self.sampled_tokens: int = request.sampled_tokens + count


def draft_positions(
    requests: Sequence[DraftedRequest], drafts: Sequence[Draft]
) -> tuple[list[SamplingRequest], list[int]]:
    """Return a row for each position of each request, and the number of tokens sampled before it."""
    rows: list[SamplingRequest] = []
    for request, draft in zip(requests, drafts, strict=True):
        rows.append(request)
        rows += [DraftPosition(request, draft, count) for count in range(1, len(draft.tokens) + 1)]
    return rows, [row.sampled_tokens - 1 for row in rows]


def accepted_places(tokens: Sequence[int], drafts: Sequence[Draft]) -> list[range]:
    """Return, for each request, the places of its accepted tokens among the sampled `tokens`: at least one."""
    places, start = [], 0
    for draft in drafts:
        count = 0
        while count < len(draft.tokens) and draft.tokens[count] == tokens[start + count]:
            count += 1
        places.append(range(start, start + count + 1))
        start += len(draft.tokens) + 1
    return places

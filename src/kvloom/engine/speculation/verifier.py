"""Verification: accepts the draft tokens that the sampler would also choose without a draft.

    position        0           1            …   k
    input           last token  draft 1          draft k
    sampled         t0          t1               tk           the sampler's choice after the input
    accepted        t0          t1 if t0 = draft 1, t2 if also t1 = draft 2, …

In a tree, the sampler also chooses one token after each node. Verification starts at the last token, and goes to the
child that equals the sampled token, until no child equals it.

Sampling at position j uses the request's seed and the number of tokens before the position. Penalties, masks and
grammar are applied for the tokens before the position. An accepted token is therefore the token that plain decoding
samples.

- A lookup does not use the sampler's noise. Its draft token is accepted with the target's probability of this token, as
  in rejection sampling.
- A draft model samples with the same noise as the target (`noise.py`). If the distributions of both models agree, both
  choose the same token.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.engine.sampling import GrammarState, SamplingParams, SamplingRequest, TokenCounts

from .draft import Draft
from .proposer import DraftedRequest

__all__ = ["DraftPosition", "accepted_places", "draft_positions"]


class DraftPosition:
    """Stands for a request in the sampler, as if the draft tokens up to `node` were already accepted. The sampler then
    chooses the token that follows them. A `node` of -1 is the request's last token.
    """

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

    def __init__(self, request: DraftedRequest, draft: Draft, node: int) -> None:
        path = draft.path(node)
        self.prompt: tuple[int, ...] = request.prompt
        self.params: SamplingParams = request.params
        self.seed: int = request.seed
        self.top_logprobs: int = request.top_logprobs
        self.tokens: list[int] = request.tokens
        if request.params.needs_last_token:
            self.tokens = request.tokens + [draft.tokens[i] for i in path]
        counts = request.token_counts
        self.token_counts: TokenCounts | None = None if counts is None else counts.copy()
        self.structure: GrammarState | None = draft.structures[node] if draft.structures else None
        self.sampled_tokens: int = request.sampled_tokens + len(path)


def draft_positions(
    requests: Sequence[DraftedRequest], drafts: Sequence[Draft]
) -> tuple[list[SamplingRequest], list[int]]:
    """Return the inputs of the sampler, one for each position of each request. Also return, for each input, the
    number of output tokens before it."""
    rows: list[SamplingRequest] = []
    for request, draft in zip(requests, drafts, strict=True):
        rows.append(request)
        rows += [DraftPosition(request, draft, node) for node in range(len(draft.tokens))]
    return rows, [row.sampled_tokens - 1 for row in rows]


def accepted_places(tokens: Sequence[int], drafts: Sequence[Draft]) -> list[list[int]]:
    """Return, for each request, the indexes of its accepted tokens in the sampled `tokens`. The first is always the
    token that was sampled after the request's last token."""
    places, start = [], 0
    for draft in drafts:
        end = start + len(draft.tokens) + 1
        places.append([start, *(start + 1 + node for node in draft.follow(tokens[start:end]))])
        start = end
    return places

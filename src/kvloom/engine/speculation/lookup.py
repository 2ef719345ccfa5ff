"""Proposers without weights. They find an earlier occurrence of the last tokens, and propose the tokens after it.

| proposer | searches                                                              | useful for                   |
|----------|-----------------------------------------------------------------------|------------------------------|
| ngram    | the request's own prompt and output                                   | summaries, edits, extraction |
| suffix   | the same, and past answers to the same tenant, adapter and cache salt | repeated tasks, agents, code |
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set

from kvloom.models.paged import Work

from .proposer import DraftedRequest
from .token_index import LONGEST_MATCH, TokenIndex

__all__ = ["NGramProposer", "SuffixProposer"]

MOST_PAST_TOKENS = 1 << 18
"""Past answers of a tenant, adapter and cache salt are indexed in two generations. If the newer generation has more
than this many tokens, the older one is dropped and a new one begins."""
MOST_TOTAL_TOKENS = 8 * MOST_PAST_TOKENS
"""If all past answers have more tokens than this, those of the tenant, adapter and cache salt that finished a request
longest ago are dropped."""
SEPARATOR = (1 << 21) - 1
"""Separates two past answers in an index. No token has this id, so a match never spans two answers."""


class NGramProposer:
    """Proposes the tokens after the longest earlier match in the request's own tokens (prompt lookup)."""

    name = "ngram"
    is_lookup = True

    def __init__(self, min_match: int = 0) -> None:
        """`min_match` is the smallest length of a match in tokens. If the match is shorter, this proposer makes no
        draft, and the next proposer is tried."""
        self._min_match = min_match

    def propose(self, requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[list[int]]:
        """Propose drafts (see `Proposer`). Takes about 10 µs per request."""
        return [
            self._long_enough(*self._propose(request, count))
            for request, count in zip(requests, counts, strict=True)
        ]

    def request_finished(self, request: DraftedRequest) -> None:
        request.token_index = None

    def step_computed(self, work: Sequence[tuple[DraftedRequest, Work]], own: Set[int]) -> None:
        pass

    def draft_verified(self, request: DraftedRequest, drafted: int, accepted: int, own: bool) -> None:
        pass

    def _long_enough(self, draft: list[int], match: int) -> list[int]:
        return draft if match >= self._min_match else []

    def _propose(self, request: DraftedRequest, count: int) -> tuple[list[int], int]:
        """Return a draft, and the length of the match before it."""
        index = request.token_index
        if index is None:
            index = request.token_index = TokenIndex()
        index.add(request.tokens[len(index.tokens) :])
        at, length = index.longest_match(request.tokens[-LONGEST_MATCH:], own=True)
        if not length:
            return [], 0
        draft = request.tokens[at : at + count]
        # The match reaches the last token, so continue with the tokens drafted so far.
        while len(draft) < count:
            draft += draft[: count - len(draft)]
        return draft, length


class SuffixProposer(NGramProposer):
    """Searches the request's own tokens, like `NGramProposer`, and past answers. Uses the longer match."""

    name = "suffix"

    def __init__(self, min_match: int = 0) -> None:
        super().__init__(min_match)
        self._past: OrderedDict[tuple[str, str, str], list[TokenIndex]] = OrderedDict()
        self._past_tokens = 0

    def propose(self, requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[list[int]]:
        """Propose drafts (see `Proposer`). Takes about 20 µs per request."""
        return [self._longest(request, count) for request, count in zip(requests, counts, strict=True)]

    def request_finished(self, request: DraftedRequest) -> None:
        super().request_finished(request)
        if not request.control.store or not request.output_count:
            return
        owner = _owner(request)
        generations = self._past.setdefault(owner, [TokenIndex()])
        self._past.move_to_end(owner)
        # Past answers are indexed together with the end of their prompts, so that a match may begin in a prompt.
        start = max(0, len(request.prompt) - LONGEST_MATCH)
        answer = [*request.tokens[start:], SEPARATOR]
        generations[-1].add(answer)
        self._past_tokens += len(answer)
        if len(generations[-1].tokens) > MOST_PAST_TOKENS:
            generations.append(TokenIndex())
            self._drop(generations[:-2])
            del generations[:-2]
        while self._past_tokens > MOST_TOTAL_TOKENS and len(self._past) > 1:
            self._drop(self._past.popitem(last=False)[1])

    def _drop(self, indexes: Sequence[TokenIndex]) -> None:
        self._past_tokens -= sum(len(index.tokens) for index in indexes)

    def _longest(self, request: DraftedRequest, count: int) -> list[int]:
        draft, best = self._propose(request, count)
        tail = request.tokens[-LONGEST_MATCH:]
        for index in reversed(self._past.get(_owner(request), [])):
            at, length = index.longest_match(tail, own=False)
            if length > best:
                draft, best = index.tokens[at : at + count], length
                if SEPARATOR in draft:
                    del draft[draft.index(SEPARATOR) :]
        return self._long_enough(draft, best)


def _owner(request: DraftedRequest) -> tuple[str, str, str]:
    """Return the tenant, adapter and cache salt of a request. A request gets drafts only from answers with the same
    three values. Otherwise a faster answer would reveal what others have generated."""
    control = request.control
    return control.tenant, control.adapter, control.salt

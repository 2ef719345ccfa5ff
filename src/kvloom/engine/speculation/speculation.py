"""Speculation of one engine: asks the proposer for drafts, and counts what became of them.

A step with drafts is finished before the next is scheduled: the next input of such a request is known only then. The
same rule holds for grammars and penalties.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvloom.engine.sampling import collect

from .lookup import NGramProposer, SuffixProposer
from .proposer import DraftedRequest, Proposer
from .verifier import Draft

__all__ = ["Speculation", "SpeculationStats", "lookup_proposer"]

DRAFT_TOKENS = {False: 8, True: 4}
"""Default draft tokens at most, by whether a draft model proposes them."""
MASK_SECONDS = 0.01
"""Longest wait for the grammar masks of drafts. A draft whose masks are late is dropped."""


@dataclass(slots=True)
class SpeculationStats:
    """What became of drafts. `proposed` and `accepted` count draft tokens by position in the draft."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int) -> None:
        """Count one verified draft."""
        while len(self.proposed) < drafted:
            self.proposed.append(0)
            self.accepted.append(0)
        for i in range(drafted):
            self.proposed[i] += 1
            self.accepted[i] += i < accepted
        self.rows += 1
        self.tokens += accepted + 1


class Speculation:
    """Proposes drafts for the running requests. `rows` limits the positions at which a step samples."""

    def __init__(self, proposer: Proposer, draft_tokens: int | None, ends: Iterable[int], rows: int) -> None:
        self.proposer, self.rows = proposer, rows
        self.draft_tokens = draft_tokens or DRAFT_TOKENS[proposer.name == "draft"]
        self.ends = frozenset(ends)
        self.stats = SpeculationStats()

    def waits_for(self, requests: Iterable[DraftedRequest]) -> bool:
        """Whether the tokens of `requests` must be on the host before the next step is scheduled."""
        return any(refusal(request) is None for request in requests)

    def propose(self, running: Sequence[DraftedRequest]) -> dict[int, Draft]:
        """Return the drafts of the next step by request (`id`). A draft never exceeds `max_tokens` or the step's rows."""
        requests, counts = [], []
        left = self.rows - len(running)
        for request in running:
            count = min(self.draft_tokens, left, self._most(request))
            if count > 0:
                requests.append(request)
                counts.append(count)
                left -= count
        if not requests:
            return {}
        proposed = self.proposer.propose(requests, counts)
        drafts = {
            id(request): draft
            for request, tokens in zip(requests, proposed, strict=True)
            if (draft := self._checked(request, tokens)).tokens
        }
        self._await_masks(list(drafts.values()))
        return {key: draft for key, draft in drafts.items() if draft.tokens}

    def _most(self, request: DraftedRequest) -> int:
        """Return the longest draft that a request may get now; 0 if it gets none."""
        sequence = request.sequence
        if sequence is None or request.inflight_tokens or request.pending != 1 or not request.output_count:
            return 0
        if request.mask_pending or refusal(request) is not None:
            return 0
        most = request.limit - len(request.tokens) - 1
        if sequence.cache.has_states and most > 0:
            # A snapshot needs the states at exactly its position: a step whose certain tokens end there.
            ahead = [request.limit - 1]
            if (position := sequence.next_checkpoint) is not None:
                ahead.append(position)
            certain = sequence.length + 1
            most = min([most, *(position - certain - 1 for position in ahead if position > certain)])
        return most

    def _checked(self, request: DraftedRequest, tokens: list[int]) -> Draft:
        """Return a draft without tokens after an end of the output, and start its way through the grammar."""
        params, structure = request.params, request.structure
        ends = self.ends | set(params.stop_token_ids)
        end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        if structure is None:
            return Draft(tokens[: end + 1])
        states = structure.follow(tokens[:end])
        return Draft(tokens[: len(states)], states)

    @staticmethod
    def _await_masks(drafts: Sequence[Draft]) -> None:
        """Wait a short time for the masks of drafts; cut each draft at the first token that its grammar refuses."""
        states = [state for draft in drafts for state in draft.structures]
        if not states:
            return
        collect(states, MASK_SECONDS)
        for draft in drafts:
            good = 0
            for state in draft.structures:
                if state.pending or state.done:
                    break
                good += 1
            if draft.structures:
                del draft.tokens[good:], draft.structures[good:]

    def step_verified(
        self, requests: Sequence[DraftedRequest], before: Sequence[int], drafts: Sequence[Draft]
    ) -> None:
        """Count the drafts of a finished step, and learn from finished requests.

        `before` are the tokens of each request before the step; `drafts` is empty for a step without drafts."""
        self.stats.steps += bool(drafts)
        for place, draft in enumerate(drafts):
            request, drafted = requests[place], len(draft.tokens)
            added = len(request.tokens) - before[place]
            if drafted and added:
                accepted = added - 1
                self.stats.count(drafted, accepted)
                request.draft_tokens += drafted
                request.accepted_tokens += accepted
                if request.finish_reason is None:
                    self.proposer.draft_verified(request, drafted, accepted)
        for request in requests:
            if request.finish_reason is not None:
                self.proposer.request_finished(request)


def lookup_proposer(how: str) -> Proposer:
    """Return the proposer without weights that a setting names: "ngram" or "suffix"."""
    return SuffixProposer() if how == "suffix" else NGramProposer()


def refusal(request: DraftedRequest) -> str | None:
    """Return why a request is never speculated for; None if it may be."""
    if request.params.beam_width > 1:
        return "beam search chooses among beams, not along one"
    if request.params.pooling is not None:
        return "an embedding has no output"
    return None

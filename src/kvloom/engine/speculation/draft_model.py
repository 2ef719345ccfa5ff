"""The draft model proposer: a small model with the same vocabulary guesses, token by token.

The layers of the draft model are layer groups of the target's pool. A block has pages of both models, which are hashed,
cached, evicted and offloaded together. A hit therefore gives both models their K and V. In return, the draft model must
compute every token that the target computes:

    prompt tokens          in the target's step
    tokens of own drafts   while the draft is proposed
    other output tokens    with tiers: in the target's step; without tiers: together, before the next draft

To propose a draft of k tokens, the draft model runs k times. The tokens stay on the device in between. With
tiers, one more run computes the last draft token.

    run 0: the request's last token → d1     run 1: d1 → d2     …     run k-1: dk-1 → dk

Draft tokens are sampled with the same parameters and noise as the target's tokens. If the distributions of
both models agree, both models choose the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
import torch

from kvloom.engine.sampling import Sampler, SamplingRequest
from kvloom.models.loading import load
from kvloom.models.paged import Work
from kvloom.models.specs import folder_of

from .draft import NO_DRAFT, Draft
from .proposer import DraftedRequest, DraftRunner
from .verifier import DraftPosition

__all__ = ["DraftModelProposer", "SampledRow", "load_draft"]

UNKNOWN = np.array([-1])


def load_draft(name: str, target: Any) -> Any:
    """Load a draft model on the device and in the dtype of `target`. Raises ValueError if the vocabularies differ."""
    weight = next(target.parameters())
    draft, _ = load(folder_of(name), weight.dtype, weight.device)
    sizes = [len(model.get_input_embeddings().weight) for model in (draft, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"draft model {name} has {sizes[0]} tokens in its vocabulary, the target {sizes[1]}: "
            "use a draft model with the same tokenizer"
        )
    return draft


class DraftModelProposer:
    """Proposes drafts with a draft model. `apply_copies` runs the pending copies of the pool."""

    name = "draft"
    is_lookup = False

    def __init__(
        self,
        runner: DraftRunner,
        sampler: Sampler,
        apply_copies: Callable[[], None],
        sampled: torch.Tensor,
        complete: bool,
    ) -> None:
        """`sampled` are the target's tokens of the previous step, on the device.

        With `complete`, the draft model computes every token at once, because tiers store the pages of both models.
        Without `complete`, it computes some tokens only before the next draft: the last token of a draft, and output
        tokens that were not drafted.
        """
        self._runner, self._sampler, self._apply_copies = runner, sampler, apply_copies
        self._sampled, self._complete = sampled, complete
        self._runs_after_draft = int(complete)  # one more run computes the last token of a draft

    def propose(
        self, requests: Sequence[DraftedRequest], counts: Sequence[int]
    ) -> Sequence[list[int] | Draft]:
        """Propose drafts (see `Proposer`). Reserves pages for the drafts. If the pool lacks pages for a request,
        the request gets no draft."""
        found = [
            (place, request, count)
            for place, (request, count) in enumerate(zip(requests, counts, strict=True))
            if request.sequence is not None and not request.sequence.extend(1 + count)
        ]
        drafts: list[list[int]] = [[] for _ in requests]
        if not found:
            return drafts
        self._apply_copies()
        self._catch_up([request for _, request, _ in found])
        order = sorted(found, key=lambda one: -one[2])  # requests with the longest drafts first
        rows: list[SamplingRequest] = [SampledRow(request) for _, request, _ in order]
        greedy = all(_is_plain(request) for _, request, _ in order)
        first = [self._work(request, 0, place) for place, (_, request, _) in enumerate(order)]
        if greedy:
            made = self._runner.generate(first, [count for _, _, count in order], self._complete)
            if made is not None:
                for (place, _, count), tokens in zip(order, made.tolist(), strict=True):
                    drafts[place] = tokens[:count]
                return drafts
        chosen: list[torch.Tensor] = []
        for step in range(order[0][2] + self._runs_after_draft):
            going = [one for one in order if one[2] + self._runs_after_draft > step]
            works = first
            if step:
                works = [self._work(request, step, place) for place, (_, request, _) in enumerate(going)]
            active = sum(one[2] > step for one in going)
            logits = self._runner.run(works, range(active))
            if not active:
                break
            if greedy:
                tokens = logits.argmax(-1)
            else:
                before = [request.sampled_tokens + step for _, request, _ in going[:active]]
                tokens = self._sampler.choose(logits, rows[:active], before).tokens
            self._runner.chosen[:active] = tokens
            chosen.append(tokens)
        values = iter(torch.cat(chosen).tolist())
        for tokens in chosen:
            for place, _, _ in order[: len(tokens)]:
                drafts[place].append(next(values))
        return drafts

    def request_finished(self, request: DraftedRequest) -> None:
        pass

    def step_computed(self, work: Sequence[tuple[DraftedRequest, Work]], own: Set[int]) -> None:
        """Compute the prompt tokens of a launched step with the draft model.

        If the proposer is `complete`, also compute the step's output tokens, and the drafts of other proposers.
        Otherwise record that the draft model lacks them. `own` are the requests with drafts of this proposer.
        """
        self._compute([(request, part) for request, part in work if id(request) not in own])

    def _compute(self, work: Sequence[tuple[DraftedRequest, Work]]) -> None:
        works = []
        for request, part in work:
            if not part.new_tokens or request.is_long:
                continue
            if request.output_count and not self._complete:
                self._lacks(request, request.computed)
                continue
            works.append(
                Work(part.sequence, part.tokens[part.recomputed :], part.source, parents=part.parents)
            )
        if any(part.source >= 0 for part in works):
            self._runner.chosen.copy_(self._sampled)
        if works:
            self._runner.run(works, [])

    @staticmethod
    def _lacks(request: DraftedRequest, start: int) -> None:
        """Record that the draft model lacks the tokens of a request from `start` on."""
        missing = request.draft_missing
        request.draft_missing = start if missing is None else min(start, missing)

    def _catch_up(self, requests: Sequence[DraftedRequest]) -> None:
        """If the tokens that the draft model lacks are too many for one run, compute them now. Otherwise the first run
        of the next draft computes them.
        """
        lacking = [request for request in requests if request.draft_missing is not None]
        if sum(request.computed - (request.draft_missing or 0) for request in lacking) <= self._runner.tokens:
            return
        for request in lacking:
            sequence, start = request.sequence, request.draft_missing
            assert sequence is not None
            assert start is not None
            for begin in range(start, request.computed, self._runner.tokens):
                tokens = np.array(request.tokens[begin : request.computed][: self._runner.tokens])
                recomputed = request.computed - begin
                self._runner.run([Work(sequence, tokens, recomputed=recomputed, rewrites=True)], [])
            request.draft_missing = None

    def draft_verified(self, request: DraftedRequest, drafted: int, accepted: int, own: bool) -> None:
        """If this proposer made the draft (`own`) and all its tokens were accepted, record that the draft model
        lacks the last token of the draft. Does nothing if the proposer is `complete`."""
        if own and accepted == drafted and not self._complete:
            self._lacks(request, request.computed - 1)

    def _work(self, request: DraftedRequest, step: int, place: int) -> Work:
        """Return the input of a request for run `step` of the draft model. Run 0 computes the tokens that the draft
        model lacks, and the request's last token. Each later run computes the token that the previous run sampled
        for the request. `place` is the index of this token among the sampled tokens.
        """
        sequence = request.sequence
        assert sequence is not None
        if step:
            return Work(sequence, UNKNOWN, place, skipped=step)
        start = request.computed
        if request.draft_missing is not None:
            start, request.draft_missing = min(start, request.draft_missing), None
        tokens = np.array(request.tokens[start:])
        return Work(sequence, tokens, recomputed=request.computed - start, rewrites=True)


class SampledRow(DraftPosition):
    """A request in the form that the draft model's sampler takes. It has no grammar."""

    __slots__ = ()

    def __init__(self, request: DraftedRequest) -> None:
        super().__init__(request, NO_DRAFT, -1)
        self.structure = None


def _is_plain(request: DraftedRequest) -> bool:
    """Return whether sampling for a request simply selects the token with the largest logit."""
    params = request.params
    return params.greedy and not (
        params.has_penalties or params.logit_bias or params.allowed_token_ids or params.bad_token_ids
    )

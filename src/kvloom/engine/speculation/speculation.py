"""Speculation of one engine: requests drafts from the proposers, and counts proposed and accepted tokens.

The next step is scheduled only after a step with drafts has finished, because the next input of a request depends on
its accepted tokens. After a step with grammars or penalties, the next step is also scheduled only when the step has
finished.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from kvloom.engine.sampling import collect
from kvloom.models.paged import Work

from .controller import Controller
from .draft import Draft
from .proposer import DraftedRequest, Proposer

__all__ = ["Speculation", "SpeculationStats", "longest_draft"]

R = TypeVar("R")
DRAFT_TOKENS = {"draft": 4, "mtp": 3, "eagle": 4, "ngram": 16, "suffix": 16}
"""Default of the largest number of tokens in a draft, by proposer."""
OTHER_DRAFT_TOKENS = 8
HEADS = ("mtp", "eagle")
"""The proposers that can draft trees."""
TRIAL_REQUESTS = 16
"""Largest number of requests that get drafts of a lookup before any of its drafts was verified."""
REVIEW_SECONDS, REVIEWED_TOKENS = 0.001, 4
"""Limits of one review (see `_review`) of a lookup that is off: its longest time, and the number of draft tokens that
it compares per request."""
MASK_SECONDS = 0.01
"""Longest wait for the grammar masks of drafts, in seconds. A draft whose masks are late is dropped."""


def longest_draft(proposers: Iterable[str], draft_tokens: int | None, tree_nodes: int = 0) -> int:
    """Return the largest number of tokens in a draft. `proposers` are named as in the settings, like "draft=MODEL".
    MTP and EAGLE heads propose trees of `tree_nodes` tokens, or chains if it is 0."""
    kinds = [name.partition("=")[0] for name in proposers]
    if draft_tokens is not None:
        return max(draft_tokens, tree_nodes) if kinds else 0
    return max([tree_nodes, *(DRAFT_TOKENS.get(kind, OTHER_DRAFT_TOKENS) for kind in kinds)])


@dataclass(slots=True)
class SpeculationStats:
    """Counts of verified drafts.

    | field                  | meaning                                                                             |
    |------------------------|-------------------------------------------------------------------------------------|
    | `steps`                | number of steps with drafts                                                         |
    | `rows`                 | number of drafts                                                                    |
    | `tokens`               | output tokens from these drafts: the accepted tokens, and one sampled token a draft |
    | `proposed`, `accepted` | number of draft tokens by position in the draft (depth in a tree)                   |"""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    proposing_seconds: float = 0.0
    seconds_saved: float = 0.0
    """Estimate of the saved seconds: the time of plain steps for the same tokens, minus the time of the steps with
    drafts."""

    def count(self, draft: Draft, accepted: int) -> None:
        """Count one verified draft."""
        for depth in draft.depths:
            while len(self.proposed) < depth:
                self.proposed.append(0)
                self.accepted.append(0)
            self.proposed[depth - 1] += 1
        for i in range(accepted):
            self.accepted[i] += 1
        self.rows += 1
        self.tokens += accepted + 1


class Speculation:
    """Proposes drafts for the running requests. A request gets the draft of the first proposer that has one for it.

    A step samples at most at `rows` positions. A draft has at most `draft_tokens` tokens (None means DRAFT_TOKENS). If
    `tree_nodes` is not 0, heads draft trees of up to this many tokens. With `is_fixed`, every draft has the largest
    length."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        draft_tokens: int | None,
        ends: Iterable[int],
        rows: int,
        tree_nodes: int = 0,
        is_fixed: bool = False,
    ) -> None:
        self.proposers, self.rows = list(proposers), rows
        self.draft_tokens, self.tree_nodes = draft_tokens, tree_nodes
        self.ends = frozenset(ends)
        self.stats = SpeculationStats()
        lookups = [proposer.name for proposer in proposers if proposer.is_lookup]
        self.controller: Controller | None = None if is_fixed else Controller(lookups)
        """Decides the lengths of drafts. Without a controller (None), every draft has the largest length."""
        self._new_tokens = 0  # tokens that the last finished step added
        self._proposing = 0.0  # seconds of proposers since the last finished step
        self._proposed_by: dict[int, Proposer] = {}  # the proposer of each draft in the last step, by request
        self._waited = False  # whether the engine waited for the previous step
        self._reviewed = 0  # number of requests reviewed so far

    def waits_for(self, requests: Iterable[DraftedRequest]) -> bool:
        """Return whether the tokens of `requests` must be on the host before the next step is scheduled."""
        self._waited = (self.controller is None or self.controller.wants_drafts) and any(
            refusal(request) is None for request in requests
        )
        return self._waited

    def propose(self, running: Sequence[DraftedRequest]) -> dict[int, Draft]:
        """Return the drafts of the next step by the `id` of the request. A draft never exceeds the `max_tokens` of
        its request. All drafts fit into the positions at which the step can sample."""
        if self.controller is not None:
            due = self.controller.step_begins([request.estimates for request in running])
            for proposer in self.proposers:
                if proposer.name in due:
                    self._review(self.controller, proposer, running)
            if not self.controller.wants_drafts:
                return {}
        left, drafts = self.rows - len(running), {}
        waiting = [(request, most) for request in running if (most := self._most(request)) > 0]
        self._proposed_by = {}
        others = sum(1 for request in running if request.pending == 1) - len(waiting)
        for proposer in self.proposers:
            if not waiting or left < 1:
                break
            made = self._ask(proposer, waiting, left, others)
            for request, proposal in made:
                given = proposal if isinstance(proposal, Draft) else Draft(proposal)
                if (draft := self._checked(request, given)).tokens:
                    drafts[id(request)] = draft
                    self._proposed_by[id(request)] = proposer
                    left -= len(draft.tokens)
            others += len(drafts)
            waiting = [one for one in waiting if id(one[0]) not in drafts]
        self._await_masks(drafts)
        return {key: draft for key, draft in drafts.items() if draft.tokens}

    @property
    def longest(self) -> int:
        """The largest number of draft tokens of a request in one step, by the last decisions of the controller."""
        if self.controller is not None:
            return max(self.controller.longest.values(), default=0)
        return max((self._longest_of(proposer) for proposer in self.proposers), default=0)

    def _longest_of(self, proposer: Proposer) -> int:
        """Return the largest number of draft tokens that a proposer may give a request in one step."""
        if self.tree_nodes and proposer.name in HEADS:
            return self.tree_nodes
        return self.draft_tokens or DRAFT_TOKENS.get(proposer.name, OTHER_DRAFT_TOKENS)

    def _ask(
        self, proposer: Proposer, waiting: list[tuple[DraftedRequest, int]], left: int, others: int
    ) -> list[tuple[DraftedRequest, list[int] | Draft]]:
        """Return the drafts of one proposer. The controller chooses their lengths. `waiting` has the requests without
        a draft, each with the length of its longest possible draft. All drafts together have at most `left` tokens.
        `others` is the number of tokens of other requests in the step."""
        longest = self._longest_of(proposer)
        most, controller = [min(longest, n) for _, n in waiting], self.controller
        if controller is None:
            lengths = Controller.share(most, left)
        else:
            if proposer.is_lookup and not controller.acceptance.knows(proposer.name):
                waiting, most = waiting[:TRIAL_REQUESTS], most[:TRIAL_REQUESTS]
            estimates = [controller.acceptance.of(request.estimates, proposer.name) for request, _ in waiting]
            recomputes = any(
                request.sequence is not None and request.sequence.cache.has_states
                for request, _ in waiting[:1]
            )
            lengths = controller.lengths(proposer.name, estimates, most, left, others, recomputes)
        asked = [(request, n) for (request, _), n in zip(waiting, lengths, strict=True) if n]
        if not asked:
            return []
        if controller is not None and not proposer.is_lookup:
            for (request, _), n in zip(waiting, lengths, strict=True):
                if not n:
                    controller.acceptance.drift(request.estimates, proposer.name)
        started = time.perf_counter()
        made = proposer.propose([request for request, _ in asked], [n for _, n in asked])
        if controller is not None:
            taken = time.perf_counter() - started
            self._proposing += taken
            drafts = [one if isinstance(one, Draft) else Draft(one) for one in made]
            controller.observe_chances(proposer.name, drafts)
            has_trees = any(draft.chances for draft in drafts)
            longest = 1 if has_trees else max(len(draft.tokens) for draft in drafts)
            controller.observe_proposal(proposer.name, len(asked), longest, taken)
            self.stats.proposing_seconds += taken
            for (request, _), draft in zip(asked, drafts, strict=True):
                if not draft.tokens:
                    controller.acceptance.observe(request.estimates, proposer.name, 0, 0)
        return [(request, tokens) for (request, _), tokens in zip(asked, made, strict=True)]

    def _review(self, controller: Controller, proposer: Proposer, running: Sequence[DraftedRequest]) -> None:
        """Compare earlier drafts of a lookup that is off with the tokens that the requests have generated since. Make
        new drafts for the next comparison. Each call reviews only some requests, and the next call continues after
        them. The device computes nothing for a review.
        """
        started, shares = time.perf_counter(), []
        for _ in range(len(running)):
            self._reviewed += 1
            request = running[self._reviewed % len(running)]
            if not request.output_count or refusal(request) is not None:
                continue
            estimate = controller.acceptance.own(request.estimates, proposer.name)
            if estimate.unused is not None:
                start, draft = estimate.unused
                actual = request.tokens[start : start + len(draft)]
                if len(actual) < len(draft):
                    continue
                accepted = next((i for i, token in enumerate(actual) if token != draft[i]), len(draft))
                controller.acceptance.observe(request.estimates, proposer.name, len(draft), accepted)
                shares.append(accepted / len(draft) if draft else 0.0)
            [found] = proposer.propose([request], [REVIEWED_TOKENS])
            estimate.unused = len(request.tokens), found.tokens if isinstance(found, Draft) else found
            if time.perf_counter() - started > REVIEW_SECONDS:
                break
        if shares:
            controller.review(proposer.name, sum(shares) / len(shares))

    def _most(self, request: DraftedRequest) -> int:
        """Return the largest number of draft tokens that a request may get in the next step. 0 means no draft."""
        sequence = request.sequence
        if sequence is None or request.inflight_tokens or request.pending != 1 or not request.output_count:
            return 0
        if request.mask_pending or refusal(request) is not None:
            return 0
        most = request.limit - len(request.tokens) - 1
        if sequence.cache.has_states and most > 0:
            # A snapshot contains the states at exactly its position, so no draft may extend beyond this position.
            ahead = [request.limit - 1]
            if (position := sequence.next_checkpoint) is not None:
                ahead.append(position)
            certain = sequence.length + 1
            most = min([most, *(position - certain - 1 for position in ahead if position > certain)])
        return most

    def _checked(self, request: DraftedRequest, draft: Draft) -> Draft:
        """Return the draft without the tokens that follow an end token (an end-of-sequence or stop token). With a
        grammar, also remove the end token, and request the grammar masks after each remaining token.
        """
        params, structure, sequence = request.params, request.structure, request.sequence
        if draft.parents and sequence is not None and sequence.cache.has_states:
            draft = draft.best_path()  # each branch would need its own grammar state
        ends = self.ends | set(params.stop_token_ids)
        ending = {node for node, token in enumerate(draft.tokens) if token in ends}
        if structure is None:
            if ending:
                draft = draft.select(
                    {node for node in range(len(draft.tokens)) if draft.parent(node) not in ending}
                )
            return draft
        draft = draft.select(set(range(len(draft.tokens))) - ending)
        states = structure.follow(draft.tokens, draft.parents)
        return replace(draft.select(set(range(len(states)))), structures=states)

    @staticmethod
    def _await_masks(drafts: dict[int, Draft]) -> None:
        """Wait up to MASK_SECONDS for the masks of drafts. Remove the draft tokens that their grammar refuses, and the
        tokens after them."""
        states = [state for draft in drafts.values() for state in draft.structures]
        if not states:
            return
        collect(states, MASK_SECONDS)
        for key, draft in drafts.items():
            if draft.structures:
                good = {
                    node
                    for node, state in enumerate(draft.structures)
                    if not state.pending and not state.done
                }
                drafts[key] = draft.select(good)

    @staticmethod
    def add_trees(
        work: Sequence[tuple[R, Work]], drafts: dict[int, Draft], supported: bool
    ) -> list[tuple[R, Work]]:
        """Return the scheduled work, with the parents of each draft tree added. If the step does not support trees
        (`supported` is False), replace each tree by its best path instead, in the returned work and in `drafts`."""
        shaped = []
        for request, part in work:
            if part.drafts and (draft := drafts[id(request)]).parents:
                if supported:
                    part = part._replace(parents=draft.parents)
                else:
                    chain = drafts[id(request)] = draft.best_path()
                    tokens = np.concatenate((part.tokens[: -part.drafts], chain.tokens))
                    part = part._replace(tokens=tokens, drafts=len(chain.tokens))
            shaped.append((request, part))
        return shaped

    def step_computed(self, work: Sequence[tuple[DraftedRequest, Work]]) -> None:
        """Pass a launched step to the proposers, before its tokens are committed."""
        drafted = {id(request) for request, part in work if part.drafts}
        for proposer in self.proposers:
            own = {one for one in drafted if self._proposed_by.get(one) is proposer}
            proposer.step_computed(work, own)

    def observe_step(self, work: Sequence[tuple[DraftedRequest, Work]], seconds: float) -> None:
        """Pass the time of a finished step without prompts to the controller. `seconds` includes the time in which
        drafts were proposed.
        """
        own, self._proposing = seconds - self._proposing, 0.0
        if self.controller is None or not all(part.new_tokens == 1 for _, part in work):
            return
        drafted = any(part.drafts for _, part in work)
        tokens = sum(len(part.tokens) for _, part in work)
        self.controller.observe_step(tokens, own, drafted or self._waited)
        if drafted and self.controller.costs.knows(len(work)):
            plain = self.controller.costs.seconds(len(work))
            self.stats.seconds_saved += self._new_tokens / len(work) * plain - seconds

    def step_verified(
        self, requests: Sequence[DraftedRequest], before: Sequence[int], drafts: Sequence[Draft]
    ) -> None:
        """Count the drafts of a finished step, and pass finished requests to the proposers.

        `before` is the number of tokens of each request before the step. `drafts` is empty for a step without
        drafts."""
        self.stats.steps += bool(drafts)
        self._new_tokens = sum(map(len, (request.tokens for request in requests))) - sum(before)
        for place, draft in enumerate(drafts):
            request, drafted = requests[place], len(draft.tokens)
            added = len(request.tokens) - before[place]
            if drafted and added:
                accepted = added - 1
                self.stats.count(draft, accepted)
                request.draft_tokens += drafted
                request.accepted_tokens += accepted
                proposer = self._proposed_by[id(request)]
                if self.controller is not None:
                    self.controller.acceptance.observe_draft(
                        request.estimates, proposer.name, draft, accepted
                    )
                if request.finish_reason is None:
                    for one in self.proposers:
                        one.draft_verified(request, drafted, accepted, one is proposer)
        for request in requests:
            if request.finish_reason is not None:
                for one in self.proposers:
                    one.request_finished(request)


def refusal(request: DraftedRequest) -> str | None:
    """Return the reason why a request never gets drafts. None means that it may get drafts."""
    if request.params.beam_width > 1:
        return "beam search chooses among beams, not along one"
    if request.is_long:
        return "some of its pages are in host memory"
    if request.params.pooling is not None:
        return "an embedding has no output"
    return None

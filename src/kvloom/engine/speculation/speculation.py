"""Speculation of one engine: requests drafts from the proposers, and counts proposed and accepted tokens.

A step with drafts is finished before the next step is scheduled, because the next input of a request depends on its
accepted tokens. Steps with grammars or penalties are also finished first.
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
MASK_SECONDS = 0.01
"""Longest wait for the grammar masks of drafts. A draft whose masks are late is dropped."""


def longest_draft(proposers: Iterable[str], draft_tokens: int | None, tree_nodes: int = 0) -> int:
    """Return the largest number of tokens in a draft. `proposers` are named as in the settings, like "draft=MODEL".
    Heads draft trees of `tree_nodes` tokens, or chains if it is 0."""
    kinds = [name.partition("=")[0] for name in proposers]
    if draft_tokens is not None:
        return max(draft_tokens, tree_nodes) if kinds else 0
    return max([tree_nodes, *(DRAFT_TOKENS.get(kind, OTHER_DRAFT_TOKENS) for kind in kinds)])


@dataclass(slots=True)
class SpeculationStats:
    """Counts of verified drafts. `proposed` and `accepted` count draft tokens by position in the draft (depth in a
    tree)."""

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
    `tree_nodes` is not 0, heads draft trees of up to this many tokens."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        draft_tokens: int | None,
        ends: Iterable[int],
        rows: int,
        tree_nodes: int = 0,
    ) -> None:
        self.proposers, self.rows = list(proposers), rows
        self.draft_tokens, self.tree_nodes = draft_tokens, tree_nodes
        self.ends = frozenset(ends)
        self.stats = SpeculationStats()
        self.controller: Controller | None = Controller()
        """Decides the lengths of drafts. Without a controller (None), every draft has the largest length."""
        self._new_tokens = 0  # of the last finished step
        self._proposing = 0.0  # seconds of proposers since the last finished step
        self._proposed_by: dict[int, Proposer] = {}  # of the drafts in the last step, by request

    def waits_for(self, requests: Iterable[DraftedRequest]) -> bool:
        """Return whether the tokens of `requests` must be on the host before the next step is scheduled."""
        if self.controller is not None and not self.controller.wants_drafts:
            return False
        return any(refusal(request) is None for request in requests)

    def propose(self, running: Sequence[DraftedRequest]) -> dict[int, Draft]:
        """Return the drafts of the next step by request (`id`). A draft never exceeds the `max_tokens` of its request,
        and all drafts fit into the rows of the step."""
        if self.controller is not None:
            self.controller.step_begins([request.acceptance for request in running])
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

    def _ask(
        self, proposer: Proposer, waiting: list[tuple[DraftedRequest, int]], left: int, others: int
    ) -> list[tuple[DraftedRequest, list[int] | Draft]]:
        """Return the drafts of one proposer. The controller chooses their lengths."""
        longest = self.draft_tokens or DRAFT_TOKENS.get(proposer.name, OTHER_DRAFT_TOKENS)
        if self.tree_nodes and proposer.name in HEADS:
            longest = self.tree_nodes
        most, controller = [min(longest, n) for _, n in waiting], self.controller
        if controller is None:
            lengths = Controller.share(most, left)
        else:
            chances = [controller.acceptance.of(request.acceptance, proposer.name) for request, _ in waiting]
            replays = any(
                request.sequence is not None and request.sequence.cache.has_states
                for request, _ in waiting[:1]
            )
            lengths = controller.lengths(proposer.name, chances, most, left, others, replays)
        asked = [(request, n) for (request, _), n in zip(waiting, lengths, strict=True) if n]
        if not asked:
            return []
        started = time.perf_counter()
        made = proposer.propose([request for request, _ in asked], [n for _, n in asked])
        if controller is not None:
            taken = time.perf_counter() - started
            self._proposing += taken
            drafts = [one if isinstance(one, Draft) else Draft(one) for one in made]
            controller.observe_proposal(proposer.name, drafts, taken)
            self.stats.proposing_seconds += taken
        return [(request, tokens) for (request, _), tokens in zip(asked, made, strict=True)]

    def _most(self, request: DraftedRequest) -> int:
        """Return the largest number of draft tokens that a request may get in the next step. 0 means no draft."""
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

    def _checked(self, request: DraftedRequest, draft: Draft) -> Draft:
        """Return the draft without the tokens after one that ends the output. With a grammar, the end is removed, too,
        and the grammar masks after each draft token are requested.
        """
        params, structure, sequence = request.params, request.structure, request.sequence
        if draft.parents and sequence is not None and sequence.cache.has_states:
            draft = draft.best_path()  # branches would need a state each
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
        """Return scheduled work with the trees of its drafts. If the step does not support trees, replace each tree by
        its best path, also in `drafts`."""
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
        self.controller.observe_step(sum(len(part.tokens) for _, part in work), own)
        if any(part.drafts for _, part in work) and self.controller.costs.knows(len(work)):
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
                    self.controller.observe_draft(request.acceptance, proposer.name, draft, accepted)
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

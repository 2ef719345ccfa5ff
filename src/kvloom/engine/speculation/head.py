"""The head proposer: drafts from the target's hidden states (`kvloom.models.heads`).

A draft head proposes like a draft model, token by token, and its layer is a group of the target's pool. Two things
differ:

    input           the head also reads the hidden state of the token before, which the target's step has written
    own drafts      after its first draft token, a head continues from its own hidden states. When the target verifies
                    the draft, it replaces these hidden states, and the head computes the accepted tokens again

The pages of a head therefore depend only on the tokens. Drafts after a cache hit are as good as after a miss.

A head can also draft trees. Run d computes the most likely nodes of depth d, and gives the chances (probabilities) of
their children:

    run 0: the request's last token → children     run 1: its best children → grandchildren     …

Nodes are ranked by the product of the chances on their path, and the best nodes of all depths are the draft. A run
also computes the earlier nodes again, because the input of a request always contains the whole tree. After each run
the host reads the chances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
import torch

from kvloom.engine.sampling import Sampler
from kvloom.models.heads import Head, load_eagle_head, load_mtp_head
from kvloom.models.paged import Work

from .draft import Draft
from .draft_model import DraftModelProposer, SampledRow
from .proposer import DraftedRequest, DraftRunner

__all__ = ["HeadProposer", "load_head"]

MOST_CHILDREN = 10
"""Largest number of children of a node that are considered for a tree."""


def load_head(name: str, target: Any) -> Head:
    """Load a draft head for `target`. `name` is the proposer: `mtp` or `eagle=FOLDER`. Raises ModelError if there is no
    such head, or if it does not fit the target."""
    kind, _, folder = name.partition("=")
    return load_eagle_head(folder, target) if kind == "eagle" else load_mtp_head(target)


class HeadProposer(DraftModelProposer):
    """Proposes drafts with a draft head. `name` is the kind of head."""

    def __init__(
        self,
        name: str,
        runner: DraftRunner,
        sampler: Sampler,
        apply_copies: Callable[[], None],
        sampled: torch.Tensor,
        complete: bool,
        tree_depth: int = 0,
    ) -> None:
        """If `tree_depth` is not 0, the head drafts trees of up to this depth."""
        super().__init__(runner, sampler, apply_copies, sampled, complete)
        self.name = name
        self._runs_after_draft, self._tree_depth = 0, tree_depth

    def propose(
        self, requests: Sequence[DraftedRequest], counts: Sequence[int]
    ) -> Sequence[list[int] | Draft]:
        """Propose drafts (see `DraftModelProposer`). If the head drafts trees, `counts` has the largest number of
        nodes of each tree."""
        if not self._tree_depth:
            return super().propose(requests, counts)
        trees: list[_Tree | None] = [
            _Tree(request, count)
            if request.sequence is not None and not request.sequence.extend(1 + count)
            else None
            for request, count in zip(requests, counts, strict=True)
        ]
        found = [tree for tree in trees if tree is not None]
        if found:
            self._apply_copies()
            self._catch_up([tree.request for tree in found])
            works = [self._work(tree.request, 0, 0) for tree in found]
            self._add_children(found, self._runner.run(works), 0)
            for depth in range(1, self._tree_depth):
                grown = [tree for tree in found if tree.begin_depth(depth, self._tree_depth)]
                if not grown:
                    break
                self._add_children(grown, self._runner.run([tree.work() for tree in grown]), depth)
        return [[] if tree is None else tree.draft() for tree in trees]

    def _add_children(self, trees: list[_Tree], logits: torch.Tensor, depth: int) -> None:
        """Add the most likely children of each tree's current nodes. `logits` has one row for each of these nodes."""
        rows = [tree.row for tree in trees for _ in tree.current]
        before = [tree.request.sampled_tokens + depth for tree in trees for _ in tree.current]
        scores = self._sampler.scores(logits, rows, before).log_softmax(-1)
        chances, tokens = scores.topk(min(MOST_CHILDREN, scores.shape[1]))
        found = zip(*torch.stack((chances.double(), tokens.double())).tolist(), strict=True)  # one transfer
        for tree in trees:
            tree.add_children([next(found) for _ in tree.current], depth + 1)

    def step_computed(self, work: Sequence[tuple[DraftedRequest, Work]], own: Set[int]) -> None:
        """Compute the tokens of a launched step, like `DraftModelProposer`. `own` has the ids of the requests whose
        drafts this proposer made. These requests are skipped, unless the proposer is `complete`. A complete proposer
        computes the tokens of its own drafts again, because the target has replaced their hidden states.
        """
        self._compute([(request, part) for request, part in work if self._complete or id(request) not in own])

    def draft_verified(self, request: DraftedRequest, drafted: int, accepted: int, own: bool) -> None:
        """If this proposer made the draft (`own`), record that the head must compute the accepted tokens again. Does
        nothing if the proposer is `complete`, because `step_computed` has then computed them again already."""
        if own and accepted and not self._complete:
            self._lacks(request, request.computed - accepted)


class _Tree:
    """A draft tree while it grows. `nodes` are the candidates for the draft, each as (logarithm of its chance, index of
    its parent in `nodes`, token, depth). `computed` has the indexes in `nodes` of all nodes that the head computes, and
    `current` has the new nodes of the current run."""

    def __init__(self, request: DraftedRequest, count: int) -> None:
        self.request, self.row, self._count = request, SampledRow(request), count
        self.nodes: list[tuple[float, int, int, int]] = []
        self.computed: list[int] = []
        self.current: list[int] = [-1]
        self._least = -math.inf  # a candidate with a smaller chance cannot be part of the draft

    def add_children(self, children: list[tuple[list[float], list[float]]], depth: int) -> None:
        """Add candidates. `children` has one entry for each current node: the logarithms of the chances of its
        children, and their tokens. The most likely child is first."""
        for node, (chances, tokens) in zip(self.current, children, strict=True):
            before = self.nodes[node][0] if node >= 0 else 0.0
            for chance, token in zip(chances, tokens, strict=True):
                if before + chance <= self._least:
                    break
                self.nodes.append((before + chance, node, int(token), depth))

    def begin_depth(self, depth: int, deepest: int) -> bool:
        """Choose the nodes of a depth that the head computes next: those whose children may be part of the draft.
        Return whether there are any. Over all depths, the head computes at most as many nodes as a draft may have."""
        best = self._best()
        if len(best) == self._count:
            self._least = self.nodes[best[-1]][0]
        width = min(max(1, self._count // (deepest - 1)), self._count - len(self.computed))
        of_depth = [node for node in best if self.nodes[node][3] == depth]
        self.current = [node for node in of_depth if self.nodes[node][0] > self._least][:width]
        self.computed += self.current
        return bool(self.current)

    def work(self) -> Work:
        """Return the input of the head: all nodes in `computed`. The nodes of the current run come last."""
        index = {-1: -1} | {node: i for i, node in enumerate(self.computed)}
        assert self.request.sequence is not None
        return Work(
            self.request.sequence,
            np.array([self.nodes[node][2] for node in self.computed]),
            drafts=len(self.current) - 1,
            skipped=1,
            parents=tuple(index[self.nodes[node][1]] for node in self.computed),
        )

    def draft(self) -> Draft:
        """Return the most likely nodes. A node is never more likely than its parent, so its ancestors are included."""
        best = self._best()
        index = {-1: -1} | {node: i for i, node in enumerate(best)}
        parents = tuple(index[self.nodes[node][1]] for node in best)
        return Draft(
            [self.nodes[node][2] for node in best],
            parents=() if parents == tuple(range(-1, len(best) - 1)) else parents,
            chances=tuple(math.exp(self.nodes[node][0]) for node in best),
        )

    def _best(self) -> list[int]:
        return sorted(range(len(self.nodes)), key=lambda node: (-self.nodes[node][0], node))[: self._count]

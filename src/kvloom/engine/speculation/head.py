"""The head proposer: drafts from the target's hidden states (`kvloom.models.heads`).

A draft head proposes like a draft model, token by token, and its layer is a group of the target's pool. Two things
differ:

    input           the head also reads the hidden state of the token before, which the target's step has written
    own drafts      after its first draft token, a head continues from its own hidden states. The target replaces them
                    when it verifies the draft, and the head computes the accepted tokens again.

The pages of a head therefore depend only on the tokens. Drafts after a cache hit are as good as after a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from kvloom.engine.sampling import Sampler
from kvloom.models.heads import Head, load_eagle_head, load_mtp_head
from kvloom.models.paged import Work

from .draft_model import DraftModelProposer
from .proposer import DraftedRequest, DraftRunner

__all__ = ["HeadProposer", "load_head"]


def load_head(name: str, target: Any) -> Head:
    """Load the head with the proposer's name (`mtp` or `eagle=FOLDER`) for `target`. Raises ModelError if there is
    no such head, or if it does not fit the target."""
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
    ) -> None:
        super().__init__(runner, sampler, apply_copies, sampled, complete)
        self.name = name
        self._runs_after_draft = 0

    def step_computed(self, work: Sequence[tuple[DraftedRequest, Work]], own: Set[int]) -> None:
        """Compute the tokens of a launched step, like `DraftModelProposer`. If the proposer is `complete`, tokens of
        its own drafts are also computed again, because the target has replaced the hidden states.
        """
        self._compute([(request, part) for request, part in work if self._complete or id(request) not in own])

    def draft_verified(self, request: DraftedRequest, drafted: int, accepted: int, own: bool) -> None:
        """If this proposer made the draft (`own`), record that the head must compute the accepted tokens again."""
        if own and accepted and not self._complete:
            self._lacks(request, request.computed - accepted)

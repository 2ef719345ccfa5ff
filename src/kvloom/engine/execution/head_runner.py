"""Runs a draft head, which drafts from the hidden states of the target model. Head and target share the
pool and the buffers of batches. A `Work` is the tokens of one sequence in a step.

    target's step       writes the target's hidden state of each token to the head's pages
    run(works, wanted)  reads the hidden state before each token, computes the head's layer, and returns logits.
                        `wanted` has the indices of the `Work` objects that need logits. The target
                        has not computed the last token of these objects, so the head writes its own
                        hidden state for this token.

Drafts are computed in CUDA graphs. A graph computes logits for all tokens. It writes the head's hidden
states of the last token of each `Work`, and of all nodes of draft trees. If no logits are `wanted`, it
writes no hidden states. The target's graphs write the target's hidden states. The head never uses
batch-invariant kernels, because only the target decides which tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Many
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from kvloom.core import KVCache
from kvloom.kernels.device import upload
from kvloom.models.heads import Head
from kvloom.models.paged import DRAFT_STEP_TOKENS, Batch, GraphSplitter, HiddenStates, Work

from .model_runner import ModelRunner

__all__ = ["HeadRunner"]


class HeadRunner(ModelRunner):
    """Runs a draft head. While this object exists, the runner of the target also writes the target's hidden states to
    the head's pages.
    """

    def __init__(
        self,
        head: Head,
        cache: KVCache,
        buffer: torch.Tensor,
        tokens: int,
        rows: int,
        graphs: bool,
        target: ModelRunner,
        draft_length: int,
    ) -> None:
        super().__init__(
            head.model, cache, buffer, tokens, rows, graphs, target=target, draft_length=draft_length
        )
        self.piecewise = None  # not needed: a prompt step of one layer is short
        self._head, self._target = head, target
        # Whether graphs write hidden states.
        self._drafts = torch.zeros((), dtype=torch.bool, device=buffer.device)
        self._nodes: torch.Tensor | None = None  # nodes of draft trees, whose hidden states graphs also write
        if self.draft_graphs is not None and self.stage.supports_trees:
            self._nodes = torch.zeros(DRAFT_STEP_TOKENS, dtype=torch.bool, device=buffer.device)
        self._states = HiddenStates(self.pages.token_view(0))
        target.watch_step = self._write_target_states

    @contextmanager
    def _write_target_states(self, batch: Batch) -> Iterator[None]:
        """Return a context for one execution of the target model. When the context ends, the hidden states of all
        its tokens are written to the head's pages.
        """
        with self._head.target_states(self._target.decoder) as states:
            yield
        self._states.write(batch, states())

    def run(
        self,
        works: Many[Work],
        wanted: Many[int] | None = None,
        whole: Many[int] = (),
        pooled: Many[int] = (),
    ) -> torch.Tensor:
        """Compute a step. Arguments and result are those of `ModelRunner.run`. If `wanted` is None or not empty, also
        write hidden states of the head to its pages."""
        self._drafts.fill_(wanted is None or len(wanted) > 0)
        if self._nodes is not None:
            # Each run of a tree computes all nodes again. Earlier nodes get the same hidden states.
            nodes = np.concatenate([np.full(len(work.tokens), bool(work.parents)) for work in works])
            nodes = nodes[:DRAFT_STEP_TOKENS]
            self._nodes[: len(nodes)] = upload(nodes, self.device)
        return super().run(works, wanted, whole, pooled)

    def _forward(
        self, batch: Batch, last: torch.Tensor | None, cutter: GraphSplitter | None = None
    ) -> torch.Tensor:
        with torch.inference_mode():
            joined = self._head.join(batch.tokens, self._states.before(batch))
            with self._head.own_states() as states:
                logits = super()._forward(replace(batch, embeds=joined), last, cutter)
            if last is None:
                nodes = None if self._nodes is None else self._nodes[: len(batch.tokens)]
                self._states.write_last(batch, states(), self._drafts, nodes)
            elif len(last):
                self._states.write(batch, states()[last], last)
            return self._head.target_logits(logits)

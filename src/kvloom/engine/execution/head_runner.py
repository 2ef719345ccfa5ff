"""Runs a draft head, which drafts from the hidden states of the target model. Head and target share the pool and the
buffers of batches.

    target's step       the hidden states of the step are written to the head's pages
    run(works, wanted)  reads the hidden state before each token, computes the head's layer, and returns the logits of
                        the works `wanted`. The target has not computed the last token of these works, so the
                        head's own hidden state of this token is written.

Drafts are computed in CUDA graphs. A graph computes logits for all tokens, and writes the head's hidden state of the
last token of each row. It writes nothing if no logits are `wanted`. The writes of the target's hidden states are part
of the target's graphs. The head is never batch-invariant, because only the target decides which tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Many
from contextlib import contextmanager
from dataclasses import replace

import torch

from kvloom.core import KVCache
from kvloom.models.heads import Head
from kvloom.models.paged import Batch, GraphSplitter, HiddenStates, Work

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
        self.piecewise = None  # a prompt step of one layer is short
        self._head, self._target = head, target
        self._drafts = torch.zeros((), dtype=torch.bool, device=buffer.device)  # whether graphs write states
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
        """Compute a step, like `ModelRunner.run`. Also write the head's hidden states if any logits are `wanted`."""
        self._drafts.fill_(wanted is None or len(wanted) > 0)
        return super().run(works, wanted, whole, pooled)

    def _forward(
        self, batch: Batch, last: torch.Tensor | None, cutter: GraphSplitter | None = None
    ) -> torch.Tensor:
        with torch.inference_mode():
            joined = self._head.join(batch.tokens, self._states.before(batch))
            with self._head.own_states() as states:
                logits = super()._forward(replace(batch, embeds=joined), last, cutter)
            if last is None:
                self._states.write_last(batch, states(), self._drafts)
            elif len(last):
                self._states.write(batch, states()[last], last)
            return self._head.target_logits(logits)

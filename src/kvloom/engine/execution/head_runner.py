"""Runs a draft head, which drafts from the hidden states of the target model. Head and target share the pool and the
buffers of batches.

    target's step       the hidden states of the step are written to the head's pages
    run(works, wanted)  reads the hidden state before each token, computes the head's layer, and returns the logits of
                        the works `wanted`. The target has not computed the last token of these works, so the
                        head's own hidden state of this token is written.

The head runs without CUDA graphs. The writes of the target's hidden states are part of the target's graphs. The head is
never batch-invariant, because only the target decides which tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from kvloom.core import KVCache
from kvloom.models.heads import Head
from kvloom.models.paged import Batch, GraphSplitter, HiddenStates

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
        target: ModelRunner,
    ) -> None:
        super().__init__(head.model, cache, buffer, tokens, rows, graphs=False, target=target)
        self._head, self._target = head, target
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

    def _forward(
        self, batch: Batch, last: torch.Tensor | None, cutter: GraphSplitter | None = None
    ) -> torch.Tensor:
        with torch.inference_mode():
            joined = self._head.join(batch.tokens, self._states.before(batch))
            with self._head.own_states() as states:
                logits = super()._forward(replace(batch, embeds=joined), last, cutter)
            if last is not None and len(last):
                self._states.write(batch, states()[last], last)
            return self._head.target_logits(logits)

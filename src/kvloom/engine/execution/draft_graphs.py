"""CUDA graphs of steps with drafts. One graph computes a whole step in which each request has a few tokens.

- A graph computes a fixed number of tokens, one of SIZES, for at most as many requests.
- A request may have up to `DraftGraphs.longest` tokens.
- If a step has fewer tokens than the graph, requests of one token each are added as padding. The remaining requests of
  the graph are empty.

One pass computes all tokens of a request. In the same pass, recurrent layers store the state before the draft
(`StateRows.stored`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence as Many

import numpy as np
import torch

from kvloom.kernels.device import upload
from kvloom.models.paged import DRAFT_STEP_TOKENS, Batch, BatchBuilder, Work

from .graph_capture import CapturedGraph, GraphMemory, capture_graph

__all__ = ["LARGEST_ROW", "DraftGraphs", "draft_graph_sizes", "largest_row"]

SIZES = [2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256]
LARGEST_ROW = 64
"""Largest number of tokens of one request that decode attention can compute in a step."""


def draft_graph_sizes(step_tokens: int) -> list[int]:
    """Return the graph sizes, in tokens, for steps of at most `step_tokens` tokens."""
    most = min(step_tokens, DRAFT_STEP_TOKENS)
    return [size for size in SIZES if size <= most]


def largest_row(row_tokens: int) -> int:
    """Return the largest number of tokens per request for which graphs are captured. The result is `row_tokens`,
    rounded up to a power of two. The result is at least 2 and at most LARGEST_ROW."""
    return min(1 << max(1, (row_tokens - 1).bit_length()), LARGEST_ROW)


class DraftGraphs:
    """One model's CUDA graphs for steps with drafts. `stage` builds the batches. `forward(batch, last)` runs
    the model, and computes logits for the tokens `last`, or for all tokens if `last` is None. `chosen` are the
    tokens that the previous step sampled. A request has at most `row_tokens` tokens, and a step at most
    `step_tokens`.
    """

    def __init__(
        self,
        stage: BatchBuilder,
        forward: Callable[[Batch, torch.Tensor | None], torch.Tensor],
        chosen: torch.Tensor,
        row_tokens: int,
        step_tokens: int,
        memory: GraphMemory,
    ) -> None:
        self._stage, self._forward, self._chosen, self._memory = stage, forward, chosen, memory
        self.longest = largest_row(row_tokens)
        self.sizes = draft_graph_sizes(step_tokens)
        self._graphs: dict[int, CapturedGraph] = {}

    def size_for(self, works: Many[Work]) -> int:
        """Return the size, in tokens, of the graph that computes a step. Return 0 if no graph fits the step."""
        counts = [len(work.tokens) for work in works]
        if max(counts) > self.longest:
            return 0
        at = bisect_left(self.sizes, sum(counts))
        return self.sizes[at] if at < len(self.sizes) else 0

    def run(self, works: Many[Work], size: int, wanted: Many[int] | None) -> torch.Tensor:
        """Compute a step with the graph of `size` tokens. `wanted` has the indices of the entries of `works` that need
        logits. None means all entries. Return these logits, in the order of `ModelRunner.run`."""
        captured = self.capture(size)
        self._stage.send_drafted(works, size)
        captured.graph.replay()
        bounds = np.cumsum([0, *(len(work.tokens) for work in works)])
        chosen = range(len(works)) if wanted is None else wanted
        each = [np.arange(bounds[i + 1] - 1 - works[i].drafts, bounds[i + 1]) for i in chosen]
        ends = np.concatenate([np.zeros(0, np.int64), *each])
        if len(ends) == bounds[-1]:
            return captured.logits[: len(ends)]
        return captured.logits.index_select(0, upload(ends, self._stage.device))

    def capture(self, size: int) -> CapturedGraph:
        """Return the graph of one size. Captures the graph if it does not exist."""
        if size not in self._graphs:
            stage = self._stage
            stage.send_drafted([], size)
            self._graphs[size] = capture_graph(
                stage.device,
                lambda: self._forward(stage.drafted(size, self.longest, self._chosen), None),
                self._memory,
            )
        return self._graphs[size]

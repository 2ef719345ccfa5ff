"""CUDA graphs of decode steps, which compute one token of each sequence.

A graph computes a fixed number of sequences. A step uses the graph of the next larger size, with padding. Pages that
several sequences share are read once: `SharedPages` finds them when the sequences of a step change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Many
from typing import NamedTuple

import numpy as np
import torch

from kvloom.core import KVCache, PageGroup
from kvloom.kernels.attention import SharedRun, find_shared_runs, is_worth_sharing, visible_shared_runs
from kvloom.models.paged import Batch, BatchBuilder, Pages, Work

from .graph_capture import CapturedGraph, GraphMemory, capture_graph

__all__ = ["DecodeGraphs", "DecodeVariant", "SharedPages", "graph_sizes"]

MIN_SHARERS = 4
"""Smallest number of sequences for which a search for shared pages saves more time than it takes."""


def graph_sizes(rows: int) -> list[int]:
    """Return the graph sizes, in sequences, for up to `rows` sequences. The sizes are few, but close enough that steps
    need little padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 32), *range(1024, 8192, 128)]
    return [size for size in sizes if size < rows] + [rows]


class SharedPages:
    """The pages that sequences of decode steps share. `groups` are the token groups of the model. Only the first group
    with full attention is searched. Windowed groups share a part of these pages."""

    def __init__(self, cache: KVCache, pages: Pages, groups: list[PageGroup]) -> None:
        self._cache, self._pages = cache, pages
        full = [group for group in groups if not group.spec.visibility.windowed]
        self._column = full[0].columns.start if full else None
        self._windows = [
            group
            for group in groups
            if group.spec.visibility.windowed and is_worth_sharing(group.spec.visibility)
        ]
        self._sharers: tuple[object, ...] = ()
        self._is_shared = False

    @property
    def is_searched(self) -> bool:
        """Whether decode steps may share pages: the model has a group with full attention."""
        return self._column is not None

    def update(self, works: Many[Work], size: int) -> bool:
        """Return whether sequences of the step share pages. If so, send the ranges of shared pages to the device, so
        that attention reads them once. If the sequences are the same as in the previous call, this method returns the
        previous result without a search. `size` is the size of the graph.
        """
        if self._column is None or len(works) < MIN_SHARERS:
            return False
        sharers = (size, *(work.sequence for work in works))
        if sharers != self._sharers:
            cache = self._cache
            rows = np.array([work.sequence.row for work in works])
            settled = cache.lengths[rows]
            blocks = int(settled.max()) // cache.block_tokens
            tables = cache.page_tables[self._column, rows, :blocks]
            runs = windows = find_shared_runs(tables, settled, cache.block_tokens)
            for group in self._windows:
                tables = cache.page_tables[group.columns.start, rows, :blocks]
                first = group.spec.visibility.first_visible_each(settled)
                windows = visible_shared_runs(windows, tables, first, cache.block_tokens)
            self._is_shared = bool(runs) and self._send(runs, windows, size)
            self._sharers = sharers
        return self._is_shared

    def send_example(self, size: int) -> None:
        """Send a range of shared pages, for the capture of a graph of `size` sequences. The next `update` searches
        again."""
        runs = [SharedRun(0, 256, (0, 1), 0)]
        self._send(runs, runs, size)
        self._sharers = ()

    def _send(self, runs: list[SharedRun], windows: list[SharedRun], size: int) -> bool:
        return self._pages.set_shared_runs(runs, windows if self._windows else None, size)


class DecodeVariant(NamedTuple):
    """One of the graphs of decode steps: its number of sequences, whether sequences share pages, and whether they use
    adapters. Steps without adapters have their own graphs, which compute no low-rank terms."""

    size: int
    shares: bool
    adapted: bool


class DecodeGraphs:
    """One model's CUDA graphs for decode steps of up to `rows` sequences.

    - `stage` builds the batches.
    - `forward(batch, None)` runs the model and returns logits for all tokens.
    - `chosen` are the tokens that the previous step sampled.
    - `shared` is None if graphs read shared pages like other pages.
    """

    def __init__(
        self,
        stage: BatchBuilder,
        forward: Callable[[Batch, torch.Tensor | None], torch.Tensor],
        chosen: torch.Tensor,
        rows: int,
        shared: SharedPages | None,
        has_adapters: bool,
        memory: GraphMemory,
    ) -> None:
        self._stage, self._forward, self._chosen, self._memory = stage, forward, chosen, memory
        self._shared = shared if shared is not None and shared.is_searched else None
        self._adapted = (False, True) if has_adapters else (False,)
        self._sizes = graph_sizes(rows)
        self._graphs: dict[DecodeVariant, CapturedGraph] = {}

    @property
    def variants(self) -> list[DecodeVariant]:
        """All graphs, in the order in which to capture them. The largest comes first, because the others reuse its
        memory."""
        sizes = self._sizes[::-1]
        variants = [DecodeVariant(size, False, adapted) for adapted in self._adapted for size in sizes]
        if self._shared is not None:
            sizes = [size for size in sizes if size >= MIN_SHARERS]
            variants += [DecodeVariant(size, True, adapted) for adapted in self._adapted for size in sizes]
        return variants

    def run(self, works: Many[Work], wanted: Many[int] | None) -> torch.Tensor:
        """Compute a step with one token of each sequence. `wanted` has the indices of the entries of `works` that need
        logits. None means all entries. Return these logits, in the order of `ModelRunner.run`. Raises CaptureError
        if the graph does not exist yet and the model cannot be captured."""
        size = next(size for size in self._sizes if size >= len(works))
        shares = self._shared is not None and self._shared.update(works, size)
        captured = self._captured(DecodeVariant(size, shares, any(work.adapter for work in works)))
        self._stage.send_singles(works, size)
        captured.graph.replay()
        logits = captured.logits[: len(works)]
        if wanted is not None and len(wanted) < len(works):
            return logits[torch.tensor(wanted, dtype=torch.int64).to(self._stage.device, non_blocking=True)]
        return logits

    def capture(self, variant: DecodeVariant) -> None:
        """Capture a graph, if it does not exist. Raises CaptureError if the model cannot be captured."""
        if variant.shares and self._shared is not None:
            self._shared.send_example(variant.size)
        self._captured(variant)

    def _captured(self, variant: DecodeVariant) -> CapturedGraph:
        """Return a graph, and capture it at its first use."""
        if variant not in self._graphs:
            stage, (size, shares, adapted) = self._stage, variant
            stage.send_singles([], size)
            self._graphs[variant] = capture_graph(
                stage.device,
                lambda: self._forward(stage.replayed(size, self._chosen, shares, adapted), None),
                self._memory,
            )
        return self._graphs[variant]

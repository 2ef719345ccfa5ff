"""Piecewise CUDA graphs: a step with prompts replays all operations except attention.

    graph │ attention of layer 0 │ graph │ attention of layer 1 │ … │ graph → logits

The work of attention differs in each step, so attention is launched without a graph. All other work is captured once
for each of a few numbers of tokens. Recurrent layers are part of the graphs: their kernels read the sequences of the
step from the device (`BatchBuilder.packed`). Padding tokens are computed and written to page 0, and
attention skips them. All graphs use the same memory, so each step overwrites the tensors of the step before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence as Many
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kvloom.kernels.device import upload
from kvloom.models.paged import Batch, BatchBuilder, GraphSplitter, Pages, Work

from .graph_capture import GraphMemory, capturable

__all__ = ["PiecewiseGraphs", "piece_sizes"]

MARGIN = 1.5
"""Steps with few tokens take longer on the host than on the device. At a certain number of tokens, both times are
equal. Graphs are used for steps of up to MARGIN times this number.
"""


def piece_sizes(tokens: int) -> list[int]:
    """Return the graph sizes, in tokens, for steps of up to `tokens` tokens. The sizes are few, but close enough that
    steps need little padding."""
    sizes = [*range(64, 512, 64), *range(512, 1024, 128), *range(1024, 4096, 256), *range(4096, 65536, 512)]
    return [size for size in sizes if size <= tokens]


@dataclass(slots=True)
class _GraphSet:
    """The CUDA graphs for steps of one size, in the order of replay. After `graphs[i]`, `calls[i]` launches the
    attention that follows it.
    """

    batch: Batch
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    calls: list[Callable[[int], object]] = field(default_factory=list)
    logits: torch.Tensor | None = None


class PiecewiseGraphs:
    """Captures and replays steps of one model as CUDA graphs that are split at every attention call.

    `forward(batch, last, cutter)` runs the model and calls `cutter` at every attention call. `most` is the number of
    tokens of the largest step.
    """

    def __init__(
        self,
        pages: Pages,
        stage: BatchBuilder,
        forward: Callable[[Batch, torch.Tensor | None, GraphSplitter | None], torch.Tensor],
        chosen: torch.Tensor,
        most: int,
        memory: GraphMemory,
    ) -> None:
        self._pages, self._stage, self._forward, self._chosen = pages, stage, forward, chosen
        self._most, self._memory = most, memory
        self._graph_sets: dict[int, _GraphSet] = {}
        self._captured: list[int] = []
        self._last = torch.zeros(stage.rows, dtype=torch.int64, device=stage.device)
        self._results: dict[tuple[Any, ...], torch.Tensor] = {}
        self._side: torch.cuda.Stream | None = None

    def limit(self, tokens: int, host: float, device: float) -> None:
        """Set the size of the largest step that uses graphs, from one measured step. That step of `tokens` tokens
        took `host` seconds on the host and `device` seconds on the device. In larger steps the device is the
        bottleneck, so graphs would not make them faster.
        """
        self._most = min(self._most, int(MARGIN * tokens * host / device))

    @property
    def sizes(self) -> list[int]:
        """The graph sizes to capture, as numbers of tokens."""
        return piece_sizes(self._most)

    def size_for(self, works: Many[Work]) -> int:
        """Return the smallest captured size that fits a step. Return 0 if the step has too many tokens, or needs logits
        at more positions than a graph computes, or has too many prompts. A request of the step (an entry of `works`)
        needs one position, plus one per draft token.
        """
        if sum(work.drafts + 1 for work in works) > len(self._last) or not self._stage.fits_graph(works):
            return 0
        at = bisect_left(self._captured, sum(len(work.tokens) for work in works))
        return self._captured[at] if at < len(self._captured) else 0

    def run(self, works: Many[Work], size: int, wanted: Many[int] | None = None) -> torch.Tensor:
        """Compute a step with the graphs of `size` tokens. `wanted` has the indices of the entries of `works` that
        need logits. None means all entries. Return these logits, in the order of `ModelRunner.run`."""
        graphs = self._graph_sets[size]
        counts = np.array([len(work.tokens) for work in works])
        bounds = np.concatenate(([0], counts.cumsum()))
        rows = [work.sequence.row for work in works]
        lengths = self._stage.cache.lengths[rows] + counts
        chosen = range(len(works)) if wanted is None else wanted
        each = [np.arange(bounds[i + 1] - 1 - works[i].drafts, bounds[i + 1]) for i in chosen]
        ends = np.concatenate([np.zeros(0, np.int64), *each])
        last = np.zeros(len(self._last), np.int64)  # also clears entries that a larger graph left
        last[: len(ends)] = ends
        self._stage.send(works, self._stage.rows + 1, size)
        self._last.copy_(upload(last, self._stage.device))
        batch = replace(graphs.batch, bounds=tuple(bounds.tolist()), sizes=tuple(lengths.tolist()))
        self._pages.begin(batch)
        tokens = int(bounds[-1])
        with torch.inference_mode():
            for graph, call in zip(graphs.graphs, graphs.calls, strict=False):
                graph.replay()
                call(tokens)
            graphs.graphs[-1].replay()
        assert graphs.logits is not None
        return graphs.logits[: len(ends)]

    def capture(self, size: int) -> None:
        """Capture the graphs of one size. Call this method for the largest size first, because the graphs of the other
        sizes reuse the memory of the largest.
        """
        stage, device = self._stage, self._stage.device
        self._last.zero_()
        stage.send([], stage.rows + 1, size)
        if self._side is None:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side = self._side
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            # Compiles kernels, and lets libraries allocate memory. Attention is skipped.
            idle = _Recording(size, self._results)
            self._forward(stage.packed(size, self._chosen), self._last, idle)
            torch.cuda.synchronize(device)
            recording = _Recording(size, self._results, self._memory.handle)
            with capturable(device):
                recording.open()
                try:
                    batch = stage.packed(size, self._chosen)
                    logits = self._forward(batch, self._last, recording)
                    recording.close()
                except BaseException:
                    with suppress(RuntimeError):  # the failure may already have ended the capture
                        recording.close()
                    raise
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph_sets[size] = _GraphSet(batch, recording.graphs, recording.calls, _alias(logits))
        self._captured = sorted(self._graph_sets)


class _Recording:
    """Records one execution of the model as a list of graphs, split at every attention call. Without a `pool`, the
    execution is split but no graph is captured.
    """

    def __init__(self, size: int, results: dict[tuple[Any, ...], torch.Tensor], pool: Any = None) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.calls: list[Callable[[int], object]] = []
        self._size, self._results, self._pool = size, results, pool

    def open(self) -> None:
        if self._pool is not None:
            self.graphs.append(torch.cuda.CUDAGraph())
            self.graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def close(self) -> None:
        if self._pool is not None:
            self.graphs[-1].capture_end()

    def split_at(
        self,
        call: Callable[..., torch.Tensor],
        query: torch.Tensor,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        v_dim: int,
    ) -> torch.Tensor:
        self.close()
        result = self._result((query.shape[1], v_dim), query)
        given = [_alias(x) for x in (query, new_k, new_v)]

        def attend(tokens: int) -> object:
            return call(*(x[:tokens] for x in given), out=result[:tokens])

        self.calls.append(attend)
        self.open()
        return result

    def _result(self, shape: tuple[int, int], query: torch.Tensor) -> torch.Tensor:
        """Return the buffer for the output of attention, which the next graph reads. All layers and graph sizes with
        the same output shape share one buffer.
        """
        key = *shape, query.dtype
        if key not in self._results or len(self._results[key]) < self._size:
            self._results[key] = torch.zeros((self._size, *shape), dtype=query.dtype, device=query.device)
        return self._results[key][: self._size]


@dataclass(frozen=True, slots=True)
class _Memory:
    __cuda_array_interface__: dict[str, object]


def _alias(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that uses the memory of `x` but does not keep this memory allocated. Later tensors may therefore
    reuse the memory.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    described = {
        "shape": (extent * x.element_size(),),
        "typestr": "|u1",
        "data": (x.data_ptr(), False),
        "version": 3,
    }
    flat = torch.as_tensor(_Memory(described), device=x.device).view(x.dtype)
    return flat.as_strided(x.shape, x.stride())

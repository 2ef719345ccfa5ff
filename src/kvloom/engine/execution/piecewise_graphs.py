"""Steps of prompts and single tokens as strips of CUDA graphs: all of a model but its attention is replayed.

    graph │ attention of layer 0 │ graph │ attention of layer 1 │ … │ graph → logits

How much work attention has changes from step to step, so it is launched as it is; what lies between depends on the number of
tokens alone, and is captured once for some sizes. Tokens that fill a size up belong to nobody: they are computed and
written to page 0, and nobody attends for them. The memory between graphs is the graphs' own and is used again by each of
them: nothing of a strip may be kept beyond its run.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence as Many
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kvloom.kernels.device import upload
from kvloom.models.paged import Batch, BatchBuilder, GraphSplitter, Pages, Work

__all__ = ["PiecewiseGraphs", "piece_sizes", "uncollected"]

MARGIN = 1.5
"""Strips pay up to this many times the tokens whose launches take the host as long as the device computes."""


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected: graphs may be among it, which an engine left that is gone, and to destroy one while another is
    recorded breaks the recording."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def piece_sizes(tokens: int) -> list[int]:
    """Sizes for steps of up to `tokens` tokens: what is padded costs little, and there are few."""
    sizes = [*range(64, 512, 64), *range(512, 1024, 128), *range(1024, 4096, 256), *range(4096, 65536, 512)]
    return [size for size in sizes if size <= tokens]


@dataclass(slots=True)
class _GraphSet:
    """What a replay of one size runs, in turn: a graph, then a call between it and the next."""

    batch: Batch
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    calls: list[Callable[[int], object]] = field(default_factory=list)
    logits: torch.Tensor | None = None


class PiecewiseGraphs:
    """The strips of one model. `forward(batch, last, cutter)` runs it; `most` tokens are the largest step there may be."""

    def __init__(
        self,
        pages: Pages,
        stage: BatchBuilder,
        forward: Callable[[Batch, torch.Tensor | None, GraphSplitter | None], torch.Tensor],
        chosen: torch.Tensor,
        most: int,
    ) -> None:
        self._pages, self._stage, self._forward, self._chosen = pages, stage, forward, chosen
        self._most = most
        self._strips: dict[int, _GraphSet] = {}
        self._captured: list[int] = []
        self._last = torch.zeros(stage.rows, dtype=torch.int64, device=stage.device)
        self._results: dict[tuple[Any, ...], torch.Tensor] = {}
        self._side: torch.cuda.Stream | None = None

    def limit(self, tokens: int, host: float, device: float) -> None:
        """A step of so many tokens took the host and the device so many seconds: strips are for steps that the host would
        hold back."""
        self._most = min(self._most, int(MARGIN * tokens * host / device))

    @property
    def sizes(self) -> list[int]:
        """The sizes that are worth a strip."""
        return piece_sizes(self._most)

    def size_for(self, works: Many[Work]) -> int:
        """The smallest strip that holds a step; 0 where none does."""
        at = bisect_left(self._captured, sum(len(work.tokens) for work in works))
        return self._captured[at] if at < len(self._captured) else 0

    def run(self, works: Many[Work], size: int, wanted: Many[int] | None = None) -> torch.Tensor:
        """Compute a step; its logits, as `Runner.run` gives them."""
        strip = self._strips[size]
        counts = np.array([len(work.tokens) for work in works])
        bounds = np.concatenate(([0], counts.cumsum()))
        rows = [work.sequence.row for work in works]
        lengths = self._stage.cache.lengths[rows] + counts
        ends = bounds[1:] - 1
        if wanted is not None:
            ends = ends[list(wanted)]
        last = np.zeros(
            len(self._last), np.int64
        )  # all of it: what a larger strip left there is beyond this one
        last[: len(ends)] = ends
        self._stage.send(works, self._stage.rows + 1, size)
        self._last.copy_(upload(last, self._stage.device))
        batch = replace(strip.batch, bounds=tuple(bounds.tolist()), sizes=tuple(lengths.tolist()))
        self._pages.begin(batch)
        tokens = int(bounds[-1])
        with torch.inference_mode():
            for graph, call in zip(strip.graphs, strip.calls, strict=False):
                graph.replay()
                call(tokens)
            strip.graphs[-1].replay()
        assert strip.logits is not None
        return strip.logits[: len(ends)]

    def capture(self, size: int, pool: Any) -> None:
        """Record the strip of a size in the graphs' memory `pool`. The largest first, so that the others fit into its memory."""
        stage, device = self._stage, self._stage.device
        self._last.zero_()
        stage.send([], stage.rows + 1, size)
        if self._side is None:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side = self._side
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            # Compiles, and lets libraries take their memory; nobody attends.
            idle = _Recording(size, self._results)
            self._forward(stage.packed(size, self._chosen), self._last, idle)
            torch.cuda.synchronize(device)
            recording = _Recording(size, self._results, pool)
            with uncollected():
                recording.open()
                try:
                    batch = stage.packed(size, self._chosen)
                    logits = self._forward(batch, self._last, recording)
                    recording.close()
                except BaseException:
                    with suppress(RuntimeError):  # what broke the recording may have ended it
                        recording.close()
                    raise
        torch.cuda.current_stream(device).wait_stream(side)
        self._strips[size] = _GraphSet(batch, recording.graphs, recording.calls, _alias(logits))
        self._captured = sorted(self._strips)


class _Recording:
    """A run of the model that is cut wherever it attends, one graph for each part; without a `pool`, nothing is recorded."""

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
        """Where attention leaves what the next graph reads: one place for all layers, whatever the size."""
        key = *shape, query.dtype
        if key not in self._results or len(self._results[key]) < self._size:
            self._results[key] = torch.zeros((self._size, *shape), dtype=query.dtype, device=query.device)
        return self._results[key][: self._size]


@dataclass(frozen=True, slots=True)
class _Memory:
    __cuda_array_interface__: dict[str, object]


def _alias(x: torch.Tensor) -> torch.Tensor:
    """The same memory, not held: whoever owns it may give it to others."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    described = {
        "shape": (extent * x.element_size(),),
        "typestr": "|u1",
        "data": (x.data_ptr(), False),
        "version": 3,
    }
    flat = torch.as_tensor(_Memory(described), device=x.device).view(x.dtype)
    return flat.as_strided(x.shape, x.stride())

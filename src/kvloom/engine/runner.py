"""Running a model on a step's work: laid out in fixed buffers, and on a GPU replayed from CUDA graphs where it decodes.

    runner.run(works) → logits of each work's last token, on the device; nothing here waits for it

A step in which every sequence has one token is a graph of the next larger size, captured by `capture` or when first needed;
rows that fill it up belong to nobody. Other steps run as they are. Knows no requests; what is run is the scheduler's to say.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch

from kvloom.core import KVCache
from kvloom.models.attention import Pages
from kvloom.models.batch import Batch, Stage, Work
from kvloom.models.fusing import fuse

__all__ = ["Runner", "graph_sizes"]


def graph_sizes(rows: int) -> list[int]:
    """Sizes of graphs for up to `rows` sequences: what is padded costs little, and there are few."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 32), *range(1024, 8192, 128)]
    return [size for size in sizes if size < rows] + [rows]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class Runner:
    """A model, its pages and its buffers, for steps of up to `rows` rows and `tokens` tokens beside one for each row."""

    def __init__(
        self, model: Any, cache: KVCache, buffer: torch.Tensor, tokens: int, rows: int, graphs: bool = True
    ) -> None:
        self.model, self.device = model, buffer.device
        if buffer.is_cuda:
            fuse(model)
        self.pages = Pages(cache.layout, buffer)
        self.stage = Stage(cache, buffer.device, tokens + rows, rows)
        self.rows = rows
        self.chosen = torch.zeros(rows, dtype=torch.int64, device=buffer.device)
        """The tokens that the step before chose, by their place; a work's `source` points here."""
        self._plain = "cache_params" in inspect.signature(model.forward).parameters
        self._graphs: dict[int, _Captured] = {}
        self._pool: Any = None
        self._sizes = graph_sizes(rows) if graphs and buffer.is_cuda and self.pages.replayable else []

    def run(self, works: Many[Work], wanted: Many[int] | None = None) -> torch.Tensor:
        """Compute a step; the logits ([works, vocabulary]) after each work's last token, or after those of the works
        `wanted`. They are valid until the next step."""
        single = all(len(work.tokens) == 1 for work in works)
        if (
            single
            and self._sizes
            and not (self.pages.keeps_states and any(w.sequence.state_length == 0 for w in works))
        ):
            return self._replay(works, wanted)
        batch = self.stage.lay_out(works, self.chosen)
        last = batch.last
        if wanted is not None and len(wanted) < len(works):
            places = torch.tensor([batch.bounds[i + 1] - 1 for i in wanted], dtype=torch.int64)
            last = places.to(self.device, non_blocking=True)
        return self._forward(batch, last)

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every graph now, the largest first, so that the others fit into its memory."""
        for done, size in enumerate(reversed(self._sizes)):
            self._captured(size)
            if progress is not None:
                progress(done + 1, len(self._sizes))

    def _replay(self, works: Many[Work], wanted: Many[int] | None) -> torch.Tensor:
        size = next(size for size in self._sizes if size >= len(works))
        captured = self._captured(size)
        self.stage.send(works, size)
        captured.graph.replay()
        logits = captured.logits[: len(works)]
        if wanted is not None and len(wanted) < len(works):
            return logits[torch.tensor(wanted, dtype=torch.int64).to(self.device, non_blocking=True)]
        return logits

    def _captured(self, size: int) -> _Captured:
        if size not in self._graphs:
            self.stage.send([], size)
            side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):  # compiles, and lets libraries take their memory
                self._forward(self.stage.replayed(size, self.chosen), None)
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool):
                logits = self._forward(self.stage.replayed(size, self.chosen), None)
            self._graphs[size] = _Captured(graph, logits)
        return self._graphs[size]

    def _forward(self, batch: Batch, last: torch.Tensor | None) -> torch.Tensor:
        self.pages.begin(batch)
        extra: dict[str, Any] = {"cache_params": self.pages}
        if not self._plain:
            extra = {
                "past_key_values": self.pages,
                "pages": self.pages,
                "position_ids": batch.positions[None],
            }
        with torch.inference_mode():
            found = self.model(
                input_ids=batch.tokens[None],
                use_cache=False,
                logits_to_keep=0 if last is None else last,
                **extra,
            )
        logits: torch.Tensor = found.logits[0]
        return logits

"""Running a model on a step's work: laid out in fixed buffers, and on a GPU replayed from CUDA graphs where it decodes.

    runner.run(works) → logits of each work's last token, on the device; nothing here waits for it

A step in which every sequence has one token is a graph of the next larger size, captured by `capture` or when first needed;
rows that fill it up belong to nobody. Where sequences hold the same pages, their attention reads those once: who shares is
looked up when the sequences of a step are not those of the one before. Other steps are strips of graphs (`strips.py`) where
the host would be slower than the device, and run as they are elsewhere. Knows no requests; what is run is the scheduler's
to say.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Sequence as Many
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvloom.core import CacheControl, KVCache, Sequence
from kvloom.kernels.attention import SharedRun, find_shared_runs, is_worth_sharing, visible_shared_runs
from kvloom.kernels.copy import copy_pages
from kvloom.kernels.device import upload
from kvloom.models.fusion import fuse
from kvloom.models.paged import Batch, BatchBuilder, GraphSplitter, Pages, Scales, Work
from kvloom.models.vision import Vision

from .piecewise_graphs import PiecewiseGraphs, uncollected

__all__ = ["ModelRunner", "graph_sizes"]


LEAST_SHARERS = 4
"""Sequences of a step from which looking for shared pages is worth it."""


def graph_sizes(rows: int) -> list[int]:
    """Sizes of graphs for up to `rows` sequences: what is padded costs little, and there are few."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 32), *range(1024, 8192, 128)]
    return [size for size in sizes if size < rows] + [rows]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class ModelRunner:
    """A model, its pages and its buffers, for steps of up to `rows` rows and `tokens` tokens beside one for each row."""

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        buffer: torch.Tensor,
        tokens: int,
        rows: int,
        graphs: bool = True,
        scales: Scales | None = None,
        vision: Vision | None = None,
        invariant: bool = False,
    ) -> None:
        """`invariant`: what a row gives does not hang on what else is in its step (CUDA alone)."""
        self.model, self.device, self.vision = model, buffer.device, vision
        fuse(model, 0 if vision is not None else cache.max_tokens)
        self.pages = Pages(cache.layout, buffer, scales, _piece(cache.max_tokens) if invariant else 0)
        self.steady: AbstractContextManager[Any] = nullcontext()
        """What numbers are computed in, here and by whoever goes on with them."""
        if invariant:
            self._refuse()
            from kvloom.kernels.batch_invariant import BatchInvariant

            self.steady = BatchInvariant()  # type: ignore[no-untyped-call]
        if vision is not None:
            vision.bind_pool(cache.layout, buffer, self.pages.cross_views)
        turns = vision is not None and vision.uses_mrope
        self.stage = BatchBuilder(cache, buffer.device, tokens + rows, rows, shifted=turns)
        self.tokens, self.rows = tokens, rows
        self.chosen = torch.zeros(rows, dtype=torch.int64, device=buffer.device)
        """The tokens that the step before chose, by their place; a work's `source` points here."""
        self._plain = "cache_params" in inspect.signature(model.forward).parameters
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        self._cache = cache
        full = [group for group in cache.layout.of("token") if not group.spec.visibility.windowed]
        self._shared_column = full[0].columns.start if full and not invariant else None
        self._windows = [
            group
            for group in cache.layout.of("token")
            if group.spec.visibility.windowed and is_worth_sharing(group.spec.visibility)
        ]
        self._sharers: tuple[object, ...] = ()
        self._shares = False
        self._pool: Any = None
        self._sizes = graph_sizes(rows) if graphs and buffer.is_cuda and self.pages.is_replayable else []
        self.piecewise: PiecewiseGraphs | None = None
        """Graphs of steps with prompts in them, where the model can be recorded so."""
        if self._sizes and not turns and not self.pages.has_states:
            self.piecewise = PiecewiseGraphs(
                self.pages, self.stage, self._forward, self.chosen, tokens + rows
            )

    def _refuse(self) -> None:
        """Raise ValueError for what has no batch-invariant way."""
        if self.pages.cross_views:
            raise ValueError(
                "batch_invariant: this model reads images in layers without such a way; run it without"
            )
        if not self.pages.is_replayable:
            raise ValueError(
                "batch_invariant: the GPU's kernels do not take this model's heads; run it without"
            )

    def run(self, works: Many[Work], wanted: Many[int] | None = None, whole: Many[int] = ()) -> torch.Tensor:
        """Compute a step; the logits ([works, vocabulary]) after each work's last token, or after those of the works
        `wanted`; behind them those after every token of the works `whole`. They are valid until the next step."""
        single = not whole and all(len(work.tokens) == 1 and not _shows(work) for work in works)
        if (
            single
            and self._sizes
            and not (self.pages.has_states and any(w.sequence.state_length == 0 for w in works))
        ):
            return self._replay(works, wanted)
        if self.piecewise is not None and not whole and not any(_shows(work) for work in works):
            size = self.piecewise.size_for(works)
            if size:
                return self.piecewise.run(works, size, wanted)
        batch = self.stage.lay_out(works, self.chosen)
        if self.vision is not None:
            batch = self.vision.add_images(batch, works)
        last = batch.last
        if whole or (wanted is not None and len(wanted) < len(works)):
            ends = [batch.bounds[i + 1] - 1 for i in (range(len(works)) if wanted is None else wanted)]
            each = [np.arange(batch.bounds[i], batch.bounds[i + 1]) for i in whole]
            last = upload(np.concatenate([np.array(ends, dtype=np.int64), *each]), self.device)
        return self._forward(batch, last)

    def score(self, works: Many[Work]) -> torch.Tensor:
        """Compute a step; the logits after every token of it ([tokens, vocabulary]), in the order of the packed row."""
        return self._forward(self.stage.lay_out(works, self.chosen), None)

    def warm_up(self, choose: Callable[[torch.Tensor], object]) -> tuple[int, float]:
        """Run steps like those to come, on pages that are given back, and `choose` from their logits: kernels are compiled now,
        not while someone waits. How many tokens of a prompt the last of them had, and the seconds it took. Does nothing on a
        CPU, which compiles none."""
        if self.device.type != "cuda":
            return 0, 0.0
        for stride in {group.page_stride for group in self._cache.layout.groups}:
            copy_pages(torch.empty(2 * stride, dtype=torch.uint8, device=self.device), stride, [0], [1])
        limit = max(1, min(self.tokens, self._cache.max_tokens // 2))
        self._try([[limit], [700, 200, 40, 1], [max(1, limit - 300)], [700, 100, 40, 1, 1]], limit, choose)
        if self.tokens >= 2 * limit:  # no prompt fills a step by itself
            self._try([[limit] * (self.tokens // limit)], limit)
        self._try([[limit // 16], [limit // 4], [20]], limit)  # alone, and so few that their attention is cut
        self._try([[limit // 3, limit // 3]], limit)  # short prompts of sizes that no library takes
        self._try([[limit], [limit]], limit)  # as the chunks of a long prompt
        torch.cuda.synchronize(self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        begin.record()
        tokens = self._try([[limit]], limit)  # once more, with nothing left to compile
        host = time.perf_counter() - began
        end.record()
        end.synchronize()
        if tokens and self.piecewise is not None:
            self.piecewise.limit(tokens, host, begin.elapsed_time(end) / 1e3)
        return tokens, time.perf_counter() - began

    def _try(
        self,
        shapes: list[list[int]],
        limit: int,
        choose: Callable[[torch.Tensor], object] | None = None,
    ) -> int:
        """Run steps, each of so many of the same sequences' next tokens, as far as a step and the pool have room; how many tokens
        there were. `limit` are those of a prompt, as the cache is told."""
        open_: dict[int, Sequence] = {}
        done = 0
        for counts in shapes:
            works, left = [], self.tokens
            for place, count in enumerate(counts[: self.rows]):
                count = min(count, left)
                left -= count
                if place not in open_:
                    prompt = np.zeros(limit, np.int32)
                    open_[place] = self._cache.open(
                        self._cache.match(prompt, CacheControl(store=False, read=False))
                    )
                if (
                    count
                    and open_[place].length + count <= self._cache.max_tokens
                    and not open_[place].extend(count)
                ):
                    works.append(Work(open_[place], np.zeros(count, np.int64)))
            if works:
                logits = self.run(works)
                if choose is not None:
                    choose(logits)
            for work in works:
                work.sequence.commit(work.tokens.astype(np.int32))
                done += len(work.tokens)
        for sequence in open_.values():
            sequence.close()
        self._cache.take_copies()
        return done

    def try_replay(self) -> None:
        """Run, without a graph, the step of as many single tokens as there may be, all of nobody's."""
        if self.pages.is_replayable:
            self.stage.send_singles([], self.rows)
            self._forward(self.stage.replayed(self.rows, self.chosen), None)

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every graph now, the largest first, so that the others fit into its memory."""
        wanted = [(size, False) for size in reversed(self._sizes)]
        if self._shared_column is not None:
            wanted += [(size, True) for size in reversed(self._sizes) if size >= LEAST_SHARERS]
        strips = [] if self.piecewise is None else self.piecewise.sizes
        for done, (size, shares) in enumerate(wanted):
            if shares:
                runs = [SharedRun(0, 256, (0, 1), 0)]
                self.pages.set_shared_runs(runs, runs if self._windows else None, size)
            self._captured(size, shares)
            if progress is not None:
                progress(done + 1, len(wanted) + len(strips))
        self._sharers = ()
        for done, size in enumerate(reversed(strips)):
            assert self.piecewise is not None
            try:
                self.piecewise.capture(size, self._memory())
            except RuntimeError as error:
                warnings.warn(f"steps of prompts run without graphs, somewhat slower: {error}", stacklevel=2)
                self.piecewise = None
                return
            if progress is not None:
                progress(len(wanted) + done + 1, len(wanted) + len(strips))

    def _replay(self, works: Many[Work], wanted: Many[int] | None) -> torch.Tensor:
        size = next(size for size in self._sizes if size >= len(works))
        captured = self._captured(size, self._share(works, size))
        self.stage.send_singles(works, size)
        captured.graph.replay()
        logits = captured.logits[: len(works)]
        if wanted is not None and len(wanted) < len(works):
            return logits[torch.tensor(wanted, dtype=torch.int64).to(self.device, non_blocking=True)]
        return logits

    def _share(self, works: Many[Work], size: int) -> bool:
        """Whether some of the works hold the same pages; the device is told which."""
        if self._shared_column is None or len(works) < LEAST_SHARERS:
            return False
        sharers = (size, *(work.sequence for work in works))
        if sharers != self._sharers:
            rows = np.array([work.sequence.row for work in works])
            settled = self._cache.lengths[rows]
            blocks = int(settled.max()) // self._cache.block_tokens
            tables = self._cache.page_tables[self._shared_column, rows, :blocks]
            runs = windows = find_shared_runs(tables, settled, self._cache.block_tokens)
            for group in self._windows:
                tables = self._cache.page_tables[group.columns.start, rows, :blocks]
                first = group.spec.visibility.first_visible_each(settled)
                windows = visible_shared_runs(windows, tables, first, self._cache.block_tokens)
            told = windows if self._windows else None
            self._sharers, self._shares = sharers, bool(runs) and self.pages.set_shared_runs(runs, told, size)
        return self._shares

    def _captured(self, size: int, shares: bool) -> _Captured:
        if (size, shares) not in self._graphs:
            self.stage.send_singles([], size)
            side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):  # compiles, and lets libraries take their memory
                self._forward(self.stage.replayed(size, self.chosen, shares), None)
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with uncollected(), torch.cuda.graph(graph, pool=self._memory()):
                logits = self._forward(self.stage.replayed(size, self.chosen, shares), None)
            self._graphs[size, shares] = _Captured(graph, logits)
        return self._graphs[size, shares]

    def _memory(self) -> Any:
        """The memory that all graphs share: they never run beside each other."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _forward(
        self, batch: Batch, last: torch.Tensor | None, cutter: GraphSplitter | None = None
    ) -> torch.Tensor:
        self.pages.begin(batch, cutter)
        extra: dict[str, Any] = {"cache_params": self.pages}
        if not self._plain:
            extra = {
                "past_key_values": self.pages,
                "pages": self.pages,
                "position_ids": _turned(batch),
            }
        if batch.seen is not None:
            extra["cross_attention_states"] = self.pages  # else its layers are not called at all
        if batch.embeds is None:
            extra["input_ids"] = batch.tokens[None]
        else:
            extra["inputs_embeds"] = batch.embeds[None]
        with torch.inference_mode(), self.steady:
            found = self.model(
                use_cache=False,
                logits_to_keep=0 if last is None else last,
                **extra,
            )
        logits: torch.Tensor = found.logits[0]
        return logits


def _piece(longest: int) -> int:
    """Tokens that batch-invariant attention sums by: enough pieces for a device, not more memory than 64 of them take."""
    return max(512, -(-longest // (64 * 512)) * 512)


def _shows(work: Work) -> bool:
    """Whether a work has more to it than its tokens: images, or their positions."""
    return work.images is not None and work.images.affects_step(work.sequence.length)


def _turned(batch: Batch) -> torch.Tensor:
    """Positions as modeling code takes them: [1, tokens], or on three axes [3, 1, tokens]."""
    if batch.rotary is None:
        return batch.positions[None]
    return batch.rotary[None] if batch.rotary.dim() == 1 else batch.rotary[:, None]

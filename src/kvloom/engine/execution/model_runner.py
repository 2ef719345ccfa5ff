"""Runs a model on the work of a step. Builds the batch in fixed buffers and, on a GPU, replays CUDA graphs.

    runner.run(works) → logits after each work's last token, on the device; does not wait

A `Work` is the tokens of one sequence in a step.

| step                                   | on a GPU                                                     |
|----------------------------------------|--------------------------------------------------------------|
| one token of each sequence             | a graph of the next larger size, with padding                |
| a few tokens of each sequence: drafts  | a graph of the next larger size (`draft_graphs.py`)          |
| prompts, where the host is the bottleneck | piecewise graphs (`piecewise_graphs.py`)                  |
| others                                 | without graphs                                               |

Pages that several sequences share are read once. The runner searches for shared pages when the sequences of a step
change. This module does not depend on requests.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Sequence as Many
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvloom.combinations import refused
from kvloom.core import WHOLE, CacheControl, KVCache, Sequence
from kvloom.kernels.attention import SharedRun, find_shared_runs, is_worth_sharing, visible_shared_runs
from kvloom.kernels.copy import copy_pages
from kvloom.kernels.device import upload
from kvloom.kernels.lora import AdapterRows
from kvloom.models.fusion import fuse
from kvloom.models.lora import AdapterSlots
from kvloom.models.paged import (
    Batch,
    BatchBuilder,
    GraphSplitter,
    Pages,
    Scales,
    Work,
    divide_step,
    runs_separately,
)
from kvloom.models.sharding import ranks_of
from kvloom.models.specs import DRAFT_PREFIX
from kvloom.models.vision import Vision

from .draft_graphs import LARGEST_ROW, DraftGraphs, largest_row
from .piecewise_graphs import PiecewiseGraphs, capturable

__all__ = ["Mirror", "ModelRunner", "graph_sizes"]


MIN_SHARERS = 4
"""Smallest number of sequences for which a search for shared pages saves more time than it takes."""


def graph_sizes(rows: int) -> list[int]:
    """Return the graph sizes, in sequences, for up to `rows` sequences. The sizes are few, but close enough that steps
    need little padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 32), *range(1024, 8192, 128)]
    return [size for size in sizes if size < rows] + [rows]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class Mirror(Protocol):
    """Repeats the calls of a runner on the other ranks of a group."""

    def run(self, works: Many[Work], wanted: Many[int] | None, whole: Many[int], pooled: Many[int]) -> None:
        """Let the other ranks call `ModelRunner.run`. Does not wait."""

    def capture(self) -> None:
        """Let the other ranks call `ModelRunner.capture`. Does not wait."""


class ModelRunner:
    """Runs a model in steps of up to `rows` sequences and `tokens` prompt tokens, plus one token for each decoding
    sequence."""

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
        drafts: int = 0,
        target: ModelRunner | None = None,
        draft_length: int = 0,
        trees: bool = False,
        lora: AdapterSlots | None = None,
        whole_steps: bool = False,
    ) -> None:
        """Create the runner of `model`.

        | argument       | meaning                                                                                   |
        |----------------|-------------------------------------------------------------------------------------------|
        | `graphs`       | allows CUDA graphs                                                                        |
        | `invariant`    | a sequence gets bit-identical results in every batch (CUDA only)                          |
        | `drafts`       | largest number of extra tokens of a step: draft tokens, and tokens that recurrent layers  |
        |                | compute again                                                                             |
        | `target`       | for a draft model: the runner of the target model. Both runners share the pool and the    |
        |                | buffers of batches                                                                        |
        | `draft_length` | largest number of draft tokens of a sequence                                              |
        | `trees`        | whether drafts may be trees                                                               |
        | `lora`         | slots of LoRA adapters                                                                    |
        | `whole_steps`  | with context parallelism: every rank computes all tokens of a step                        |
        """
        self.model, self.device, self.vision = model, buffer.device, vision
        self.mirror: Mirror | None = None
        """Repeats every step on the other ranks. None on one rank, and on every rank but 0."""
        self._ranks = ranks_of(model)
        separate = runs_separately(model)
        if not separate:
            fuse(model, 0 if vision is not None else cache.max_tokens)
        self._lora = lora
        if lora is not None:
            lora.attach()
            lora.invariant = invariant
        self.pages = Pages(
            cache.layout,
            buffer,
            scales,
            _partial_sum_tokens(cache.max_tokens) if invariant else 0,
            "" if target is None else DRAFT_PREFIX,
            None if self._ranks is None else self._ranks.context,
        )
        self.pages.expanded_tokens = tokens  # the memory budget covers this many
        self.watch_step: Callable[[Batch], AbstractContextManager[Any]] = lambda _: nullcontext()
        """A function that returns a context, in which the model runs. A draft head sets this function, to store the
        target's hidden states of each step."""
        self.numerics: AbstractContextManager[Any] = nullcontext()
        """The context for the model and for all computations on logits. If the runner is batch-invariant, the context
        selects batch-invariant kernels. Otherwise the context has no effect."""
        if invariant:
            self._check_batch_invariant()
            from kvloom.kernels.batch_invariant import BatchInvariant

            self.numerics = BatchInvariant()  # type: ignore[no-untyped-call]
        if vision is not None:
            vision.bind_pool(cache.layout, buffer, self.pages.cross_views)
        turns = vision is not None and vision.uses_mrope
        self.stage: BatchBuilder = (
            BatchBuilder(
                cache,
                buffer.device,
                tokens + rows + drafts,
                rows,
                shifted=turns,
                tree_columns=max(4, largest_row(1 + draft_length)) if trees else 0,
                adapted=lora is not None,
            )
            if target is None
            else target.stage
        )
        self.tokens, self.rows = tokens, rows
        self.chosen = torch.zeros(rows, dtype=torch.int64, device=buffer.device)
        """Tokens sampled by the previous step. The `source` of a work is an index into these tokens."""
        decoder = model.get_decoder()  # some models return themselves
        self.decoder: torch.nn.Module | None = (
            decoder if decoder is not model else getattr(model, "model", None)
        )
        """The part of the model that ends with the final norm. None if this part is not a separate module."""
        # A few families return their output matrix as decoder.
        has_decoder = hasattr(self.decoder, "get_input_embeddings")
        self._divides_steps = cache.layout.part != WHOLE and has_decoder and not whole_steps
        if self._divides_steps and self.decoder is not None:
            self.decoder.register_forward_hook(self._join_hidden_states)
        self.hidden_states: list[torch.Tensor] = []
        """The hidden states after the final norm ([tokens, hidden]), one tensor for each of the works `pooled` in
        the last `run`."""
        self._plain = "cache_params" in inspect.signature(model.forward).parameters
        self._graphs: dict[tuple[int, bool, bool], _Captured] = {}
        self._cache = cache
        own = [
            group
            for group in cache.layout.of("token")
            if (group.spec.lifetime == "draft") == (target is not None)
        ]
        full = [group for group in own if not group.spec.visibility.windowed]
        self._shared_column = full[0].columns.start if full and not invariant else None
        self._windows = [
            group
            for group in own
            if group.spec.visibility.windowed and is_worth_sharing(group.spec.visibility)
        ]
        self._sharers: tuple[object, ...] = ()
        self._shares = False
        self._pool: Any = None
        replayable = buffer.is_cuda and self.pages.is_replayable and not separate
        replayable = replayable and not (self._ranks is not None and self._ranks.every.is_staged)
        self._sizes = graph_sizes(rows) if graphs and replayable else []
        self.piecewise: PiecewiseGraphs | None = None
        """Graphs of steps with prompts. None if the model cannot be captured."""
        if self._sizes and not turns and not self.pages.has_states:
            self.piecewise = PiecewiseGraphs(
                self.pages, self.stage, self._forward, self.chosen, tokens + rows
            )
        self.draft_graphs: DraftGraphs | None = None
        """Graphs of steps with drafts. None if there is no speculation or the model does not support these graphs."""
        if self._sizes and draft_length and not invariant:
            again = draft_length if self.pages.has_states else 0
            self.draft_graphs = DraftGraphs(
                self.stage, self._forward, self.chosen, 1 + draft_length + again, tokens + rows
            )

    def _check_batch_invariant(self) -> None:
        """Raise ValueError for a model without batch-invariant kernels."""
        if runs_separately(self.model):
            raise ValueError(refused("batch_invariant, own cache", model=type(self.model).__name__))
        if self.pages.cross_views:
            raise ValueError(refused("batch_invariant, cross-attention"))
        if not self.pages.is_replayable:
            raise ValueError(refused("batch_invariant, heads"))

    def run(
        self,
        works: Many[Work],
        wanted: Many[int] | None = None,
        whole: Many[int] = (),
        pooled: Many[int] = (),
    ) -> torch.Tensor:
        """Compute a step. Return logits [positions, vocabulary] on the device. The logits are valid until the next
        step. Does not wait.

        Each `Work` in `works` has the tokens of one sequence. `wanted`, `whole` and `pooled` are indices in `works`.
        The result first has rows for each entry of `wanted` (None: all of `works`): one row for its last token, and one
        for each draft token. Rows for each entry of `whole` follow, one for every token. The hidden states of `pooled`
        are stored in `hidden_states`.
        """
        if self.mirror is not None:
            self.mirror.run(works, wanted, whole, pooled)
        if self._ranks is not None and any(work.source >= 0 for work in works):
            self._ranks.every.share(self.chosen)
        has_trees = any(work.parents for work in works)
        single = not (whole or pooled) and all(
            len(work.tokens) == 1 and not _has_images(work) for work in works
        )
        # With cold pages, every layer gathers pages on the host. A graph cannot contain this work.
        has_cold_blocks = any(work.sequence.cold_blocks for work in works)
        has_new_states = self.pages.has_states and any(w.sequence.state_length == 0 for w in works)
        if single and self._sizes and not has_cold_blocks and not has_new_states:
            replayed = self._replay(works, wanted)
            if replayed is not None:
                return replayed
        if (
            self.draft_graphs is not None
            and not (has_cold_blocks or has_new_states or whole or pooled)
            and not any(_has_images(work) for work in works)
            and (self.stage.supports_trees or not has_trees)
        ):
            size = self.draft_graphs.size_for(works)
            if size:
                return self.draft_graphs.run(works, size, wanted, self._memory())
        if (
            self.piecewise is not None
            and not (has_cold_blocks or has_trees)
            and not (whole or pooled)
            and not any(work.replayed or work.skipped or _has_images(work) for work in works)
        ):
            size = self.piecewise.size_for(works)
            if size:
                return self.piecewise.run(works, size, wanted)
        batch = self.stage.lay_out(works, self.chosen)
        if self.vision is not None:
            batch = self.vision.add_images(batch, works)
        last = batch.last
        if whole or batch.drafts or (wanted is not None and len(wanted) < len(works)):
            ends = [
                (batch.bounds[i + 1], works[i].drafts)
                for i in (range(len(works)) if wanted is None else wanted)
            ]
            each = [np.arange(end - 1 - drafts, end) for end, drafts in ends]
            each += [np.arange(batch.bounds[i], batch.bounds[i + 1]) for i in whole]
            last = upload(np.concatenate([np.zeros(0, np.int64), *each]), self.device)
        if not pooled:
            return self._forward(batch, last)
        states: list[torch.Tensor] = []
        assert self.decoder is not None
        hook = self.decoder.register_forward_hook(lambda _, __, found: states.append(found[0][0]))
        try:
            logits = self._forward(batch, last)
        finally:
            hook.remove()
        # A model that computes one sequence after the other calls its decoder once per sequence.
        every = states[-1] if len(states) == 1 else torch.cat(states)
        self.hidden_states = [every[batch.bounds[i] : batch.bounds[i + 1]] for i in pooled]
        return logits

    def supports_trees(self, works: Many[Work]) -> bool:
        """Return whether a step may contain draft trees. If not, its drafts must be chains. Trees do not work with
        batch-invariant attention, with cold pages, with images, or in models that compute one sequence after the
        other. On a GPU, no sequence of the step may have more than LARGEST_ROW tokens."""
        if runs_separately(self.model):
            return False
        if self.pages.is_invariant or any(work.sequence.cold_blocks or _has_images(work) for work in works):
            return False
        return self.device.type == "cpu" or max(len(work.tokens) for work in works) <= LARGEST_ROW

    def score(self, works: Many[Work]) -> torch.Tensor:
        """Compute a step. Return the logits after every token ([tokens, vocabulary]), in the order of `works`."""
        return self._forward(self.stage.lay_out(works, self.chosen), None)

    def warm_up(self, choose: Callable[[torch.Tensor], object]) -> tuple[int, float]:
        """Run typical steps on temporary pages and call `choose` with their logits. This compiles kernels before
        requests arrive. Returns the number of prompt tokens in the last step, and the seconds that this step took.
        Does nothing on a CPU, and returns zeros.
        """
        if self.device.type != "cuda":
            return 0, 0.0
        for stride in {group.page_stride for group in self._cache.layout.groups}:
            copy_pages(torch.empty(2 * stride, dtype=torch.uint8, device=self.device), stride, [0], [1])
        limit = max(1, min(self.tokens, self._cache.max_tokens // 2))
        self._run_steps(
            [[limit], [700, 200, 40, 1], [max(1, limit - 300)], [700, 100, 40, 1, 1]], limit, choose
        )
        if self.tokens >= 2 * limit:  # one prompt cannot fill a step
            self._run_steps([[limit] * (self.tokens // limit)], limit)
        # Small steps, in which attention splits its work.
        self._run_steps([[limit // 16], [limit // 4], [20]], limit)
        self._run_steps([[limit // 3, limit // 3]], limit)  # sizes that attention libraries do not support
        self._run_steps([[limit], [limit]], limit)  # two chunks of one long prompt
        torch.cuda.synchronize(self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        begin.record()
        tokens = self._run_steps([[limit]], limit)  # timed after all kernels are compiled
        host = time.perf_counter() - began
        end.record()
        end.synchronize()
        if tokens and self.piecewise is not None:
            self.piecewise.limit(tokens, host, begin.elapsed_time(end) / 1e3)
        return tokens, time.perf_counter() - began

    def _run_steps(
        self,
        shapes: list[list[int]],
        limit: int,
        choose: Callable[[torch.Tensor], object] | None = None,
    ) -> int:
        """Run several steps of the same temporary sequences, and pass the logits of each step to `choose`. Return the
        number of tokens computed in all steps.

        `shapes` has one list per step: the number of tokens of each sequence. A step computes at most `self.tokens`
        tokens, so a number may be reduced. A sequence is left out of a step if the pool is too small for it, or if it
        would become too long. `limit` is the length of the prompt with which each sequence is opened.
        """
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
                        self._cache.match(prompt, CacheControl(store=False, read=False)), is_counted=False
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

    def find_adapter_layers(self) -> None:
        """Run a step of one token on temporary pages, to record which layers it calls. Adapters for other layers are
        then refused."""
        assert self._lora is not None
        self._run_steps([[1]], 1)
        self._lora.refuse_uncalled()

    def try_replay(self) -> None:
        """Run the largest decode step once on padding, without a graph. A trial measures its memory."""
        if self.pages.is_replayable:
            self.stage.send_singles([], self.rows)
            self._forward(self.stage.replayed(self.rows, self.chosen), None)

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every graph. The largest graph is captured first, because the others reuse its memory."""
        if self.mirror is not None:
            self.mirror.capture()
        kinds = (False,) if self._lora is None else (False, True)
        wanted = [(size, False, adapted) for adapted in kinds for size in reversed(self._sizes)]
        if self._shared_column is not None:
            sizes = [size for size in reversed(self._sizes) if size >= MIN_SHARERS]
            wanted += [(size, True, adapted) for adapted in kinds for size in sizes]
        sizes = [] if self.piecewise is None else self.piecewise.sizes
        drafts = self.draft_graphs
        for size in reversed([] if drafts is None else drafts.sizes):
            assert drafts is not None
            drafts.capture(size, self._memory())
        for done, (size, shares, adapted) in enumerate(wanted):
            if shares:
                runs = [SharedRun(0, 256, (0, 1), 0)]
                self.pages.set_shared_runs(runs, runs if self._windows else None, size)
            if self._captured(size, shares, adapted) is None:
                return
            if progress is not None:
                progress(done + 1, len(wanted) + len(sizes))
        self._sharers = ()
        for done, size in enumerate(reversed(sizes)):
            assert self.piecewise is not None
            try:
                self.piecewise.capture(size, self._memory())
            except RuntimeError as error:
                warnings.warn(f"prompt steps run without graphs, and slower: {error}", stacklevel=2)
                self.piecewise = None
                return
            if progress is not None:
                progress(len(wanted) + done + 1, len(wanted) + len(sizes))

    def _replay(self, works: Many[Work], wanted: Many[int] | None) -> torch.Tensor | None:
        """Compute a step of single tokens by a graph. The arguments and the result are those of `run`. Return None if
        the model cannot be captured."""
        size = next(size for size in self._sizes if size >= len(works))
        adapted = any(work.adapter for work in works)
        captured = self._captured(size, self._share(works, size), adapted)
        if captured is None:
            return None
        self.stage.send_singles(works, size)
        captured.graph.replay()
        logits = captured.logits[: len(works)]
        if wanted is not None and len(wanted) < len(works):
            return logits[torch.tensor(wanted, dtype=torch.int64).to(self.device, non_blocking=True)]
        return logits

    def _share(self, works: Many[Work], size: int) -> bool:
        """Return whether sequences of the step share pages. If so, send the ranges of shared pages to the device, so
        that attention reads them once. If the sequences are the same as in the previous call, this method returns the
        previous result without a search.
        """
        if self._shared_column is None or len(works) < MIN_SHARERS:
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
            in_window = windows if self._windows else None
            self._sharers, self._shares = (
                sharers,
                bool(runs) and self.pages.set_shared_runs(runs, in_window, size),
            )
        return self._shares

    def _captured(self, size: int, shares: bool, adapted: bool = False) -> _Captured | None:
        """Return the graph of a decode step, and capture it at its first use. Steps without adapters have their own
        graphs, which compute no low-rank terms. Return None if the model cannot be captured; later steps then run
        without graphs."""
        if (size, shares, adapted) not in self._graphs:
            self.stage.send_singles([], size)
            side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):  # compiles kernels, and lets libraries allocate memory
                self._forward(self.stage.replayed(size, self.chosen, shares, adapted), None)
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            try:
                with capturable(self.device), torch.cuda.graph(graph, pool=self._memory()):
                    logits = self._forward(self.stage.replayed(size, self.chosen, shares, adapted), None)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                warnings.warn(f"steps run without CUDA graphs, and slower: {error}", stacklevel=2)
                self._sizes, self.draft_graphs, self.piecewise = [], None, None
                return None
            self._graphs[size, shares, adapted] = _Captured(graph, logits)
        return self._graphs[size, shares, adapted]

    def _memory(self) -> Any:
        """Return the memory pool in which all CUDA graphs allocate. Graphs can share the memory, because they never
        run at the same time.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _forward(
        self, batch: Batch, last: torch.Tensor | None, cutter: GraphSplitter | None = None
    ) -> torch.Tensor:
        divided = None
        if self._divides_steps and self._ranks is not None and self._ranks.context is not None:
            divided = divide_step(self._ranks.context, batch.bounds[-1])
        self.pages.begin(batch, cutter, divided)
        extra: dict[str, Any] = {"cache_params": self.pages}
        if not self._plain:
            extra = {
                "past_key_values": self.pages,
                "pages": self.pages,
                "position_ids": self._own_tokens(_model_positions(batch)),
            }
        if batch.seen is not None:
            # Without this argument the model skips its cross-attention layers.
            extra["cross_attention_states"] = self.pages
        if batch.embeds is None:
            extra["input_ids"] = self._own_tokens(batch.tokens[None])
        else:
            extra["inputs_embeds"] = batch.embeds[None]
        adapters = nullcontext() if self._lora is None else self._lora.step(*self._adapter_rows(batch))
        with torch.inference_mode(), self.watch_step(batch), self.numerics, adapters:
            found = self.model(
                use_cache=False,
                logits_to_keep=0 if last is None else last,
                **extra,
            )
        logits: torch.Tensor = found.logits[0]
        return logits

    def _adapter_rows(self, batch: Batch) -> list[AdapterRows]:
        """Return the adapters of all tokens of a step. If the step is divided, also return those of the own tokens.
        Empty if the step uses no adapter."""
        every = batch.adapters
        if every is None:
            return []
        if self.pages.divided is None:
            return [every]
        return [every, AdapterRows.of(self._own_tokens(every.token_slots()))]

    def _own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens of x [..., tokens] that this rank computes."""
        return x if self.pages.divided is None else self.pages.divided.own(x, -1)

    def _join_hidden_states(self, _: Any, __: Any, found: Any) -> None:
        """Hook after the decoder: replace the hidden states of this rank's tokens by those of all ranks' tokens."""
        if self.pages.divided is not None:
            found.last_hidden_state = self.pages.divided.join(found.last_hidden_state[0])[0][None]


def _partial_sum_tokens(longest: int) -> int:
    """Return the number of tokens in one partial sum of batch-invariant attention. A sequence of `longest` tokens then
    has at most 64 partial sums, which are enough to fill a device.
    """
    return max(512, -(-longest // (64 * 512)) * 512)


def _has_images(work: Work) -> bool:
    """Return whether images affect the tokens of `work`: some are image tokens, or images shift their positions."""
    return work.images is not None and work.images.affects_step(work.sequence.length)


def _model_positions(batch: Batch) -> torch.Tensor:
    """Return positions in the shape that modelling code expects: [1, tokens], or [3, 1, tokens] for three axes."""
    if batch.rotary is None:
        return batch.positions[None]
    return batch.rotary[None] if batch.rotary.dim() == 1 else batch.rotary[:, None]

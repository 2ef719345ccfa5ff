"""Runs a model on the work of a step. Builds the batch in fixed buffers and, on a GPU, replays CUDA graphs.

    runner.run(works) → logits after each work's last token, on the device; does not wait

A `Work` is the tokens of one sequence in a step.

| step                                   | on a GPU                                                     |
|----------------------------------------|--------------------------------------------------------------|
| one token of each sequence             | a graph of the next larger size (`decode_graphs.py`)         |
| a few tokens of each sequence: drafts  | a graph of the next larger size (`draft_graphs.py`)          |
| prompts, where the host is the bottleneck | piecewise graphs (`piecewise_graphs.py`)                  |
| others                                 | without graphs                                               |

On a CPU, a small model computes a step of a few tokens in one native call (`fusion/small_model.py`).

This module does not depend on requests.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Sequence as Many
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvloom.combinations import refused
from kvloom.core import WHOLE, CacheControl, KVCache, Sequence
from kvloom.kernels.copy import copy_pages
from kvloom.kernels.cpu import SmallModel, SmallStep
from kvloom.kernels.device import upload
from kvloom.kernels.lora import AdapterRows
from kvloom.models.fusion import fuse, small_model
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
from kvloom.models.vision import EncoderDecoder, Vision

from .decode_graphs import DecodeGraphs, SharedPages
from .draft_graphs import LARGEST_ROW, DraftGraphs, largest_row
from .graph_capture import CaptureError, GraphMemory
from .piecewise_graphs import PiecewiseGraphs

__all__ = ["Mirror", "ModelRunner"]


class Mirror(Protocol):
    """Repeats the calls of a runner on the other ranks of a group."""

    def run(self, works: Many[Work], wanted: Many[int] | None, whole: Many[int], pooled: Many[int]) -> None:
        """Send the other ranks this step, which they compute with `ModelRunner.run`. Does not wait."""

    def capture(self) -> None:
        """Order the other ranks to capture their CUDA graphs (`ModelRunner.capture`). Does not wait."""


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
        self._is_fusible = not runs_separately(model) and not isinstance(vision, EncoderDecoder)
        if self._is_fusible:
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
        self.watch_step: Callable[[Batch], AbstractContextManager[Any]] | None = None
        """A function that returns a context, in which the model runs. A draft head sets this function, to store the
        target's hidden states of each step."""
        if invariant:
            self._check_batch_invariant()
        self.numerics = _numerics(invariant)
        """The context for the model and for all computations on logits."""
        if vision is not None:
            vision.bind_pool(cache.layout, buffer, self.pages.cross_views)
        self.stage: BatchBuilder = (
            BatchBuilder(
                cache,
                buffer.device,
                tokens + rows + drafts,
                rows,
                shifted=vision is not None and vision.uses_mrope,
                tree_columns=max(4, largest_row(1 + draft_length)) if trees else 0,
                adapted=lora is not None,
            )
            if target is None
            else target.stage
        )
        self.tokens, self.rows = tokens, rows
        self.chosen = torch.zeros(rows, dtype=torch.int64, device=buffer.device)
        """Tokens sampled by the previous step. The `source` of a work is an index into these tokens."""
        self.decoder = _decoder_of(model)
        """The part of the model that ends with the final norm. None if this part is not a separate module."""
        self._divides_steps = cache.layout.part != WHOLE and _is_decoder(self.decoder) and not whole_steps
        if self._divides_steps and self.decoder is not None:
            self.decoder.register_forward_hook(self._join_hidden_states)
        self.hidden_states: list[torch.Tensor] = []
        """The hidden states after the final norm ([tokens, hidden]), one tensor for each of the works `pooled` in
        the last `run`."""
        self._plain = "cache_params" in inspect.signature(model.forward).parameters
        self._cache = cache
        self.decode_graphs: DecodeGraphs | None = None
        """Graphs of decode steps. None if the model cannot be captured, or graphs are turned off."""
        self.draft_graphs: DraftGraphs | None = None
        """Graphs of steps with drafts. None if there is no speculation or the model does not support these graphs."""
        self.piecewise: PiecewiseGraphs | None = None
        """Graphs of steps with prompts. None if the model cannot be captured."""
        if graphs and buffer.is_cuda and self._is_replayable:
            self._create_graphs(draft_length, is_draft=target is not None, invariant=invariant)
        self._small_model, self._small_columns = self._find_small_model()

    def _find_small_model(self) -> tuple[SmallModel | None, list[int]]:
        """Return the native form of the model, or None, and the column of the page tables for each of its layers."""
        found = None
        if self.device.type == "cpu" and self._is_fusible and self._ranks is None and self._lora is None:
            found = small_model(self.model, self.pages, self._cache.max_tokens)
        return found, [] if found is None else [self.pages.table_column(i) for i in range(found.layers)]

    def observe(self, pages: Pages) -> None:
        """Pass `pages` to the model in all later steps. `pages` must have the layout and the buffer of the present
        pages. Modeling code then computes every step, so `pages` gets all keys and values."""
        self.pages, self._small_model = pages, None

    @property
    def _is_replayable(self) -> bool:
        """Whether steps can be captured. This is not possible for encoder-decoder models, for sequences that run one by
        one, and if ranks exchange tensors through host memory."""
        is_staged = self._ranks is not None and self._ranks.every.is_staged
        return self.pages.is_replayable and self._is_fusible and not is_staged

    def _create_graphs(self, draft_length: int, is_draft: bool, invariant: bool) -> None:
        """Create the objects that capture and replay CUDA graphs. Captures no graph yet."""
        memory, step_tokens = GraphMemory(), self.tokens + self.rows
        shared = None
        if not invariant:
            groups = [g for g in self._cache.layout.of("token") if (g.spec.lifetime == "draft") == is_draft]
            shared = SharedPages(self._cache, self.pages, groups)
        self.decode_graphs = DecodeGraphs(
            self.stage, self._forward, self.chosen, self.rows, shared, self._lora is not None, memory
        )
        has_mrope = self.vision is not None and self.vision.uses_mrope
        if not has_mrope and not (invariant and self.pages.has_states):
            self.piecewise = PiecewiseGraphs(
                self.pages, self.stage, self._forward, self.chosen, step_tokens, memory
            )
        if draft_length and not invariant:
            again = draft_length if self.pages.has_states else 0
            self.draft_graphs = DraftGraphs(
                self.stage, self._forward, self.chosen, 1 + draft_length + again, step_tokens, memory
            )

    def _drop_graphs(self, error: CaptureError) -> None:
        """Run all later steps without graphs, and warn."""
        warnings.warn(f"steps run without CUDA graphs, and slower: {error}", stacklevel=3)
        self.decode_graphs = self.draft_graphs = self.piecewise = None

    def generate(self, works: Many[Work], counts: Many[int], last_too: bool) -> npt.NDArray[np.int64] | None:
        """Compute the known tokens of each sequence, and its most likely next tokens, `counts[i]` in all, in one native
        call. Return the chosen tokens [sequences, longest]. Pages for all tokens must be reserved. With `last_too`,
        also compute the last chosen token.

        Only small models on a CPU support this (see `small_model`). For other models, and for steps that native code
        does not support, return None and compute nothing."""
        step = self._small_step(works, [count + int(last_too) - 1 for count in counts])
        if self._small_model is None or step is None:
            return None
        return self._small_model.generate(step, counts, int(last_too))

    def _small_step(self, works: Many[Work], later: Many[int] = ()) -> SmallStep | None:
        """Return a step in the form that the native model takes. `later` has the number of tokens that follow in each
        sequence, if any. Return None if the model has no native form, or if native code does not support the step: a
        step that is too large, or has trees, images, cold pages, or tokens that are not written."""
        small, cache = self._small_model, self._cache
        if small is None or self.watch_step is not None or not works:
            return None
        if sum([len(work.tokens) for work in works]) > small.max_tokens:
            return None
        tokens, firsts, rows, blocks = [], [], [], 1
        for place, work in enumerate(works):
            sequence = work.sequence
            if work.parents or work.images or sequence.cold_blocks or (work.recomputed and not work.rewrites):
                return None
            own = work.tokens if work.source < 0 else self.chosen[work.source, None].numpy()
            first = sequence.length + work.skipped - work.recomputed
            needed = -(-(first + len(own) + (later[place] if later else 0)) // cache.block_tokens)
            if needed > cache.block_tables.blocks[sequence.row]:
                raise ValueError("some tokens of the step have no page; extend the sequence first")
            tokens.append(own.tolist())
            firsts.append(first)
            rows.append(sequence.row)
            blocks = max(blocks, needed)
        columns = self._small_columns
        tables = {column: cache.page_tables[column, rows, :blocks] for column in set(columns)}
        return SmallStep(tokens, firsts, [tables[column] for column in columns])

    def _check_batch_invariant(self) -> None:
        """Raise ValueError if a layer of the model has no batch-invariant kernels."""
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
        if not (whole or pooled) and (step := self._small_step(works)) is not None:
            assert self._small_model is not None
            return self._small_model.compute(step, _logit_positions(step.starts, works, wanted).tolist())
        if self.mirror is not None:
            self.mirror.run(works, wanted, whole, pooled)
        if self._ranks is not None and any(work.source >= 0 for work in works):
            self._ranks.every.share(self.chosen)
        if not (whole or pooled):
            logits = self._run_in_graphs(works, wanted)
            if logits is not None:
                return logits
        batch = self.stage.lay_out(works, self.chosen)
        if self.vision is not None:
            batch = self.vision.add_images(batch, works)
        last = batch.last
        if whole or batch.drafts or (wanted is not None and len(wanted) < len(works)):
            last = upload(_logit_positions(batch.bounds, works, wanted, whole), self.device)
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

    def _run_in_graphs(self, works: Many[Work], wanted: Many[int] | None) -> torch.Tensor | None:
        """Compute a step by CUDA graphs. The arguments and the result are those of `run`. Return None if no graph fits
        the step."""
        if self.decode_graphs is None and self.draft_graphs is None and self.piecewise is None:
            return None
        # With cold pages, every layer gathers pages on the host. A graph cannot contain this work.
        if any(work.sequence.cold_blocks or _has_images(work) for work in works):
            return None
        has_new_states = self.pages.has_states and any(w.sequence.state_length == 0 for w in works)
        is_decode = all(len(work.tokens) == 1 for work in works)
        if self.decode_graphs is not None and is_decode and not has_new_states:
            try:
                return self.decode_graphs.run(works, wanted)
            except CaptureError as error:
                self._drop_graphs(error)
        has_trees = any(work.parents for work in works)
        can_draft = not has_new_states and (self.stage.supports_trees or not has_trees)
        if self.draft_graphs is not None and can_draft:
            size = self.draft_graphs.size_for(works)
            if size:
                return self.draft_graphs.run(works, size, wanted)
        splits_drafts = self.pages.has_states and any(work.drafts for work in works)
        is_plain = not (has_trees or splits_drafts or any(w.recomputed or w.skipped for w in works))
        if self.piecewise is not None and is_plain:
            size = self.piecewise.size_for(works)
            if size:
                return self.piecewise.run(works, size, wanted)
        return None

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
        requests arrive. Return the number of prompt tokens in the last step, and the seconds that this step took.
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
        if self.pages.has_states:  # single tokens beside a prompt: its first chunk, and its second
            self._run_steps([[8, 20], [1, 1, limit // 4], [1, 1, 40]], limit)
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
        if self._is_replayable:
            self.stage.send_singles([], self.rows)
            self._forward(self.stage.replayed(self.rows, self.chosen), None)

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every graph. The largest graph is captured first, because the others reuse its memory."""
        if self.mirror is not None:
            self.mirror.capture()
        if self.draft_graphs is not None:
            for size in reversed(self.draft_graphs.sizes):
                self.draft_graphs.capture(size)
        variants = [] if self.decode_graphs is None else self.decode_graphs.variants
        sizes = [] if self.piecewise is None else self.piecewise.sizes
        total = len(variants) + len(sizes)
        for done, variant in enumerate(variants):
            assert self.decode_graphs is not None
            try:
                self.decode_graphs.capture(variant)
            except CaptureError as error:
                self._drop_graphs(error)
                return
            if progress is not None:
                progress(done + 1, total)
        for done, size in enumerate(reversed(sizes)):
            assert self.piecewise is not None
            try:
                self.piecewise.capture(size)
            except RuntimeError as error:
                warnings.warn(f"prompt steps run without graphs, and slower: {error}", stacklevel=2)
                self.piecewise = None
                return
            if progress is not None:
                progress(len(variants) + done + 1, total)

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
        watch = nullcontext() if self.watch_step is None else self.watch_step(batch)
        adapters = nullcontext() if self._lora is None else self._lora.step(*self._adapter_rows(batch))
        with torch.inference_mode(), watch, self.numerics, adapters:
            found = self.model(
                use_cache=False,
                logits_to_keep=0 if last is None else last,
                **extra,
            )
        logits: torch.Tensor = found.logits[0]
        return logits

    def _adapter_rows(self, batch: Batch) -> list[AdapterRows]:
        """Return the adapter of each token of a step. If the step is divided between ranks, also return the adapters of
        this rank's tokens. The list is empty if the step uses no adapter.
        """
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


def _numerics(invariant: bool) -> AbstractContextManager[Any]:
    """Return a context that selects batch-invariant kernels if `invariant` is set, and otherwise has no effect."""
    if not invariant:
        return nullcontext()
    from kvloom.kernels.batch_invariant import BatchInvariant

    return BatchInvariant()  # type: ignore[no-untyped-call]


def _is_decoder(found: Any) -> bool:
    """Return whether a result of `_decoder_of` is a decoder. A few families return their output matrix."""
    return hasattr(found, "get_input_embeddings")


def _decoder_of(model: Any) -> torch.nn.Module | None:
    """Return the part of the model that ends with the final norm. None if this part is not a separate module."""
    decoder: torch.nn.Module = model.get_decoder()  # some models return themselves
    return decoder if decoder is not model else getattr(model, "model", None)


def _logit_positions(
    bounds: Many[int] | npt.NDArray[np.int64],
    works: Many[Work],
    wanted: Many[int] | None,
    whole: Many[int] = (),
) -> npt.NDArray[np.int64]:
    """Return the places of the tokens in a step whose logits `ModelRunner.run` returns, in order. `bounds` are the
    places of the first token of each work, and the number of all tokens."""
    ends = [(bounds[i + 1], works[i].drafts) for i in (range(len(works)) if wanted is None else wanted)]
    each = [np.arange(end - 1 - drafts, end) for end, drafts in ends]
    each += [np.arange(bounds[i], bounds[i + 1]) for i in whole]
    return np.concatenate([np.zeros(0, np.int64), *each])


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

"""The layers of a model write and read pages of the pool through `Pages`, one step at a time.

    begin(batch)           sets the step
    update(k, v, layer)    stores new K and V until `attend`
    attend(layer, q, …)    writes new K and V to their slots, then reads pages

One attention plan is made per step and visibility. Plan objects are reused between steps. State layers and
cross-attention layers only get views of their pages from `Pages`. Their own modules (`mixers`,
`cross_attention`) access these pages.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Literal, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch

from kvloom.core import WHOLE, ContextPart, PoolLayout, Visibility
from kvloom.kernels import cpu
from kvloom.kernels.attention import (
    KVPages,
    Mask,
    Plan,
    ReferencePlan,
    Shape,
    SharedRun,
    SharedRuns,
    add_cold_attention,
    decode_plan,
    is_worth_sharing,
    merge_many,
    plan_capacity,
    prefill_plan,
    split_dim,
    supports_dense,
)
from kvloom.kernels.dtypes import FLOAT_DTYPES
from kvloom.kernels.fused import RMSNorm
from kvloom.kernels.memory import LayerView, layer_views
from kvloom.kernels.write import Rotary, write
from kvloom.models.sharding import Ranks
from kvloom.models.specs import DRAFT_PREFIX, ModelError

from .batch import Batch
from .divided_step import DividedStep
from .empty_cache import EmptyCache
from .image_inputs import EMBEDDINGS
from .latents import Absorbed, ExpandedPlan, absorb, into_latent_space, out_of_latent_space
from .mixers import MixerSteps
from .scales import Scales, scale_sizes

__all__ = ["PAGES_BY_HANDLE", "GraphSplitter", "Pages"]

_HANDLES = count()
PAGES_BY_HANDLE: WeakValueDictionary[int, Pages] = WeakValueDictionary()
"""All live `Pages`, by handle. An operation of a compiled model finds its pages here."""

LAST_WRITTEN = threading.local()
"""The handle of the `Pages` of this thread's last cache update. Modules that do not pass their keywords on to
attention find their pages by it."""


class GraphSplitter(Protocol):
    """Splits the capture of a model at its attention calls. CUDA graphs then contain only the parts between these
    calls."""

    def split_at(
        self,
        call: Callable[..., torch.Tensor],
        query: torch.Tensor,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        v_dim: int,
    ) -> torch.Tensor:
        """Return a buffer [tokens, heads, v_dim] for the result of one attention call. Every replay runs `call(query,
        new_k, new_v, out=…)` outside the graphs, which fills the buffer."""
        ...


EXPANDED_TOKENS = 16384
"""Default of `Pages.expanded_tokens`."""


class Pages(EmptyCache):
    """The object that modeling code gets as `past_key_values`. It has a view of the pool for each layer. `begin`
    sets the step.
    """

    def __init__(
        self,
        layout: PoolLayout,
        buffer: torch.Tensor,
        scales: Scales | None = None,
        piece: int = 0,
        prefix: str = "",
        ranks: Ranks | None = None,
    ) -> None:
        """A target and a draft model may share the pool. `prefix` selects the model whose layers are used: "" selects
        the target, and `DRAFT_PREFIX` selects the draft model.

        `scales` are the static scales of quantised layers that do not store scales in their pages. If `piece` is
        not 0, attention and states are batch-invariant. Attention then sums `piece` tokens at a time.

        With context parallelism, the blocks of `layout` are divided between `ranks`.
        """
        self.layout, self.device, self._piece = layout, buffer.device, piece
        self._ranks = ranks if layout.part != WHOLE else None
        self.divided: DividedStep | None = None
        """The tokens of the step that this rank computes. None if it computes all of them."""
        self._views: dict[int, tuple[LayerView, Visibility]] = {}
        self._states: dict[int, LayerView] = {}
        self._host_fields: dict[int, dict[str, torch.Tensor]] = {}
        self.cross_views: dict[int, tuple[LayerView, int]] = {}
        """The view of each cross-attention layer, and the layer's column in the page ids of an image."""
        for name, view in layer_views(buffer, layout).items():
            spec = layout.groups[view.group].spec
            if name == EMBEDDINGS or name.startswith(DRAFT_PREFIX) != bool(prefix):
                continue
            name = name.removeprefix(prefix)
            found = re.fullmatch(r"layers\.(\d+)\.\w+", name)
            if found is None:
                raise ModelError(
                    f"layer {name!r} ({spec.kind}) is not a layer of a model: names are layers.N.KIND"
                )
            beside = (scales or {}).get(name, {})
            if beside.keys() != scale_sizes(spec).keys():
                wanted = ", ".join(scale_sizes(spec)) or "none"
                raise ModelError(
                    f"{name} needs static scales: {wanted}; it was given {', '.join(beside) or 'none'}"
                )
            view.fields.update(beside)
            if spec.axis == "media":
                self.cross_views[int(found[1])] = view, layout.groups[view.group].column + view.run
            elif spec.unit == "state":
                self._states[int(found[1])] = view
            else:
                self._views[int(found[1])] = view, spec.visibility
                if ranks is None and self._is_divided(view):
                    raise ValueError(f"the blocks of {name} are divided between ranks: pass `ranks`")
        self._batch: Batch | None = None
        self.steps: MixerSteps
        """The sequences of the current step, for mixers."""
        self._plans: dict[tuple[Shape, Visibility, ContextPart, int, int, bool], Plan] = {}
        self._shared_runs: dict[tuple[int, bool], SharedRuns] = {}
        self._made: set[tuple[Shape, Visibility, ContextPart]] = set()
        self._layers: dict[int, cpu.LayerPages | None] = {}
        self._single_token_rows: dict[tuple[int, int], cpu.SingleTokenRows] | Literal[False] | None = None
        self._new: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self._splitter: GraphSplitter | None = None
        self._expanded: ExpandedPlan | Literal[False] | None = None
        self.expanded_tokens = EXPANDED_TOKENS
        """Largest number of MLA latents that are expanded to keys and values at a time."""
        self.handle = next(_HANDLES)
        """The number by which the operations of a compiled model find these pages."""
        PAGES_BY_HANDLE[self.handle] = self

    def set_host_memory(self, arena: torch.Tensor) -> None:
        """Set the host memory that contains cold pages. This memory has slabs of the same layout as the pool. Copies
        nothing."""
        arena = arena[: arena.numel() // self.layout.slab_bytes * self.layout.slab_bytes]
        for name, view in layer_views(arena, self.layout).items():
            found = re.fullmatch(r"layers\.(\d+)\.\w+", name)
            if found is not None and int(found[1]) in self._views:
                pool_fields = self._views[int(found[1])][0].fields  # these fields include the static scales
                self._host_fields[int(found[1])] = {**pool_fields, **view.fields}

    def begin(
        self, batch: Batch, splitter: GraphSplitter | None = None, divided: DividedStep | None = None
    ) -> None:
        """Set the step that the next execution of the model computes. With a `splitter`, attention is not computed: the
        splitter gets the attention call of each layer. If the step is `divided`, the model gets only the tokens of this
        rank."""
        self._batch, self._splitter = batch, splitter
        self.divided = divided
        self.steps = MixerSteps(batch, self._piece > 0)
        self._made.clear()
        self._expanded = None
        self._single_token_rows = None

    @property
    def is_invariant(self) -> bool:
        """Whether attention and states are batch-invariant."""
        return self._piece > 0

    @property
    def has_states(self) -> bool:
        """Whether any layer stores a state."""
        return bool(self._states)

    @property
    def is_replaying(self) -> bool:
        """Whether one CUDA graph computes the whole current step. This is possible for steps of single tokens, and for
        steps with drafts."""
        return self._batch is not None and self._batch.replayed

    @property
    def is_replayable(self) -> bool:
        """Whether steps can be captured in a CUDA graph. This requires GPU kernels that support every layer, and whole
        blocks: the ranks of a divided context exchange results in every layer."""
        return self._ranks is None and all(
            _shape(view.fields).is_supported for view, _ in self._views.values()
        )

    @property
    def batch(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("no step was begun: call begin(batch) before running the model")
        return self._batch

    def token_view(self, layer_idx: int) -> LayerView:
        """Return the view of the pages that contain an attention layer's tokens."""
        return self._views[layer_idx][0]

    def state_view(self, layer_idx: int) -> LayerView:
        """Return the view of the pages that contain a recurrent layer's states."""
        return self._states[layer_idx]

    @property
    def token_layers(self) -> list[int]:
        """The layers that store tokens."""
        return list(self._views)

    @property
    def state_layers(self) -> list[int]:
        """The layers that store a state."""
        return list(self._states)

    def read_tokens(
        self, layer_idx: int, row: int, first: int, end: int, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Return a copy of a layer's tokens `first` to `end` of one sequence of the step, which has number `row`. The
        result has one tensor [tokens, …] per field, in `dtype`, without quantisation."""
        view, batch = self._views[layer_idx][0], self.batch
        at = torch.arange(first, end, device=self.device)
        block = self.layout.block_tokens
        place = batch.tables[view.group][view.run][row, at // block].long(), at % block
        found = {}
        for name, pages in view.fields.items():
            if name.endswith("_scale"):
                continue
            tokens, scale = pages[place], view.fields.get(f"{name}_scale")
            if scale is not None:  # scales are in the pages, or static: one per head
                scale = scale[place] if scale.dim() == 3 else scale.flatten()
                tokens = tokens.float() * (scale if name == "latent" else scale[..., None])
            found[name] = tokens.to(dtype)
        return found

    def write_tokens(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the new keys and values [tokens, heads, dim] of all sequences of the step to their slots."""
        self._write(self._views[layer_idx][0], key, value)

    def write_index(self, layer_idx: int, keys: torch.Tensor) -> None:
        """Write the new keys [tokens, dim] of a layer's indexer to their slots."""
        view, batch = self._views[layer_idx][0], self.batch
        view.fields["index"][batch.pages[view.group][view.run], batch.places] = keys.to(
            view.fields["index"].dtype
        )

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values of one layer ([1, heads, tokens, dim]) and return them unchanged. The
        attention of the layer writes them to pages before it reads.
        """
        self._new = layer_idx, key, value
        if not torch.compiler.is_compiling():
            LAST_WRITTEN.handle = self.handle
        return key, value

    def take(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that `update` stored for this layer. Raises ModelError if `update` was not
        called for this layer."""
        if self._new is None or self._new[0] != layer_idx:
            raise ModelError(
                f"layer {layer_idx} attends, but has not written its keys and values just before"
            )
        _, key, value = self._new
        self._new = None
        return key, value

    def _write(self, view: LayerView, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write new keys and values [tokens, heads, dim] to their slots."""
        fields, batch = view.fields, self.batch
        if "latent" in fields:
            slots = batch.slots[view.group][view.run]
            latents = torch.cat((key, value), -1)
            write(
                fields["latent"][:, :, None], None, slots, latents, None, k_scale=fields.get("latent_scale")
            )
        elif not key.is_cuda and fields["k"].dtype == key.dtype and not self._is_divided(view):
            # On a CPU, faster than computing them from slots.
            at = (
                batch.pages[view.group][view.run],
                batch.places,
            )
            for name, new in (("k", key), ("v", value)):
                if cpu.supports(fields[name], new):
                    cpu.write_tokens(fields[name], new, *at)
                else:
                    fields[name][at] = new
        else:
            write(
                fields["k"], fields["v"], batch.slots[view.group][view.run], key, value,
                k_scale=fields.get("k_scale"), v_scale=fields.get("v_scale"),
            )  # fmt: skip

    def _is_divided(self, view: LayerView) -> bool:
        """Return whether the blocks of a layer are divided between ranks."""
        return self.layout.groups[view.group].parts > 1

    def _write_rotated(
        self,
        view: LayerView,
        key: torch.Tensor,
        value: torch.Tensor,
        query: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Write new keys and values like `_write`, but rotate keys and queries first."""
        fields, pairs = view.fields, rotary[0].shape[-1] // 2
        cos, sin = (x[0, :, :pairs] for x in rotary)
        write(
            fields["k"], fields["v"], self.batch.slots[view.group][view.run], key, value,
            k_scale=fields.get("k_scale"), v_scale=fields.get("v_scale"), rotary=Rotary(cos, sin, rounded=True), q=query,
        )  # fmt: skip

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        latent_values: int = 0,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values of a layer ([1, heads, tokens, dim]) to its pages. Then return attention of
        packed queries [tokens, heads, dim] over the pages: [tokens, heads, dim of v]. If the step is divided, all these
        tensors have only the tokens of this rank.

        `latent_values` is the number of dims of a latent that are values. `rotary` is (cos, sin), each [1, tokens, dim]
        with every angle twice. `rotary` is used only in steps that a CUDA graph computes. In these steps, queries are
        rotated in place, and keys are rotated while they are written.
        """
        view = self._views[layer_idx][0]
        new_k, new_v = (x[0].transpose(0, 1) for x in (key, value))
        if self.divided is not None:
            query, new_k, new_v = self.divided.join(query, new_k, new_v)
        if rotary is None:
            self._write(view, new_k, new_v)
        else:
            self._write_rotated(view, new_k, new_v, query, rotary)
        read = partial(self._read, layer_idx, scale, softcap, sinks, latent_values)
        if self._splitter is None:
            return read(query, new_k, new_v)
        return self._splitter.split_at(read, query, new_k, new_v, latent_values or value.shape[-1])

    def attend_latents(
        self,
        layer_idx: int,
        query: torch.Tensor,
        latents: torch.Tensor,
        norm: RMSNorm,
        rotary: Rotary,
        scale: float,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        """Write the new latents of an MLA layer [tokens, dims] to its pages, normalised and rotated. The same launch
        rotates the last dims of packed queries [tokens, heads, dim]. Then return attention [tokens, heads, dim of
        v].

        `weight` is the up-projection. Long prompts are expanded (see `latents`). May rotate queries in place.
        """
        view, rank = self._views[layer_idx][0], weight.shape[2]
        plain = query.shape[-1] - (latents.shape[-1] - rank)
        absorbs = self._splitter is None and not self.expands_latents(layer_idx, query, weight)
        absorbed = query.new_empty((*query.shape[:2], latents.shape[-1])) if absorbs else None
        write(
            view.fields["latent"][:, :, None], None, self.batch.slots[view.group][view.run], latents[:, None], None,
            k_scale=view.fields.get("latent_scale"), norm=norm, rotary=rotary, q=query[..., plain:],
            q_out=None if absorbed is None else absorbed[..., rank:],
        )  # fmt: skip
        if absorbed is not None:
            into_latent_space(query[..., :plain], weight[:, :plain], absorbed[..., :rank])
            found = self._read(layer_idx, scale, None, None, rank, absorbed, query, query)
            return out_of_latent_space(found, weight[:, plain:])
        read = partial(self._read_latents, layer_idx, scale, weight)
        if self._splitter is None:
            return read(query, query, query)
        return self._splitter.split_at(read, query, query, query, weight.shape[1] - plain)

    def _read_latents(
        self,
        layer_idx: int,
        scale: float,
        weight: torch.Tensor,
        query: torch.Tensor,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of packed queries over the latents of a layer. Writes to `out` if it is given. Sequences that
        the plan of the step does not expand are computed in latent space."""
        view = self._views[layer_idx][0]
        latents, rank = view.fields["latent"], weight.shape[2]
        rotated = latents.shape[-1] - rank
        plain = query.shape[-1] - rotated
        if out is None:
            out = query.new_empty((*query.shape[:2], weight.shape[1] - plain))
        some: Absorbed | None = None
        if self.expands_latents(layer_idx, query, weight):
            plan = self._expanded
            assert plan
            plan.attend(query, latents, self.batch.tables[view.group][view.run], weight, scale, out)
            some = plan.absorbed
            if some is None:
                return out
        absorbed = absorb(query if some is None else query[some.queries], weight, rotated)
        found = self._read(layer_idx, scale, None, None, rank, absorbed, new_k, new_v, some=some)
        if some is None or isinstance(some.queries, slice):
            out_of_latent_space(found, weight[:, plain:], out if some is None else out[some.queries])
        else:
            out[some.queries] = out_of_latent_space(found, weight[:, plain:])
        return out

    def expands_latents(self, layer_idx: int, query: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether long prompts of this step read expanded keys and values in an MLA layer (see `latents`).
        `weight` is the up-projection.
        """
        if self._expanded is None:
            batch = self.batch
            plain = not (batch.replayed or self._piece or torch.compiler.is_compiling())
            plain = plain and self._splitter is None and batch.cold is None and self._ranks is None
            plain = plain and batch.spans is None and batch.trees is None
            self._expanded = (
                ExpandedPlan.of_step(batch.bounds, batch.sizes, self.expanded_tokens, self.device)
                if plain
                else None
            ) or False
        latents = self._views[layer_idx][0].fields["latent"]
        v_dim = weight.shape[1] + latents.shape[-1] - weight.shape[2] - query.shape[-1]
        return bool(self._expanded) and supports_dense(query, v_dim) and latents.dtype == query.dtype

    def attend_expanded(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        """Write the new latents of an MLA layer to its pages. `key` has the compressed latents, and `value` the rotated
        part of keys. Then return attention of packed queries [tokens, heads, dim]. Long prompts read expanded keys and
        values. All other sequences are computed in latent space. `weight` is the up-projection."""
        new_k, new_v = (x[0].transpose(0, 1) for x in (key, value))
        self._write(self._views[layer_idx][0], new_k, new_v)
        return self._read_latents(layer_idx, scale, weight, query, new_k, new_v)

    def _read(
        self,
        layer_idx: int,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        latent_values: int,
        query: torch.Tensor,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        out: torch.Tensor | None = None,
        some: Absorbed | None = None,
    ) -> torch.Tensor:
        """Return attention of packed queries over a layer's pages. Writes the result to `out`, if given. `some`
        selects sequences, and `query` then has only their queries."""
        (view, span), batch = self._views[layer_idx], self.batch
        k, v, k_scale, v_scale = _attention_pages(view.fields, latent_values)
        cold = None if span.windowed else batch.cold
        tables = (batch if cold is None else cold).tables[view.group][view.run]
        if some is not None:
            tables = tables[some.rows]
        own = query.dtype
        if query.is_cuda and k.dtype in FLOAT_DTYPES:
            query = query.to(k.dtype)  # the kernels need queries in the dtype of the pages
        shape = Shape(query.shape[1], k.shape[2], k.shape[3], v.shape[3], k.shape[1], k.dtype)
        plan = self._plan(shape, span, self.layout.part if self._is_divided(view) else WHOLE, some)
        if self._is_divided(view):
            return self._read_divided(
                plan, query, KVPages(k, v, k_scale, v_scale), tables, scale, softcap, sinks
            )
        # Attention may read new keys and values directly only if pages store them unchanged.
        kept = not latent_values and k.dtype == new_k.dtype
        lse = None if cold is None else query.new_empty(query.shape[:2], dtype=torch.float32)
        images = batch.spans if span.windowed or not batch.windows_join else None
        found, _ = plan.attend(
            query, k, v, tables, Mask(span, softcap, sinks, batch.trees, images), scale,
            k_scale, v_scale, out=out if query.dtype == own else None, lse=lse,
            new_k=new_k if kept else None, new_v=new_v if kept else None,
        )  # fmt: skip
        if cold is not None and lse is not None:
            host = _attention_pages(self._host_fields[layer_idx], latent_values)
            column = self.layout.groups[view.group].column + view.run
            for row, pages in cold.host_pages.items():
                part = slice(batch.bounds[row], batch.bounds[row + 1])
                add_cold_attention(found[part], lse[part], query[part], host, pages[column], scale, softcap)
        if out is not None and query.dtype != own:
            return out.copy_(found)
        if self.divided is not None:
            found = self.divided.own(found)
        return found.to(own)

    def _read_divided(
        self,
        plan: Plan,
        query: torch.Tensor,
        pages: KVPages,
        tables: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return attention of packed queries over pages whose blocks are divided between ranks. Every rank reads its
        part of the blocks. The results of all ranks are merged by log-sum-exp. Sinks count only on rank 0. If the step
        is divided, `query` has all tokens of the step, and the result only the tokens of this rank.
        """
        part, ranks = self.layout.part, self._ranks
        assert ranks is not None
        mask = Mask(plan.span, softcap, None if part.rank else sinks, self.batch.trees, part=part)
        out, lse = plan.attend(query, pages.k, pages.v, tables, mask, scale, pages.k_scale, pages.v_scale)
        assert lse is not None
        found = torch.cat((out.to(lse.dtype), lse[..., None]), -1)
        every = ranks.gather(found) if self.divided is None else self.divided.exchange(found)
        return merge_many(every[..., :-1], every[..., -1]).to(query.dtype)

    def single_token_rows(self, layer_idx: int) -> tuple[cpu.LayerPages, cpu.SingleTokenRows] | None:
        """Return the pages of a layer and the tokens of the step, for `cpu.attention_step`. Return None if that
        function does not support the step or the layer."""
        if self._single_token_rows is None:
            batch = self.batch
            plain = (
                batch.spans is None
                and batch.trees is None
                and batch.cold is None
                and self.divided is None
                and not batch.replayed
                and self._splitter is None
                and not self._piece
            )
            self._single_token_rows = {} if plain and batch.queries else False
        if self._single_token_rows is False or layer_idx not in self._views:
            return None
        view, span = self._views[layer_idx]
        layer, key = self._native_pages(layer_idx), (view.group, view.run)
        if layer is None:
            return None
        if key not in self._single_token_rows:
            queries = self.batch.queries
            assert queries is not None
            rows, lengths = queries
            seen = cpu.VisibleTokens(span.first_visible_each(lengths - 1), lengths)
            tables = self.batch.tables[view.group][view.run]
            lines = rows if len(rows) > len(tables) else None
            self._single_token_rows[key] = cpu.SingleTokenRows(tables, seen, lines)
        return layer, self._single_token_rows[key]

    def _native_pages(self, layer_idx: int) -> cpu.LayerPages | None:
        """Return the pages of a layer for native code, or None if native code does not support them."""
        if layer_idx not in self._layers:
            view, span = self._views[layer_idx]
            k, v = view.fields.get("k"), view.fields.get("v")
            fits = k is not None and v is not None and k.shape == v.shape and cpu.supports(k, v)
            fits = fits and not span.has_holes and not self._is_divided(view)
            self._layers[layer_idx] = cpu.LayerPages(k, v) if fits else None  # type: ignore[arg-type]
        return self._layers[layer_idx]

    def cpu_pages(self, layer_idx: int) -> cpu.LayerPages | None:
        """Return the pages of a layer with full attention, for `cpu.SmallModel`. Return None if native code does not
        support the layer."""
        if layer_idx not in self._views or self.is_invariant or self._views[layer_idx][1].windowed:
            return None
        return self._native_pages(layer_idx)

    def table_column(self, layer_idx: int) -> int:
        """Return the column of the cache's page tables that has the page ids of an attention layer."""
        view = self._views[layer_idx][0]
        return self.layout.groups[view.group].column + view.run

    def set_shared_runs(self, runs: list[SharedRun], windows: list[SharedRun] | None, rows: int) -> bool:
        """Set the shared runs of decode steps with `rows` sequences. A shared run is a range of pages that several
        sequences have in common. Until the next call, replays of these steps read each shared run once. `runs` are
        for full-attention layers, and `windows` for windowed layers. If `windows` is None, windowed layers keep the
        shared runs of the last call. Return whether any of `runs` was set."""
        if windows is not None:
            self._shared_runs_for(rows, True).set_runs(windows, np.arange(rows + 1))
        sharing = self._shared_runs_for(rows, False)
        sharing.set_runs(runs, np.arange(rows + 1))
        return sharing.run_count > 0

    def _shared_runs_for(self, rows: int, windowed: bool) -> SharedRuns:
        key = plan_capacity(rows), windowed
        if key not in self._shared_runs:
            self._shared_runs[key] = SharedRuns(key[0], device=self.device)
        return self._shared_runs[key]

    def _plan(self, shape: Shape, span: Visibility, part: ContextPart, some: Absorbed | None = None) -> Plan:
        """Return the attention plan of the step for layers with this shape and visibility (`span`). `part` is the part
        of each block that the layers' pages contain. With `some`, the plan covers only these sequences."""
        batch = self.batch
        # For a replayed step, only the device has the lengths. On a GPU, only decode plans support trees.
        decodes = batch.replayed or (
            batch.trees is not None and self.device.type == "cuda" and shape.is_supported
        )
        rows = plan_capacity(len(batch.sizes)) if decodes else 0
        longest = batch.longest if batch.replayed or batch.trees is None else batch.trees.shape[1]
        key = shape, span, part, rows, longest, batch.shares and is_worth_sharing(span)
        if key not in self._plans:
            self._plans[key] = self._new_plan(*key)
        plan = self._plans[key]
        if key[:3] not in self._made:
            if rows:
                plan.make(batch.starts, batch.lengths)
            else:
                has_cold_rows = batch.cold is not None and not span.windowed
                sizes = batch.cold.sizes if has_cold_rows and batch.cold else batch.sizes
                if some is None:
                    plan.make(batch.bounds, sizes)
                else:
                    plan.make(some.bounds, some.lengths)
            self._made.add(key[:3])
        return plan

    def _new_plan(
        self, shape: Shape, span: Visibility, part: ContextPart, rows: int, queries: int, shared: bool
    ) -> Plan:
        if self._piece:
            from kvloom.kernels.attention import BatchInvariantDecodePlan, BatchInvariantPrefillPlan

            longest = next(iter(self.batch.tables.values())).shape[2] * shape.page_tokens
            if rows:
                return BatchInvariantDecodePlan(shape, self._piece, rows, longest, span, self.device)
            return BatchInvariantPrefillPlan(shape, self._piece, span, self.device)
        if rows:
            sharing = self._shared_runs_for(rows, span.windowed) if shared else None
            return decode_plan(shape, rows, queries, span, self.device, sharing, part)
        if self.device.type == "cuda" and not shape.is_supported:
            return ReferencePlan(shape, span)
        return prefill_plan(shape, span, self.device, part)


def _attention_pages(fields: dict[str, torch.Tensor], latent_values: int) -> KVPages:
    """Return the keys, values and scales of a layer. In a latent, the first `latent_values` dims are the values."""
    if not latent_values:
        return KVPages(fields["k"], fields["v"], fields.get("k_scale"), fields.get("v_scale"))
    k, scale = fields["latent"][:, :, None], fields.get("latent_scale")
    return KVPages(k, k[..., :latent_values], scale, scale)


def _shape(fields: dict[str, torch.Tensor]) -> Shape:
    """Return the attention shape of a layer's pages. The number of query heads is unknown here, so it is set to the
    number of KV heads."""
    k = fields["latent"][:, :, None] if "latent" in fields else fields["k"]
    v_dim = split_dim(k.shape[3])[0] if "latent" in fields else fields["v"].shape[3]
    return Shape(k.shape[2], k.shape[2], k.shape[3], v_dim, k.shape[1], k.dtype)

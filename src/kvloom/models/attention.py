"""The two seams into Hugging Face's modeling code: what its layers write, and how their attention reads.

    modeling code      past_key_values.update(k, v, layer)        attention_interface(module, q, k, v, …, pages=…)
    this module        `Pages.update`: notes what is new          `attend`: writes that to its slots, reads the pages

Writing and reading are one call, and to a compiler one opaque operation (`kvloom::attend`), which finds its pages by a number:
nothing of ours is traced, and the pool is never copied. A model runs on one packed row of tokens of several sequences ([1, tokens]); nothing of its own cache is left. Layers that
keep a state are in `mixers.py`, those over images in `crossing.py`; architectures that never call the attention registry are
refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Literal, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import nn

from kvloom.core import PoolLayout, Span
from kvloom.kernels import cpu
from kvloom.kernels.attention import Plan, ReferencePlan, decode_plan, prefill_plan
from kvloom.kernels.reference import Mask
from kvloom.kernels.shapes import DTYPES, Shape, split_dim
from kvloom.kernels.sharing import SharedRun, Sharing
from kvloom.kernels.views import LayerView, layer_views
from kvloom.kernels.write import write

from .batch import Batch
from .crossing import wrap_cross
from .embeddings import EMBEDDINGS
from .families import absorb, calls_registry, keeps_latents, settle
from .mixers import Steps, is_mixer, wrap
from .reading import ModelError
from .scales import Scales, scale_sizes
from .void import Void

__all__ = ["ATTENTION", "Pages", "attend", "install"]

ATTENTION = "kvloom"
"""The name under which `attend` stands in transformers' registry."""
IGNORED = frozenset(
    {
        *("dropout", "position_ids", "cache_position", "use_cache", "is_causal", "sliding_window"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
        *("cross_attention_states", "cross_attention_mask", "full_text_row_masked_out_mask"),
    }
)
"""Keywords of attention calls that say what the batch or the layer's spec says already, or nothing at inference."""


_HANDLES = count()
_OPEN: WeakValueDictionary[int, Pages] = WeakValueDictionary()

ROOMS = (16, 64, 256, 512, 1024, 4096)
"""Rows that plans of replayed steps have room for: one plan serves graphs of several sizes."""


class Cutter(Protocol):
    """Takes attention's calls out of a run of the model that is recorded without them."""

    def cut(
        self,
        call: Callable[..., torch.Tensor],
        query: torch.Tensor,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        v_dim: int,
    ) -> torch.Tensor:
        """Where the result of `call(query, new_k, new_v, out=…)` ([tokens, heads, v_dim]) will be whenever the run is
        repeated."""
        ...


class Pages(Void):
    """What modeling code finds in `past_key_values`: the pool, seen by its layers, for the step that `begin` named."""

    def __init__(
        self, layout: PoolLayout, buffer: torch.Tensor, scales: Scales | None = None, piece: int = 0
    ) -> None:
        """`scales` are those that stand beside pages: all that quantised layers need and do not keep in them. With a `piece`
        attention is batch-invariant, and sums by so many tokens (`kernels.invariant`)."""
        self.layout, self.device, self._piece = layout, buffer.device, piece
        self._views: dict[int, tuple[LayerView, Span]] = {}
        self._states: dict[int, LayerView] = {}
        self.crosses: dict[int, tuple[LayerView, int]] = {}
        """Layers that see images alone, and their column among the page ids of an image's run."""
        for name, view in layer_views(buffer, layout).items():
            spec = layout.groups[view.group].spec
            if name == EMBEDDINGS:
                continue
            found = re.fullmatch(r"layers\.(\d+)\.\w+", name)
            if found is None:
                raise ModelError(f"layer {name!r} ({spec.kind}) is not one of a model's: layers.N.KIND")
            beside = (scales or {}).get(name, {})
            if beside.keys() != scale_sizes(spec).keys():
                wanted = ", ".join(scale_sizes(spec)) or "none"
                raise ModelError(
                    f"{name} needs static scales: {wanted}; it was given {', '.join(beside) or 'none'}"
                )
            view.fields.update(beside)
            if spec.axis == "media":
                self.crosses[int(found[1])] = view, layout.groups[view.group].column + view.run
            elif spec.unit == "state":
                self._states[int(found[1])] = view
            else:
                self._views[int(found[1])] = view, spec.span
        self._batch: Batch | None = None
        self.steps: Steps
        """How mixers see the step that was begun."""
        self._plans: dict[tuple[Shape, Span, int, bool], Plan] = {}
        self._sharing: dict[int, Sharing] = {}
        self._made: set[tuple[Shape, Span]] = set()
        self._layers: dict[int, cpu.LayerPages | None] = {}
        self._singles: dict[tuple[int, int], cpu.Rows] | Literal[False] | None = None
        self._new: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self._cutter: Cutter | None = None
        self.handle = next(_HANDLES)
        """By which a compiled model's operations find these pages."""
        _OPEN[self.handle] = self

    def begin(self, batch: Batch, cutter: Cutter | None = None) -> None:
        """The step that the next run of the model computes. With a `cutter`, pages are not read in that run: reading is
        handed to it, layer by layer."""
        self._batch, self._cutter = batch, cutter
        self.steps = Steps(batch)
        self._made.clear()
        self._singles = None

    @property
    def keeps_states(self) -> bool:
        """Whether some layer keeps a state."""
        return bool(self._states)

    @property
    def replayable(self) -> bool:
        """Whether steps can be captured in a graph: the GPU's kernels take every layer."""
        return all(_shape(view.fields).supported for view, _ in self._views.values())

    @property
    def batch(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("no step was begun: call begin(batch) before running the model")
        return self._batch

    def state_view(self, layer_idx: int) -> LayerView:
        """The pages that a recurrent layer's states are in."""
        return self._states[layer_idx]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note one layer's new keys and values ([1, heads, tokens, dim]), which the layer's attention writes before it
        reads; they are handed back as they came."""
        self._new = layer_idx, key, value
        return key, value

    def take(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that `update` was given for this layer."""
        if self._new is None or self._new[0] != layer_idx:
            raise ModelError(
                f"layer {layer_idx} attends, but has not written its keys and values just before"
            )
        _, key, value = self._new
        self._new = None
        return key, value

    def _write(self, view: LayerView, key: torch.Tensor, value: torch.Tensor) -> None:
        """New keys and values [tokens, heads, dim] to their slots."""
        fields, batch = view.fields, self.batch
        if "latent" in fields:
            slots = batch.slots[view.group][view.run]
            latents = torch.cat((key, value), -1)
            write(
                fields["latent"][:, :, None], None, slots, latents, None, k_scale=fields.get("latent_scale")
            )
        elif not key.is_cuda and fields["k"].dtype == key.dtype:
            at = batch.pages[view.group][view.run], batch.places  # a CPU need not work them out of slots
            for name, new in (("k", key), ("v", value)):
                if cpu.takes(fields[name], new):
                    cpu.put(fields[name], new, *at)
                else:
                    fields[name][at] = new
        else:
            write(
                fields["k"], fields["v"], batch.slots[view.group][view.run], key, value,
                k_scale=fields.get("k_scale"), v_scale=fields.get("v_scale"),
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
    ) -> torch.Tensor:
        """Write a layer's new keys and values ([1, heads, tokens, dim]), then let packed queries [tokens, heads, dim] attend
        to its pages. `latent_values`: how much of a latent is values."""
        view, span = self._views[layer_idx]
        new_k, new_v = (x[0].transpose(0, 1) for x in (key, value))
        self._write(view, new_k, new_v)
        read = partial(self._read, view, span, scale, softcap, sinks, latent_values)
        if self._cutter is None:
            return read(query, new_k, new_v)
        return self._cutter.cut(read, query, new_k, new_v, latent_values or value.shape[-1])

    def _read(
        self,
        view: LayerView,
        span: Span,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        latent_values: int,
        query: torch.Tensor,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of packed queries over a layer's pages, into `out` where that is given."""
        fields, batch = view.fields, self.batch
        if latent_values:
            k = fields["latent"][:, :, None]
            v = k[..., :latent_values]
            k_scale = v_scale = fields.get("latent_scale")
        else:
            k, v = fields["k"], fields["v"]
            k_scale, v_scale = fields.get("k_scale"), fields.get("v_scale")
        own = query.dtype
        if query.is_cuda and k.dtype in DTYPES:
            query = query.to(k.dtype)  # its kernels take queries of the dtype of such pages alone
        shape = Shape(query.shape[1], k.shape[2], k.shape[3], v.shape[3], k.shape[1], k.dtype)
        plan = self._plan(shape, span)
        kept = not latent_values and k.dtype == new_k.dtype  # else the pages alone know what was kept
        found, _ = plan.attend(
            query, k, v, batch.tables[view.group][view.run], Mask(span, softcap, sinks, spans=batch.spans), scale,
            k_scale, v_scale, out=out if query.dtype == own else None,
            new_k=new_k if kept else None, new_v=new_v if kept else None,
        )  # fmt: skip
        if out is not None and query.dtype != own:
            return out.copy_(found)
        return found.to(own)

    def singles(self, layer_idx: int) -> tuple[cpu.LayerPages, cpu.Rows] | None:
        """A layer's pages and the step's rows, where the step is one token a row and `cpu.step` takes it; else None."""
        if self._singles is None:
            batch = self.batch
            plain = batch.spans is None and not batch.replayed and self._cutter is None and not self._piece
            self._singles = {} if plain and batch.bounds[-1] == len(batch.sizes) else False
        if self._singles is False or layer_idx not in self._views:
            return None
        view, span = self._views[layer_idx]
        if layer_idx not in self._layers:
            k, v = view.fields.get("k"), view.fields.get("v")
            fits = k is not None and v is not None and k.shape == v.shape and cpu.takes(k, v)
            self._layers[layer_idx] = cpu.LayerPages(k, v) if fits else None  # type: ignore[arg-type]
        layer, key = self._layers[layer_idx], (view.group, view.run)
        if layer is None:
            return None
        if key not in self._singles:
            lengths = np.array(self.batch.sizes)
            seen = cpu.Seen(span.first_visible_each(lengths - 1), lengths)
            self._singles[key] = cpu.Rows(self.batch.tables[view.group][view.run], seen)
        return layer, self._singles[key]

    def share(self, runs: list[SharedRun], rows: int) -> bool:
        """Tell which of `rows` single tokens to be replayed hold the same pages, so that those are read once; whether any
        do. It holds until it is told again."""
        sharing = self._sharing_of(rows)
        sharing.set(runs, np.arange(rows + 1))
        return sharing.holds > 0

    def _sharing_of(self, rows: int) -> Sharing:
        room = _room(rows)
        if room not in self._sharing:
            self._sharing[room] = Sharing(room, device=self.device)
        return self._sharing[room]

    def _plan(self, shape: Shape, span: Span) -> Plan:
        batch = self.batch
        # A step that is replayed has single tokens, and lengths that only the device knows.
        rows = _room(len(batch.sizes)) if batch.replayed else 0
        key = shape, span, rows, batch.shares and not span.windowed
        if key not in self._plans:
            self._plans[key] = self._new_plan(*key)
        plan = self._plans[key]
        if key[:2] not in self._made:
            if rows:
                plan.make(batch.starts, batch.lengths)
            else:
                plan.make(batch.bounds, batch.sizes)
            self._made.add(key[:2])
        return plan

    def _new_plan(self, shape: Shape, span: Span, rows: int, shares: bool) -> Plan:
        if self._piece:
            from kvloom.kernels.invariant import Pieces, Whole

            longest = next(iter(self.batch.tables.values())).shape[2] * shape.block_tokens
            if rows:
                return Pieces(shape, self._piece, rows, longest, span, self.device)
            return Whole(shape, self._piece, span, self.device)
        if rows:
            return decode_plan(shape, rows, 1, span, self.device, self._sharing_of(rows) if shares else None)
        if self.device.type == "cuda" and not shape.supported:
            return ReferencePlan(shape, span)
        return prefill_plan(shape, span, self.device)


def _room(rows: int) -> int:
    return next(room for room in ROOMS if room >= rows)


def _shape(fields: dict[str, torch.Tensor]) -> Shape:
    """The shape of attention over a layer's pages, by as many query heads as they have."""
    k = fields["latent"][:, :, None] if "latent" in fields else fields["k"]
    v_dim = split_dim(k.shape[3])[0] if "latent" in fields else fields["v"].shape[3]
    return Shape(k.shape[2], k.shape[2], k.shape[3], v_dim, k.shape[1], k.dtype)


@torch.library.custom_op("kvloom::attend", mutates_args=())
def _operation(
    handle: int,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    latent_values: int,
) -> torch.Tensor:
    """`Pages.attend` as one operation of a compiler's graph. It changes the pool, which no graph sees: what it reads of that
    it has written itself, or an operation before it whose result its queries come from."""
    found = _OPEN[handle].attend(layer, query, key, value, scale, softcap, sinks, latent_values)
    return found.contiguous()


@_operation.register_fake
def _(
    handle: int,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    latent_values: int,
) -> torch.Tensor:
    return query.new_empty((*query.shape[:2], latent_values or value.shape[-1]))


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    pages: Pages | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of every layer: [1, heads, tokens, dim] in, [1, tokens, heads, dim] out."""
    unknown = {name for name, given in keywords.items() if given is not None} - IGNORED
    if unknown:
        raise ModelError(
            f"{type(module).__name__} calls attention with {', '.join(sorted(unknown))}, which is not known here"
        )
    if pages is None:
        raise ModelError("attention was called without pages: run the model through kvloom")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer, packed = int(module.layer_idx), query[0].transpose(0, 1)  # type: ignore[arg-type]
    new = pages.take(layer)
    if not keeps_latents(module):
        return _attended(pages, layer, packed, *new, scale, softcap, s_aux, 0)[None], None
    absorbed, up = absorb(module, packed)
    out = _attended(pages, layer, absorbed, *new, scale, softcap, s_aux, up.shape[-1])
    return torch.einsum("thr,hdr->thd", out, up)[None], None


def _attended(pages: Pages, layer: int, *rest: Any) -> torch.Tensor:
    """Whoever is not compiling calls what the operation would: its way through the dispatcher costs more than it does."""
    if torch.compiler.is_compiling():
        out: torch.Tensor = _operation(pages.handle, layer, *rest)
        return out
    return pages.attend(layer, *rest)


def install(model: Any, context: int | None = None) -> None:
    """Make a Hugging Face model's layers call `attend`, and its mixers take packed rows of sequences of up to `context` tokens
    (the model's own limit if None). Raises ModelError where some layer never would."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    recurrent = [module for module in model.modules() if is_mixer(module)]
    for module in recurrent:
        wrap(module)
    if not recurrent and not calls_registry(model):
        raise ModelError(
            f"{type(model).__name__} never calls the attention registry, so that its memory cannot be ours"
        )
    for module in model.modules():
        wrap_cross(module)
    settle(model, context)
    config = model.config
    text = config.get_text_config()
    parts = [name for name in config.sub_configs if getattr(config, name, None) is text]
    # Where there are towers beside the text model, theirs stays as it is.
    config._attn_implementation = {"": ATTENTION, **dict.fromkeys(parts, ATTENTION)} if parts else ATTENTION

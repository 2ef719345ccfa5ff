"""Runs the decoder of an encoder-decoder model (T5, BART, Whisper) on the packed tokens of a step.

| part of the decoder | modeling code                      | here                                              |
|---------------------|------------------------------------|---------------------------------------------------|
| positions           | counted from the length of a cache | those of the batch                                |
| self attention      | one sequence length for all rows   | pages, as in other models                         |
| with a bias (T5)    | a bias for each query and key      | pages, with one bias for each distance            |
| cross attention     | keys of one encoder input          | media pages: each token reads those of its input  |

The encoder, and calls without pages, run as before: attention is changed only during a step. A model with other
attention or positions runs one sequence at a time (`own_cache`).
"""

from __future__ import annotations

import copy
import inspect
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from kvloom.kernels.attention import FULL, KVPages, Mask, Plan, ReferencePlan, Shape, prefill_plan
from kvloom.kernels.dtypes import FLOAT_DTYPES
from kvloom.kernels.memory import LayerView
from kvloom.models.specs import ModelError

from .cross_attention import read_field
from .pages import Pages
from .sequence_cache import encoder_outputs

__all__ = ["packing_refusal", "run_packed"]

ATTENTION = "kvloom_decoder"
"""The name of `_attend` in transformers' registry."""
CROSS_ATTENTION = ("encoder_attn", "EncDecAttention")
"""Names of cross-attention modules in the layers of a decoder."""


def packing_refusal(model: Any) -> str | None:
    """Return the reason why the decoder of an encoder-decoder model cannot compute packed tokens, or None if it can."""
    if getattr(model.config, "expert_capacity", None):
        return "its experts drop tokens of a step beyond their capacity"
    decoder = model.get_decoder()
    modules = {name.rpartition(".")[2]: module for name, module in decoder.named_modules()}
    if not any(name in modules for name in CROSS_ATTENTION):
        return "its cross attention has an unknown name"
    if "ALL_ATTENTION_FUNCTIONS" not in vars(sys.modules[type(decoder).__module__]):
        return "its attention is written inside its modules"
    positions = getattr(decoder, "embed_positions", None)
    if positions is None:
        has_bias = any(hasattr(module, "compute_bias") for module in modules.values())
        return None if has_bias else "its positions have an unknown form"
    takes = inspect.signature(positions.forward).parameters
    if "position_ids" in takes or hasattr(positions, "create_position_ids_from_input_ids"):
        return None
    return "it counts the positions of tokens itself"


def run_packed(model: Any) -> None:
    """Make an encoder-decoder model compute the packed tokens of a step. Repeated calls are allowed."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if isinstance(model.forward, _PackedDecoder):
        return
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
    model.forward = _PackedDecoder(model)


class _PackedDecoder:
    """The forward of an encoder-decoder model on packed tokens."""

    def __init__(self, model: Any) -> None:
        self._inner = model.forward
        self.step: _Step | None = None
        """The step that is computed now. None between steps."""
        self.__signature__ = inspect.signature(model.forward)
        self._plans: dict[Shape, Plan] = {}
        self._weight = model.get_input_embeddings().weight
        self._width = int(model.config.hidden_size)
        decoder = model.get_decoder()
        self._config = copy.deepcopy(decoder.config)  # the encoder may share the other one
        for name, module in decoder.named_modules():
            if hasattr(module, "config"):
                module.config = self._config
            if hasattr(module, "layer_idx"):
                module.packed_decoder = self
                module.reads_encoder = name.endswith(CROSS_ATTENTION)
            if hasattr(module, "compute_bias"):
                module.compute_bias = partial(self._bias_by_distance, module.compute_bias)
        positions = getattr(decoder, "embed_positions", None)
        if positions is not None:
            positions.forward = partial(self._embed_positions, positions, positions.forward)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        pages = keywords.get("pages")
        if not isinstance(pages, Pages):
            return self._inner(*args, **keywords)
        if pages.batch.trees is not None:
            raise ModelError("an encoder-decoder model cannot compute draft trees")
        before = self._config._attn_implementation
        self._config._attn_implementation, self.step = ATTENTION, _Step(pages, self._plans)
        # Only the presence of the encoder's states is read.
        states = encoder_outputs(self._weight.new_zeros((1, 1, self._width)))
        try:
            logits = self._inner(
                decoder_input_ids=pages.batch.tokens[None], past_key_values=self._caches(pages),
                encoder_outputs=states, use_cache=True,
            ).logits[0]  # fmt: skip
        finally:
            self._config._attn_implementation, self.step = before, None
        keep = keywords.get("logits_to_keep", 0)
        return SimpleNamespace(logits=(logits[keep] if isinstance(keep, torch.Tensor) else logits)[None])

    def _caches(self, pages: Pages) -> Any:
        """Return the cache for modeling code. Self attention updates pages. Cross attention finds keys that are only
        placeholders, because `_attend` reads media pages."""
        from transformers import DynamicCache, EncoderDecoderCache

        both = EncoderDecoderCache(DynamicCache(), DynamicCache())
        nothing = self._weight.new_zeros((1, 1, 1, 1))
        layers = dict.fromkeys(pages.token_layers, SimpleNamespace(keys=nothing, values=nothing))
        both.self_attention_cache, both.cross_attention_cache = pages, SimpleNamespace(layers=layers)
        both.is_updated = dict.fromkeys(pages.token_layers, True)
        return both

    def _embed_positions(self, module: Any, own: Any, *args: Any, **keywords: Any) -> Any:
        if self.step is None:
            return own(*args, **keywords)
        batch = self.step.pages.batch
        if hasattr(module, "create_position_ids_from_input_ids"):  # M2M-100: padding tokens have no position
            first = module.padding_idx + 1
            longest = max(1, *batch.sizes)
            if first + longest > len(module.weights):
                module.make_weights(first + longest, module.embedding_dim, module.padding_idx)
            at = torch.where(batch.tokens == module.padding_idx, first - 1, batch.positions + first)
            return module.weights[at][None]
        like = keywords.get("position_ids", args[2] if len(args) > 2 else batch.positions)
        return own(args[0], position_ids=batch.positions.view_as(like))

    def _bias_by_distance(self, own: Any, *args: Any, **keywords: Any) -> torch.Tensor:
        """Return the bias of every distance between two tokens of a sequence: [1, heads, 1, distances], longest first.
        Modeling code passes it on to `_attend`."""
        if self.step is not None:
            longest = max(1, *self.step.pages.batch.sizes)
            args, keywords = (1, longest), {"device": self._weight.device, "past_seen_tokens": longest - 1}
        found: torch.Tensor = own(*args, **keywords)
        return found


class _Step:
    """The attention of one step."""

    def __init__(self, pages: Pages, plans: dict[Shape, Plan]) -> None:
        self.pages, self._plans = pages, plans
        self._made: set[Shape] = set()
        self._media = self._media_tables()
        self._groups: list[_EqualRows] | None = None

    def _media_tables(self) -> torch.Tensor | None:
        """Return the block table of each token's encoder input: [columns, tokens, blocks]. None without inputs, as in a
        trial step."""
        seen = self.pages.batch.seen
        if seen is None:
            return None
        widest = max(1, *(part.pages.shape[1] for part in seen.parts))
        columns = max(part.pages.shape[0] for part in seen.parts)
        tokens = self.pages.batch.bounds[-1]
        tables = torch.zeros((columns, tokens, widest), dtype=torch.int32, device=self.pages.device)
        begin = 0
        for part in seen.parts:
            if len(part.real):
                tables[:, begin : begin + part.count, : part.pages.shape[1]] = part.pages[:, None]
            begin += part.count
        return tables

    def attend_encoder(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the attention of packed queries [tokens, heads, dim] over the encoder's tokens. For the kernels, each
        query is a sequence of its own, which has all tokens of the encoder."""
        view, column = self.pages.cross_views[layer]
        pages = KVPages(*(view.fields.get(name) for name in ("k", "v", "k_scale", "v_scale")))  # type: ignore[arg-type]
        k, v, own = pages.k, pages.v, query.dtype
        if self._media is None:
            return query.new_zeros((*query.shape[:2], v.shape[3]))
        if query.is_cuda and k.dtype in FLOAT_DTYPES:
            query = query.to(k.dtype)
        shape = Shape(query.shape[1], k.shape[2], k.shape[3], v.shape[3], k.shape[1], k.dtype)
        plan = self._plan(shape, query.device)
        found, _ = plan.attend(
            query, k, v, self._media[column], Mask(FULL), scale, pages.k_scale, pages.v_scale
        )
        return found.to(own)

    def _plan(self, shape: Shape, device: torch.device) -> Plan:
        if shape not in self._plans:
            supported = device.type == "cpu" or shape.is_supported
            self._plans[shape] = (
                prefill_plan(shape, FULL, device) if supported else ReferencePlan(shape, FULL)
            )
        plan, seen = self._plans[shape], self.pages.batch.seen
        if shape not in self._made:
            assert seen is not None
            counts = [max(1, len(part.real)) for part in seen.parts for _ in range(part.count)]
            plan.make(list(range(len(counts) + 1)), counts)
            self._made.add(shape)
        return plan

    def attend_with_bias(
        self, layer: int, query: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor], scale: float, bias: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        """Write the new keys and values of a layer to its pages. Then return attention over the pages, with a bias
        [heads, distances] that is added to the scores, longest distance first. Plain torch: sequences with equal
        numbers of queries are computed together, over a copy of their pages."""
        if self._groups is None:
            self._groups = _equal_rows(self.pages)
        self.pages.write_tokens(layer, *(x[0].transpose(0, 1) for x in new))
        view = self.pages.token_view(layer)
        if len(self._groups) == 1:
            return self._groups[0].attend(view, query, scale, bias)
        out = torch.empty_like(query)
        for group in self._groups:
            out[group.queries] = group.attend(view, query[group.queries], scale, bias)
        return out


class _EqualRows:
    """The sequences of a step that have the same number of queries."""

    def __init__(self, pages: Pages, rows: list[int], count: int) -> None:
        batch, device, block = pages.batch, pages.device, pages.layout.block_tokens
        self._rows, self._tables = torch.tensor(rows, device=device), batch.tables
        self._blocks = max(1, *(-(-batch.sizes[row] // block) for row in rows))
        starts = torch.tensor([batch.bounds[row] for row in rows], device=device)
        self.queries = (starts[:, None] + torch.arange(count, device=device)).flatten()
        """The indices of the queries in the step."""
        sizes = torch.tensor([batch.sizes[row] for row in rows], device=device)
        key = torch.arange(self._blocks * block, device=device)
        at = sizes[:, None] - count + torch.arange(count, device=device)
        self._distance = at[:, :, None] - key  # [rows, queries, keys]
        self._hidden = self._distance < 0
        self._unwritten = (key >= sizes[:, None])[:, None, :, None]

    def attend(self, view: LayerView, query: torch.Tensor, scale: float, bias: torch.Tensor) -> torch.Tensor:
        """Return the attention of these sequences: [queries, heads, dim]."""
        rows, dim = len(self._rows), query.shape[-1]
        ids = self._tables[view.group][view.run][self._rows, : self._blocks].flatten().long()

        def read(name: str) -> torch.Tensor:
            found = read_field(view.fields, name, ids, None, query.dtype)  # [heads, rows * keys, dim]
            found = found.reshape(len(found), rows, -1, found.shape[-1]).transpose(0, 1)
            return found.masked_fill(self._unwritten, 0)  # unwritten values may be NaN

        added = bias[:, (bias.shape[1] - 1 - self._distance).clamp(max=bias.shape[1] - 1)].transpose(0, 1)
        added = added.masked_fill(self._hidden[:, None], -torch.inf)
        queries = query.reshape(rows, -1, query.shape[1], dim).transpose(1, 2)
        found = functional.scaled_dot_product_attention(queries, read("k"), read("v"), added, scale=scale)
        return found.transpose(1, 2).flatten(0, 1)


def _equal_rows(pages: Pages) -> list[_EqualRows]:
    bounds = pages.batch.bounds
    by_count: dict[int, list[int]] = {}
    for row in range(len(bounds) - 1):
        by_count.setdefault(bounds[row + 1] - bounds[row], []).append(row)
    return [_EqualRows(pages, rows, count) for count, rows in by_count.items()]


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of the decoder. Input is [1, heads, tokens, dim], output [1, tokens, heads, dim]."""
    step, layer = module.packed_decoder.step, int(module.layer_idx)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    packed = query[0].transpose(0, 1)
    if module.reads_encoder:
        found = step.attend_encoder(layer, packed, scale)
    elif position_bias is None:
        found = step.pages.attend(layer, packed, *step.pages.take(layer), scale, None, None)
    else:
        found = step.attend_with_bias(layer, packed, step.pages.take(layer), scale, position_bias[0, :, 0])
    return found[None], None

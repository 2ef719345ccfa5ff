"""Cross-attention layers on pages. Tokens that see an image read the image's keys and values from pages, in plain
torch. `vision.cross_vision` writes the pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Many
from typing import Any

import torch
from torch.nn import functional

from kvloom.kernels.memory import LayerView

from .image_inputs import ImageGroup

__all__ = ["attend_images", "read_field", "wrap_cross_attention"]


def attend_images(
    view: LayerView, column: int, query: torch.Tensor, parts: Many[ImageGroup], scale: float
) -> torch.Tensor:
    """Return the attention of queries over the images that they see. Queries and result are [tokens, heads, dim].
    `parts` divides the queries, in order, into groups that see the same images. `column` is the layer's index in
    `ImageGroup.pages`."""
    fields, out, begin = view.fields, [], 0
    for part in parts:
        ids, q = part.pages[column], query[begin : begin + part.count].transpose(0, 1)
        k, v = (read_field(fields, name, ids, part.real, query.dtype) for name in "kv")
        found = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], scale=scale, enable_gqa=True
        )
        out.append(found[0].transpose(0, 1))
        begin += part.count
    return torch.cat(out)


def read_field(
    fields: Mapping[str, torch.Tensor],
    name: str,
    ids: torch.Tensor,
    real: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the keys or values (`name`) in the pages `ids`, without quantisation: [heads, tokens, dim]. `real`
    selects the tokens that are not padding; None selects all. fp8 pages are indexed as bytes, because torch cannot
    index fp8 on all devices."""
    pages, scale = fields[name], fields.get(f"{name}_scale")
    raw = pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages
    chosen = slice(None) if real is None else real
    found = raw[ids].view(pages.dtype).flatten(0, 1)[chosen].to(dtype)
    if scale is not None:
        each = scale[ids].flatten(0, 1)[chosen] if scale.dim() == 3 else scale.view(1, -1)
        found = found * each[..., None].to(dtype)
    return found.transpose(0, 1)


def wrap_cross_attention(layer: Any) -> bool:
    """If `layer` is a cross-attention decoder layer, make it accept packed tokens and return True. Otherwise return
    False. Repeated calls are allowed.

    Tokens that see an image pass through the layer and read the image from pages. Other tokens skip the layer.
    """
    attention = getattr(layer, "cross_attn", None)
    if attention is None or not hasattr(layer, "cross_attn_attn_gate"):
        return False
    if not getattr(attention, "is_fused", False):
        # queries have another input than keys and values, so the projections cannot be joined
        attention.is_fused = True
        own = layer.forward

        def look(hidden_states: torch.Tensor, pages: Any, **_: Any) -> tuple[torch.Tensor, None]:
            tokens = hidden_states.shape[1]
            query = attention.q_norm(attention.q_proj(hidden_states).view(tokens, -1, attention.head_dim))
            view, column = pages.cross_views[attention.layer_idx]
            out = attend_images(view, column, query, pages.batch.seen.parts, attention.scaling)
            return attention.o_proj(out.reshape(1, tokens, -1)), None

        def forward(hidden_states: torch.Tensor, pages: Any, **named: Any) -> torch.Tensor:
            if pages.batch.seen is None:
                return hidden_states
            places = pages.batch.seen.places
            given = {**named, "full_text_row_masked_out_mask": None}
            return hidden_states.index_copy(1, places, own(hidden_states[:, places], pages=pages, **given))

        attention.forward, layer.forward = look, forward
    return True

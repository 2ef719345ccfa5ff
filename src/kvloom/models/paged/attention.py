"""The two places where Hugging Face modeling code calls kvloom: the cache update and the attention function.

    modeling code   past_key_values.update(k, v, layer)        attention_interface(module, q, k, v, …, pages=…)
    here            `Pages.update`: remembers new K and V      `attend`: writes them to their slots, reads the pages

`attend` both writes and reads. For a compiler it is one opaque operation (`kvloom::attend`), which finds its pages
by a number. The compiler therefore traces nothing here and never copies the pool. A model runs on the packed tokens
of a step ([1, tokens]), without its own cache. `mixers` handles layers with states, and `cross_attention` handles
layers that attend to images. `packed_decoder` runs the decoder of encoder-decoder models. Models that cannot run on
packed tokens run with their own cache (`own_cache`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvloom.models.specs import ModelError

from .cross_attention import wrap_cross_attention
from .family_exceptions import (
    absorb_latent,
    keep_latents,
    keeps_latents,
    prepare,
    separation_reason,
    up_projection,
)
from .mixers import is_mixer, wrap_mixer
from .own_cache import run_separately
from .packed_decoder import run_packed
from .pages import LAST_WRITTEN, PAGES_BY_HANDLE, Pages

__all__ = ["ATTENTION", "IGNORED", "attend", "install"]

ATTENTION = "kvloom"
"""The name of `attend` in transformers' registry."""
IGNORED = frozenset(
    {
        *("dropout", "position_ids", "cache_position", "use_cache", "is_causal", "sliding_window"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"),
        *("cross_attention_states", "cross_attention_mask", "full_text_row_masked_out_mask"),
    }
)
"""Keywords of attention calls that may be ignored. They repeat the batch or the layer spec, or have no effect at
inference."""


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
    """`Pages.attend` as one operation in the graph of a compiler.

    The operation modifies the pool, which is not part of the graph. The order of operations is still correct. Each
    operation reads only pages that it wrote itself or that earlier steps wrote. Its queries depend on the results of
    earlier operations, so the compiler cannot move it before them.
    """
    found = PAGES_BY_HANDLE[handle].attend(layer, query, key, value, scale, softcap, sinks, latent_values)
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
    """The attention function of every layer. Input is [1, heads, tokens, dim], output [1, tokens, heads, dim]."""
    unknown = {name for name, given in keywords.items() if given is not None} - IGNORED
    if unknown:
        raise ModelError(
            f"{type(module).__name__} calls attention with {', '.join(sorted(unknown))}, which is not supported"
        )
    if pages is None:  # a module that does not pass its keywords on
        pages = PAGES_BY_HANDLE.get(getattr(LAST_WRITTEN, "handle", -1))
    if pages is None:
        raise ModelError("attention was called without pages: run the model through kvloom")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer, packed = int(module.layer_idx), query[0].transpose(0, 1)  # type: ignore[arg-type]
    source = getattr(module, "kv_source", None)
    if source is None:
        new = pages.take(layer)
    else:  # K and V of another layer, which this call writes again
        layer, new = int(source), (key, value)
    if not keeps_latents(module):
        return _attend_pages(pages, layer, packed, *new, scale, softcap, s_aux, 0)[None], None
    plain = softcap is None and s_aux is None
    if plain and pages.expands_latents(layer, packed, up_projection(module)):
        return pages.attend_expanded(layer, packed, *new, scale, up_projection(module))[None], None
    absorbed, up = absorb_latent(module, packed)
    out = _attend_pages(pages, layer, absorbed, *new, scale, softcap, s_aux, up.shape[-1])
    return torch.einsum("thr,hdr->thd", out, up)[None], None


def _attend_pages(pages: Pages, layer: int, *rest: Any) -> torch.Tensor:
    """Run `Pages.attend`. While a compiler traces, call the custom operation. Otherwise call the method directly,
    because torch's dispatcher takes longer than the call."""
    if torch.compiler.is_compiling():
        out: torch.Tensor = _operation(pages.handle, layer, *rest)
        return out
    return pages.attend(layer, *rest)


def install(model: Any, context: int | None = None) -> None:
    """Prepare a Hugging Face model. Its layers then call `attend`, and its mixers accept packed tokens. `context`
    is the length of the longest sequence, by default the model's limit. Raises ModelError for a layer that cannot
    run on pages.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if separation_reason(model) is not None:
        run_separately(model)
        prepare(model, context)
        return
    if model.config.is_encoder_decoder:
        run_packed(model)
        prepare(model, context)
        return
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    recurrent = [module for module in model.modules() if is_mixer(module)]
    for module in recurrent:
        wrap_mixer(module)
    for module in model.modules():
        wrap_cross_attention(module)
        if keeps_latents(module):
            keep_latents(module)
    prepare(model, context)
    config = model.config
    text = config.get_text_config()
    parts = [name for name in config.sub_configs if getattr(config, name, None) is text]
    # Vision and audio towers keep their own attention.
    config._attn_implementation = {"": ATTENTION, **dict.fromkeys(parts, ATTENTION)} if parts else ATTENTION

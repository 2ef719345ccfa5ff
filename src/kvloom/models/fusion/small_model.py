"""Finds out whether a model is a plain decoder of few weights, which native code can run as a whole (`cpu.SmallModel`).

In a small model on a CPU, calls between modules take much of the time of a decode step. Steps of a few tokens then run in
native code, for Llama's architecture, and only if all layers are fused.
"""

from __future__ import annotations

from typing import Any

import torch

from kvloom.kernels import cpu
from kvloom.models.paged import Pages

from .cpu_decoder_layer import CpuDecoderLayer
from .rotary_cache import LENGTH_DEPENDENT

__all__ = ["small_model"]

MAX_WEIGHTS = 1 << 24
"""A larger model spends its time in products, for which torch uses several threads."""
MAX_POSITIONS = 1 << 15
"""The largest number of positions for which a table of rotary angles is made."""


@torch.no_grad()
def small_model(model: Any, pages: Pages, limit: int) -> cpu.SmallModel | None:
    """Return the native form of a fused model whose K and V are in `pages`. All positions are below `limit`. Return None
    if native code does not support the model, its dtype or its pages.
    """
    if not cpu.IS_BUILT or type(model).__name__ != "LlamaForCausalLM" or limit > MAX_POSITIONS:
        return None
    if sum(weight.numel() for weight in model.parameters()) > MAX_WEIGHTS:
        return None
    decoder, rotary = model.model, model.model.rotary_emb
    rope = str(getattr(rotary, "rope_type", "default"))
    if any(kind in rope for kind in LENGTH_DEPENDENT):
        return None
    layers: list[cpu.SmallLayer] = []
    forms = set()
    for place, layer in enumerate(decoder.layers):
        forward = layer.forward
        stored = pages.cpu_pages(place)
        if not isinstance(forward, CpuDecoderLayer) or stored is None or layer._forward_hooks:
            return None
        layers.append(forward.small_layer(stored))
        forms.add(forward.form)
    eps = getattr(decoder.norm, "variance_epsilon", None)
    if len(forms) != 1 or model.lm_head.bias is not None:
        return None
    heads, scale, layer_eps, gemma, tanh = forms.pop()
    if eps != layer_eps or gemma:
        return None
    embeddings = decoder.embed_tokens.weight
    cos, sin = rotary(embeddings[:1], torch.arange(limit)[None])
    try:
        return cpu.SmallModel(
            layers, embeddings.data, decoder.norm.weight.data, model.lm_head.weight.data, cos[0].contiguous(),
            sin[0].contiguous(), heads=heads, scale=scale, eps=eps, gemma=gemma, tanh=tanh,
        )  # fmt: skip
    except ValueError:  # a dtype or layout of weights that native code does not support
        return None

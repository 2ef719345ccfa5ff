"""Finds the data that each layer of a Hugging Face model stores. To find them, the model runs once on a few tokens,
with transformers' own cache.

The shapes and dtypes of K, V and states come from this run, not from the config. Every model whose layers use
transformers' cache classes is therefore supported. All other models are refused.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvloom.core import DTYPE_BYTES, Field, LayerSpec, Visibility
from kvloom.kernels.dtypes import TORCH_DTYPES

__all__ = ["ModelLayers", "cache_argument", "forward_arguments", "read_layers"]

_PROBE_TOKENS = 8
_LAYER_CLASSES = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
)
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The layer specs of a model by name. "layers.N.attention" describes K and V of layer N, and "layers.N.state"
    describes its states.

    `continues_states` is True if a forward of several tokens starts from the stored states. Some modeling code uses the
    stored states only for single tokens.
    """

    specs: dict[str, LayerSpec]
    continues_states: bool

    @property
    def has_states(self) -> bool:
        return any(spec.unit == "state" for spec in self.specs.values())


def forward_arguments(
    model: Any, tokens: torch.Tensor, cache: Any, start: int, all_logits: bool = False
) -> dict[str, Any]:
    """Return the arguments of a forward that computes `tokens` from position `start` on. They include `position_ids`,
    because some modeling code would otherwise count positions from 0. Without `all_logits`, the model returns only the
    logits of the last token, if it supports this.
    """
    names = inspect.signature(model.forward).parameters
    arguments = {"input_ids": tokens, cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in names and not all_logits:
        arguments["logits_to_keep"] = 1
    if "position_ids" in names:
        arguments["position_ids"] = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
    return arguments


def cache_argument(model: Any) -> str:
    """Return the name of the cache in the arguments of a model's forward."""
    return (
        "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
    )


def read_layers(model: Any) -> ModelLayers:
    """Return the layer specs of a model. To find them, this function runs the model with a few tokens and inspects
    the cache that the model filled. Raises ValueError if `Cache` does not support the model.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model: kvloom.Cache supports decoder-only models")
    if not model._supports_default_dynamic_cache():
        raise ValueError(
            f"{name} has a cache class of its own: kvloom.Cache supports transformers' layer classes"
        )
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in _LAYER_CLASSES:
            known = ", ".join(one.__name__ for one in _LAYER_CLASSES)
            raise ValueError(
                f"layer {index} of {name} needs a {type(layer).__name__}; kvloom.Cache supports {known}"
            )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = (torch.arange(2 * _PROBE_TOKENS, device=model.device) * 7 + 1)[None] % vocabulary
    _run(model, tokens[:, :_PROBE_TOKENS], cache)
    specs = _specs(model, cache)
    continues = not any(spec.unit == "state" for spec in specs.values()) or _continues_states(
        model, tokens, cache
    )
    return ModelLayers(specs, continues)


@torch.no_grad()
def _run(model: Any, tokens: torch.Tensor, cache: Any, start: int = 0) -> torch.Tensor:
    """Run the model on `tokens` from position `start` on, with `cache`. Return the logits of all tokens."""
    logits: torch.Tensor = model(**forward_arguments(model, tokens, cache, start, all_logits=True)).logits
    return logits.float()


def _continues_states(model: Any, tokens: torch.Tensor, cache: Any) -> bool:
    """Return whether a forward of several tokens continues from the stored states. `cache` already contains the first
    half of `tokens`, and the model runs the second half. The logits are compared with those of one run over all tokens.
    Small differences by rounding are accepted.
    """
    whole = _run(model, tokens, DynamicCache(config=model.config))[:, _PROBE_TOKENS:]
    parts = _run(model, tokens[:, _PROBE_TOKENS:], cache, _PROBE_TOKENS)
    limit = torch.finfo(model.dtype).eps ** 0.5 * (whole.max() - whole.min())
    return bool((whole - parts).abs().max() < limit)


def _specs(model: Any, cache: Any) -> dict[str, LayerSpec]:
    specs: dict[str, LayerSpec] = {}
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, CacheLayerMixin) and layer.keys is not None and layer.keys.numel():
            visibility = Visibility("full")
            if isinstance(layer, DynamicSlidingWindowLayer):
                is_chunked = kinds[index] == "chunked_attention" if kinds else config.sliding_window is None
                visibility = Visibility("chunked" if is_chunked else "sliding", layer.sliding_window)
            fields = tuple(
                Field(name, (of.shape[1], of.shape[3]), _DTYPE_NAMES[of.dtype], shard_axis=0)
                for name, of in (("k", layer.keys), ("v", layer.values))
            )
            specs[f"layers.{index}.attention"] = LayerSpec("token", fields, visibility)
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            states = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
            found = [
                Field(f"{name}_{number}", tuple(of.shape[1:]), _DTYPE_NAMES[of.dtype])
                for name, tensors in states.items()
                for number, of in tensors.items()
                if of is not None
            ]
            if found:
                found.sort(key=lambda field: -DTYPE_BYTES[field.dtype])  # each field is aligned to its dtype
                specs[f"layers.{index}.state"] = LayerSpec("state", tuple(found))
    return specs

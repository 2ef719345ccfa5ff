"""Runs a model's code without its weights. Checks that its layers write and read the data that their specs
describe.

The model runs on a few tokens on the meta device, where tensors have shapes but no data. A `RecordingCache`
replaces the cache and the attention function and records the calls. This detects unsupported architectures before
any weight is read. Such a model never calls the attention registry, uses its own mask, or stores other data than
its config states. The probe checks calls and shapes, not values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvloom.core import LayerSpec
from kvloom.models.paged import IGNORED, EmptyCache, attend, calls_registry
from kvloom.models.specs import ModelError

__all__ = ["examine"]

TOKENS = 5
PROBE_ATTENTION = "kvloom_probe"
KNOWN_KEYWORDS = IGNORED | set(inspect.signature(attend).parameters)
"""Keywords of attention calls that `attend` handles or may ignore."""


class RecordingCache(EmptyCache):
    """The cache argument of a probed model. It behaves like an empty cache, and records calls by layer."""

    def __init__(self) -> None:
        self.written: dict[int, list[torch.Size]] = {}
        self.attended: dict[int, list[int | None]] = {}
        """The windows passed to attention, by layer. Each call has one window, or None."""
        self.states: dict[int, dict[str, torch.Size]] = {}
        self.faults: list[str] = []
        self.masked = False
        """Whether the model applies windows by masks. A probed model gets no masks, so its windows cannot be
        compared."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self.written:
            self.faults.append(f"layer {layer_idx} writes to its cache twice in one step")
        self.written[layer_idx] = [key.shape, value.shape]
        return key, value

    def update_conv_state(
        self,
        new: torch.Tensor,
        layer_idx: int,
        *_: Any,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **__: Any,
    ) -> torch.Tensor:
        if state_idx:
            self.faults.append(f"layer {layer_idx} keeps more than one convolution's state")
        columns = new.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._state(layer_idx)["conv"] = torch.Size((new.shape[1], columns))
        return new

    def update_recurrent_state(
        self, new: torch.Tensor, layer_idx: int, *_: Any, state_idx: int = 0, **__: Any
    ) -> torch.Tensor:
        if state_idx:
            self.faults.append(f"layer {layer_idx} keeps more than one recurrent state")
        self._state(layer_idx)["recurrent"] = new.shape[1:]
        return new

    def set_linear_cache(self, layer_idx: int, new: torch.Tensor) -> None:
        self._state(layer_idx)["lightning"] = new.mT.shape[1:]  # our states are transposed

    def _state(self, layer_idx: int) -> dict[str, torch.Size]:
        return self.states.setdefault(layer_idx, {})


def examine(model: Any, layers: Callable[[], Mapping[str, LayerSpec]]) -> None:
    """Run `model`, which must be on the meta device, and compare its calls with the specs of its layers. Raises
    ModelError with the reason if the model cannot run on pages. Modifies the model's config. Takes about 10 ms per
    layer.

    `layers` is a function that returns the specs. `examine` calls this function after the run.
    """
    cache = _record_run(model)
    if not cache.attended and not cache.states:
        raise ModelError(_no_registry_call(model))
    faults = cache.faults or _differences(cache, layers())
    if faults:
        raise ModelError(f"{type(model).__name__} cannot run on pages: {faults[0]}")


def _record_run(model: Any) -> RecordingCache:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = type(model).__name__
    cache = RecordingCache()
    cache.masked = getattr(model, "has_mask_names", False)
    ALL_ATTENTION_FUNCTIONS.register(PROBE_ATTENTION, _record_attention)
    model.config._attn_implementation = PROBE_ATTENTION
    # Experts run as one gather, because a loop over selected experts needs data, which a meta tensor does
    # not have.
    model.config._experts_implementation = "batched_mm"
    ids = torch.zeros((1, TOKENS), dtype=torch.int64, device="meta")
    extra: dict[str, Any] = {"cache_params": cache}
    if "cache_params" not in inspect.signature(model.forward).parameters:
        extra = {"past_key_values": cache, "pages": cache, "position_ids": ids}
    try:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=False, logits_to_keep=ids[0, :1], **extra)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    except Exception as error:
        calls = cache.states or calls_registry(model)
        raise ModelError(
            f"{name} cannot run on pages: {_explain(error)}" if calls else _no_registry_call(model)
        ) from error
    return cache


def _no_registry_call(model: Any) -> str:
    return f"{type(model).__name__} never calls the attention registry, so it cannot run on pages"


def _record_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a probed model. Input is [1, heads, tokens, dim], output [1, tokens, heads, dim]."""
    cache = keywords.pop("pages", None)
    if cache is None:
        raise ModelError(
            f"{type(module).__name__} does not receive the keywords that the model was called with"
        )
    unknown = {word for word, given in keywords.items() if given is not None} - KNOWN_KEYWORDS
    if unknown:
        raise ModelError(
            f"{type(module).__name__} calls attention with {', '.join(sorted(unknown))}, which is not supported"
        )
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} makes its own attention mask")
    if keywords.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{type(module).__name__} is not causal: it attends to later tokens")
    cache.attended.setdefault(int(module.layer_idx), []).append(keywords.get("sliding_window"))
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[-1])), None


def _explain(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    if isinstance(error, AttributeError) and isinstance(error.obj, RecordingCache):
        return f"it calls {error.name} of its cache, which is not supported"
    if "meta" in text:
        return f"its code depends on values, so it cannot be examined without weights ({text})"
    return f"{type(error).__name__}: {text}"


def _differences(cache: RecordingCache, layers: Mapping[str, LayerSpec]) -> list[str]:
    """Return the differences between the recorded calls and the specs."""
    specs: dict[str, dict[int, LayerSpec]] = {"token": {}, "state": {}}
    for name, spec in layers.items():
        if spec.axis == "media":
            continue  # text skips these layers
        specs[spec.unit][int(name.split(".")[1])] = spec
    tokens, states = specs["token"], specs["state"]
    faults = [
        *_layer_mismatches("keys and values", set(cache.written), set(tokens)),
        *_layer_mismatches("a state", set(cache.states), set(states)),
    ]
    for index, (key, value) in cache.written.items():
        if index in tokens:
            windows = cache.attended.get(index, [])
            if (
                cache.masked
            ):  # the layers of such a model pass no window, because their masks would contain it
                windows = [_window(tokens[index]) for _ in windows]
            faults += _token_faults(index, tokens[index], key, value, windows)
    for index, found in cache.states.items():
        if index in states:
            kept = {field.name: torch.Size(field.shape) for field in states[index].fields}
            if kept != found:
                faults.append(
                    f"layer {index} keeps a state of {_shapes(found)}, its config has {_shapes(kept)}"
                )
    return faults


def _layer_mismatches(what: str, found: set[int], wanted: set[int]) -> list[str]:
    return [
        f"layer {index} {'keeps' if index in found else 'keeps no'} {what}, unlike its config"
        for index in sorted(found ^ wanted)
    ]


def _token_faults(
    index: int, spec: LayerSpec, key: torch.Size, value: torch.Size, windows: list[int | None]
) -> list[str]:
    fields = {field.name: field.shape for field in spec.fields}
    if "latent" in fields:
        wanted, found = [1, *fields["latent"]], [key[1], key[3] + value[3]]
    else:
        wanted, found = [*fields["k"], *fields["v"]], [key[1], key[3], value[1], value[3]]
    if wanted != found:
        return [f"layer {index} writes heads and sizes {found} for each token, its config has {wanted}"]
    if len(windows) != 1:
        calls = f"{len(windows)} times" if windows else "never"
        return [f"layer {index} calls the attention registry {calls}"]
    if windows[0] != _window(spec):
        return [f"layer {index} attends with a window of {windows[0]}, its config has {_window(spec)}"]
    return []


def _window(spec: LayerSpec) -> int | None:
    return spec.visibility.size if spec.visibility.kind == "sliding" else None


def _shapes(state: Mapping[str, torch.Size]) -> str:
    return " and ".join(f"{name} {tuple(shape)}" for name, shape in state.items())

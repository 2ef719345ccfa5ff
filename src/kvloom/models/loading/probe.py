"""Runs a model's code without its weights. Checks that its layers write and read the data that their specs
describe.

The model runs on a few tokens on the meta device, where tensors have shapes but no data. A `RecordingCache`
replaces the cache and the attention function and records the calls. The probe finds unsupported models before any
weight is read. For example, a model may add its own mask, or store data that its config does not describe. The probe
checks calls and shapes, not values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from kvloom.core import LayerSpec
from kvloom.models.paged import (
    IGNORED,
    EmptyCache,
    SequenceCache,
    attend,
    cache_argument,
    forward_arguments,
    keeps_latents,
    new_cache,
    separation_reason,
)
from kvloom.models.specs import ModelError

__all__ = ["examine"]

TOKENS = 5
LARGE, LAYERS_WITH_VALUES = 10**9, 2
"""If a model's code depends on values and the model has more than `LARGE` weights, only its first
`LAYERS_WITH_VALUES` layers are examined."""
PROBE_ATTENTION = "kvloom_probe"
KNOWN_KEYWORDS = IGNORED | set(inspect.signature(attend).parameters)
"""Keywords of attention calls that `attend` handles or may ignore."""


OTHER_REMEDY = "A row of FAMILIES sets sizes and layer kinds of a family (docs/models.md)"
REMEDY = f"{OTHER_REMEDY}; a row of SEPARATE lets it run with its own cache"


class RecordingCache(EmptyCache):
    """The cache argument of a probed model. It behaves like an empty cache, and records calls by layer."""

    last_written: ClassVar[RecordingCache | None] = None
    """The cache of the last update. The attention function uses this cache if a module does not pass its keywords
    on."""

    def __init__(self) -> None:
        self.written: dict[int, list[torch.Size]] = {}
        self.attended: dict[int, list[int | None]] = {}
        """The windows passed to attention, by layer. Each call has one window, or None."""
        self.sources: dict[int, int] = {}
        """The layer whose keys and values a layer reads, for layers that write none."""
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
        RecordingCache.last_written = self
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
        self._state(layer_idx)["lightning"] = new.mT.shape[1:]  # pages store the transposed state

    def _state(self, layer_idx: int) -> dict[str, torch.Size]:
        return self.states.setdefault(layer_idx, {})


def examine(model: Any, layers: Callable[[], Mapping[str, LayerSpec]]) -> None:
    """Run `model`, which must be on the meta device, and compare its calls with the specs of its layers. Raises
    ModelError with the reason if the model cannot run on pages. Modifies the model's config. Takes about 10 ms per
    layer.

    `layers` is a function that returns the specs. `examine` calls this function after the run.
    """
    # The keys and values of an encoder-decoder model are those of its own cache, also if its decoder runs packed.
    separate = separation_reason(model) is not None or model.config.is_encoder_decoder
    try:
        if separate:
            found = _run_separately(model)
            faults = _separate_faults(found, _examined(model, layers()))
        else:
            cache = _record_run(model)
            faults = cache.faults or _differences(cache, _examined(model, layers()))
        if faults:
            raise ModelError(f"{type(model).__name__} cannot run on pages: {faults[0]}")
    except ModelError as error:
        raise ModelError(f"{error}. {OTHER_REMEDY if separate else REMEDY}") from error


def _examined(model: Any, layers: Mapping[str, LayerSpec]) -> Mapping[str, LayerSpec]:
    """Return the specs of the layers that have run. A run on a CPU may have skipped the last layers of the model."""
    last = getattr(model, "examined_layers", None)
    if last is None:
        return layers
    return {name: spec for name, spec in layers.items() if int(name.split(".")[1]) < last}


def _run_separately(model: Any) -> SequenceCache:
    """Run a model with transformers' own cache, and return the cache. Raises ModelError with the reason if the model
    cannot run."""
    model.config._attn_implementation = "eager"

    def run(ids: torch.Tensor) -> SequenceCache:
        cache = new_cache(model)
        given = forward_arguments(model, ids, 0)
        given.pop("attention_mask", None)  # modeling code would read the values of the mask
        cache.take_result(model(**given, **cache.arguments()))
        return cache

    cache: SequenceCache = _run(model, run)
    return cache


def _run(model: Any, run: Callable[[torch.Tensor], Any]) -> Any:
    """Return `run(tokens)` for a few tokens on the meta device. If the model's code needs the values of tensors, the
    model runs again on a CPU, with weights of zeros that need no memory. In a large model, this second run has
    only the first layers. Raises ModelError with the reason if the model cannot run."""
    # Let all experts run in one gather. A loop over the selected experts would need data, and meta tensors have none.
    model.config._experts_implementation = "batched_mm"
    ids = torch.zeros((1, TOKENS), dtype=torch.int64, device="meta")
    name = type(model).__name__
    try:
        with torch.inference_mode():
            try:
                return run(ids)
            except (RuntimeError, NotImplementedError) as error:
                if "meta" not in str(error):
                    raise
                _fill_with_zeros(model)
                return run(ids.new_zeros(ids.shape, device="cpu"))
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    except Exception as error:
        raise ModelError(f"{name} cannot run on pages: {_explain(error)}") from error


def _fill_with_zeros(model: Any) -> None:
    """Replace the weights of a model on the meta device by zeros on a CPU. All elements of a weight share one number
    in memory. Removes all but the first layers of a large model, to save time."""
    is_large = sum(weight.numel() for weight in model.parameters()) > LARGE
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if is_large and isinstance(module, nn.ModuleList) and len(module) == depth:
            del module[LAYERS_WITH_VALUES:]
            model.examined_layers = LAYERS_WITH_VALUES
        for name, weight in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            # Integers become ones: they are sizes and offsets, and code may divide by them.
            value = 0 if buffer.is_floating_point() else 1
            setattr(module, name, torch.full(buffer.shape, value, dtype=buffer.dtype))


def _separate_faults(cache: SequenceCache, layers: Mapping[str, LayerSpec]) -> list[str]:
    """Return the differences between a cache that a model has filled and the specs of its layers."""
    tokens, states = _by_unit(layers)
    found = {
        layer: {name: state.shape[1:] for name, state in kept.items()}
        for layer, kept in cache.states().items()
    }
    if not cache.written and not found:
        return ["it stores nothing in its cache, so there is nothing to keep in pages"]
    faults = [
        *_layer_mismatches("keys and values", set(cache.written), set(tokens)),
        *_layer_mismatches("a state", set(found), set(states)),
    ]
    for index, calls in cache.written.items():
        if len(calls) > 1:
            faults.append(f"layer {index} writes to its cache twice in one step")
        elif index in tokens:
            spec = tokens[index]
            faults += _size_faults(index, spec, *cache.token_shapes(index))
            kept_tokens = cache.window(index)
            if spec.visibility.windowed and spec.visibility.size != kept_tokens:
                faults.append(
                    f"layer {index} keeps {kept_tokens or 'all'} tokens, its config has {spec.visibility.size}"
                )
            index_dims = {field.name: field.shape for field in spec.fields}.get("index")
            written = [keys.shape[-1:] for keys in cache.index.get(index, [])]
            if written != ([] if index_dims is None else [torch.Size(index_dims)]):
                faults.append(
                    f"layer {index} writes indexer keys of sizes {written}, its config has {index_dims}"
                )
    return faults + _state_faults(found, states)


def _record_run(model: Any) -> RecordingCache:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PROBE_ATTENTION, _record_attention)
    model.config._attn_implementation = PROBE_ATTENTION
    name = cache_argument(model)

    def run(ids: torch.Tensor) -> RecordingCache:
        cache = RecordingCache()
        cache.masked = getattr(model, "has_mask_names", False)
        extra: dict[str, Any] = {name: cache}
        if name == "past_key_values":
            extra.update(pages=cache, position_ids=ids)
        model(input_ids=ids, use_cache=False, logits_to_keep=ids[0, :1], **extra)
        return cache

    cache: RecordingCache = _run(model, run)
    if not cache.attended and not cache.states:
        raise ModelError(
            f"{type(model).__name__} never calls the attention registry, so it cannot run on pages"
        )
    return cache


def _record_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a probed model. Input is [1, heads, tokens, dim], output [1, tokens, heads, dim]."""
    cache = keywords.pop("pages", None) or RecordingCache.last_written
    if cache is None:
        raise ModelError(f"{type(module).__name__} calls attention before it writes to its cache")
    unknown = {word for word, given in keywords.items() if given is not None} - KNOWN_KEYWORDS
    if unknown:
        raise ModelError(
            f"{type(module).__name__} calls attention with {', '.join(sorted(unknown))}, which is not supported"
        )
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} makes its own attention mask")
    if keywords.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{type(module).__name__} is not causal: it attends to later tokens")
    layer = int(module.layer_idx)
    source = getattr(module, "kv_source", layer)
    if not keeps_latents(module) and cache.written.get(source) != [key.shape, value.shape]:
        raise ModelError(
            f"layer {layer} passes other keys and values to attention than layer {source} writes"
        )
    if source != layer:
        cache.sources[layer] = source
    # Some modules state their window only in the mask that they get.
    window = keywords.get("sliding_window", getattr(module, "sliding_window", None))
    cache.attended.setdefault(layer, []).append(window)
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
    tokens, states = _by_unit(layers)
    faults = [
        *_layer_mismatches("keys and values", set(cache.written), set(tokens)),
        *_layer_mismatches("a state", set(cache.states), set(states)),
    ]
    for index, (key, value) in cache.written.items():
        if index in tokens:
            windows = cache.attended.get(index, [])
            if cache.masked:  # the mask contains the window, so layers pass none
                windows = [_window(tokens[index]) for _ in windows]
            faults += _token_faults(index, tokens[index], key, value, windows)
    for index, windows in cache.attended.items():
        source = cache.sources.get(index, index)
        if source not in tokens:
            faults.append(f"layer {index} attends, but keeps no keys and values")
        elif source != index and windows != [_window(tokens[source])] and not cache.masked:
            faults.append(
                f"layer {index} attends with windows {windows}, layer {source} keeps {_window(tokens[source])}"
            )
    return faults + _state_faults(cache.states, states)


def _by_unit(layers: Mapping[str, LayerSpec]) -> tuple[dict[int, LayerSpec], dict[int, LayerSpec]]:
    """Return two mappings from layer number to spec: of layers that store tokens, and of layers that store a state.
    Cross-attention layers are left out, because text tokens skip them."""
    specs: dict[str, dict[int, LayerSpec]] = {"token": {}, "state": {}}
    for name, spec in layers.items():
        if spec.axis != "media":
            specs[spec.unit][int(name.split(".")[1])] = spec
    return specs["token"], specs["state"]


def _state_faults(
    states: Mapping[int, Mapping[str, torch.Size]], specs: Mapping[int, LayerSpec]
) -> list[str]:
    faults = []
    for index, found in states.items():
        if index in specs:
            kept = {field.name: torch.Size(field.shape) for field in specs[index].fields}
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
    faults = _size_faults(index, spec, key, value)
    if faults:
        return faults
    if len(windows) != 1:
        calls = f"{len(windows)} times" if windows else "never"
        return [f"layer {index} calls the attention registry {calls}"]
    if windows[0] != _window(spec):
        return [f"layer {index} attends with a window of {windows[0]}, its config has {_window(spec)}"]
    return []


def _size_faults(index: int, spec: LayerSpec, key: torch.Size, value: torch.Size) -> list[str]:
    fields = {field.name: field.shape for field in spec.fields}
    if "latent" in fields:
        wanted, found = [1, *fields["latent"]], [key[1], key[3] + value[3]]
    else:
        wanted, found = [*fields["k"], *fields["v"]], [key[1], key[3], value[1], value[3]]
    if key[2] != TOKENS:
        return [
            f"layer {index} writes {key[2]} tokens for {TOKENS} tokens of a text, so its pages would not fit"
        ]
    if wanted != found:
        return [f"layer {index} writes heads and sizes {found} for each token, its config has {wanted}"]
    return []


def _window(spec: LayerSpec) -> int | None:
    return spec.visibility.size if spec.visibility.kind == "sliding" else None


def _shapes(state: Mapping[str, torch.Size]) -> str:
    return " and ".join(f"{name} {tuple(shape)}" for name, shape in state.items())

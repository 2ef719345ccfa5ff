"""Reads a Hugging Face config and returns layer specs: the data that each layer stores.

Needs no weights, torch or network. `families_table` defines how the config of each family is read.

| a layer of kind     | stores                                                           |
|---------------------|------------------------------------------------------------------|
| full_attention      | K and V (or one latent) of every text token                      |
| sliding_attention   | the same, of the last `sliding_window` tokens                    |
| chunked_attention   | the same, of the current chunk of `attention_chunk_size`         |
| cross_attention     | K and V of the image tokens only                                 |
| layers of a decoder   | also K and V of the encoder's tokens (encoder-decoder models)    |
| linear_attention    | one state: the convolution's last inputs and the recurrent state |
| conv                | one state: the convolution's last inputs                         |
| hybrid              | the same as full_attention and linear_attention together         |
| hybrid_sliding      | the same as sliding_attention and linear_attention together      |
| indexed_attention   | the same as full_attention, and the key of an indexer            |
| …compressed…        | K and V, compressed entries; one state: an unfinished window     |
| shared              | nothing: the layer reads the K and V of an earlier layer         |
| mlp, moe            | nothing                                                          |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from kvloom.core import Field, LayerSpec, Visibility

from .config_reading import Config, Family, ModelError, dtype_name
from .families_table import ENCODER_DECODERS, FAMILIES, TEXT_TYPES, plain_attention_family

__all__ = [
    "DRAFT_PREFIX",
    "KV_DTYPES",
    "KV_KINDS",
    "KVDtype",
    "Media",
    "ModelSpec",
    "kv_dtypes",
    "model_spec",
    "text_config",
    "with_draft",
]

KV_DTYPES = ("bf16", "fp16", "fp32", "int8", "fp8")
KV_KINDS = ("full", "sliding", "chunked", "cross")
"""Layer kinds that store K and V; each may use its own dtype."""
DRAFT_PREFIX = "draft."
"""Prefix of the names of a draft model's layers, in a pool that the draft model shares with its target."""
KVDtype = str | Mapping[str, str]
"""One dtype for all layers ("fp8"), with exceptions ("fp8,sliding=bf16"), or by kind ({"sliding": "int8"})."""


@dataclass(frozen=True, slots=True)
class Media:
    """How a model processes the tokens of an image. With `place` "stream", image tokens have positions in the text,
    and every layer processes them. With "cross", only cross-attention layers read them. `token_id` is the
    placeholder in the prompt. In an encoder-decoder model, the encoder's input takes the place of an image."""

    place: Literal["stream", "cross"]
    token_id: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The layer specs of one model, by name ("layers.3.attention", "layers.3.mamba"). `max_context` is the largest
    number of tokens of a sequence. It is None for models with only recurrent layers, which have no limit.
    `media` is None for text models."""

    name: str
    layers: Mapping[str, LayerSpec]
    max_context: int | None
    media: Media | None = None

    def canonical(self) -> str:
        """Return a text that is the same for equal specs in every process. The text contains the model's name and the
        layer specs, and does not depend on weights."""
        layers = {name: asdict(spec) for name, spec in self.layers.items()}
        for fields in layers.values():
            fields["span"] = fields.pop("visibility")  # fingerprints of existing pages use this key
        return json.dumps({"name": self.name, "layers": layers}, sort_keys=True, separators=(",", ":"))


def model_spec(
    config: Mapping[str, Any],
    name: str | None = None,
    kv_dtype: KVDtype | None = None,
    static_scales: bool = False,
) -> ModelSpec:
    """Return the layer specs of a Hugging Face config. Raises ModelError for a config that cannot be read.

    `kv_dtype` is the dtype of stored K and V. None means the model's dtype. `kv_dtype` does not apply to recurrent
    states. With `static_scales`, quantised pages contain no scales.
    """
    every, by_kind = kv_dtypes(kv_dtype)
    config = config.get("thinker_config") or config  # Qwen Omni: only the part that generates text runs
    text = text_config(config)
    family = FAMILIES.get(text["model_type"]) or plain_attention_family(text)
    fields = Config(text, family.defaults, family.names)
    set_dtypes = [source.get(key) for source in (text, config) for key in ("dtype", "torch_dtype")]
    dtype = dtype_name(next(filter(None, set_dtypes), "bfloat16"))
    layers = _layers(fields, family, {kind: by_kind.get(kind, every or dtype) for kind in KV_KINDS}, dtype)
    if not layers:
        raise ModelError(
            f"{fields.model_type}: no layer keeps anything; give layers with attention or states"
        )
    _check_kinds(fields, by_kind, layers)
    if static_scales:
        layers = {layer: _without_scales(spec) for layer, spec in layers.items()}
    return ModelSpec(
        name=name or str(config.get("_name_or_path") or config.get("model_type")),
        layers=layers,
        max_context=fields.optional("max_position_embeddings"),
        media=_media(config, layers),
    )


def kv_dtypes(given: KVDtype | None) -> tuple[str | None, dict[str, str]]:
    """Return the dtype of K and V for all layers, and the exceptions by kind. A dtype of None means the model's
    dtype. Raises ModelError for unknown kinds and dtypes.
    """
    if given is None:
        return None, {}
    parts = given.split(",") if isinstance(given, str) else [f"{kind}={to}" for kind, to in given.items()]
    every: str | None = None
    by_kind: dict[str, str] = {}
    for part in parts:
        kind, equals, dtype = (word.strip() for word in part.rpartition("="))
        if dtype not in KV_DTYPES:
            raise ModelError(f"KV dtype {dtype!r} is not known; known: {', '.join(KV_DTYPES)}")
        if equals and kind not in KV_KINDS:
            raise ModelError(f"{kind!r} layers keep no K and V; kinds that do: {', '.join(KV_KINDS)}")
        if kind in by_kind or (not equals and every):
            raise ModelError(f"KV dtype {given!r} sets {kind or 'all'} layers twice")
        if equals:
            by_kind[kind] = dtype
        else:
            every = dtype
    return every, by_kind


def with_draft(target: ModelSpec, draft: ModelSpec, *fields: Field) -> ModelSpec:
    """Return one spec with the layers of a target model and of its draft model. The names of the draft's layers get the
    prefix `DRAFT_PREFIX`, and these layers get the additional `fields`. Their `LayerSpec.lifetime` is the label
    "draft". Layers with different labels never share a page, so the pages of both models are separate."""
    beside = {
        f"{DRAFT_PREFIX}{name}": replace(spec, lifetime="draft", fields=spec.fields + fields)
        for name, spec in draft.layers.items()
    }
    limits = [spec.max_context for spec in (target, draft) if spec.max_context is not None]
    return ModelSpec(
        name=f"{target.name} + {draft.name}",
        layers={**target.layers, **beside},
        max_context=min(limits, default=None),
        media=target.media,
    )


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model, with its model_type set."""
    outer = config.get("model_type")
    inner = config.get("text_config")
    text = dict(inner if isinstance(inner, Mapping) else config)
    text["model_type"] = TEXT_TYPES.get(str(text.get("model_type") or outer), text.get("model_type") or outer)
    if not isinstance(text["model_type"], str):
        raise ModelError("the config has no model_type; is it the config.json of a Hugging Face model?")
    return text


def _kinds(config: Config, family: Family) -> list[str]:
    """Return the kind of every layer. The kinds come from the list in the config or, without a list, from the family's
    pattern. Layers that read the K and V of an earlier layer get the kind "shared"."""
    older = {
        "attention": "full_attention",
        "mamba": "linear_attention",
        "deepseek_sparse_attention": "indexed_attention",
        "minimax_m3_sparse": "indexed_attention",
    }
    listed = config.get("layer_types") or config.get("layers_block_type")
    if listed is not None and not isinstance(listed, list):
        raise ModelError(f"{config.model_type}: layer_types is {listed!r}; give a list of layer kinds")
    kinds = family.pattern(config) if listed is None else [older.get(str(kind), str(kind)) for kind in listed]
    declared = config.optional("num_hidden_layers")
    if declared is not None and declared != len(kinds):
        raise ModelError(
            f"{config.model_type}: {len(kinds)} kinds of layers for {declared} num_hidden_layers"
        )
    own = len(kinds) - config.count("num_kv_shared_layers")
    return [kind if index < own else "shared" for index, kind in enumerate(kinds)]


def _check_kinds(config: Config, asked: Iterable[str], layers: Mapping[str, LayerSpec]) -> None:
    """Raise ModelError if a dtype is given for a layer kind that the model does not have."""
    there = {spec.kind for spec in layers.values() if spec.unit == "token"}
    missing = [kind for kind in asked if kind not in there]
    if missing:
        raise ModelError(
            f"{config.model_type} has no {' or '.join(missing)} layers to which a KV dtype could apply; "
            f"it has {', '.join(sorted(there)) or 'states alone'}"
        )


def _without_scales(spec: LayerSpec) -> LayerSpec:
    if spec.unit == "state":
        return spec
    return replace(spec, fields=tuple(field for field in spec.fields if not field.name.endswith("_scale")))


def _layers(config: Config, family: Family, kv_dtypes: Mapping[str, str], dtype: str) -> dict[str, LayerSpec]:
    layers: dict[str, LayerSpec] = {}
    for index, kind in enumerate(_kinds(config, family)):
        own = config.layer(index, kind)
        parts = _parts(own, family, kind, kv_dtypes, dtype)
        if config.get("is_encoder_decoder") and config.model_type in ENCODER_DECODERS:
            parts |= _parts(own, family, "cross_attention", kv_dtypes, dtype)
        layers.update({f"layers.{index}.{part}": spec for part, spec in parts.items()})
    return layers


def _parts(
    config: Config, family: Family, kind: str, kv_dtypes: Mapping[str, str], dtype: str
) -> dict[str, LayerSpec]:
    """Return the specs of one layer of `kind`, by part name ("attention", "cross" or the name of the mixer)."""

    def attention(span: Visibility) -> dict[str, LayerSpec]:
        return {"attention": LayerSpec("token", family.token(config, kv_dtypes[span.kind]), span)}

    def window() -> Visibility:
        return Visibility("sliding", config.size("sliding_window", "sliding_window_size"))

    def state() -> dict[str, LayerSpec]:
        if family.state is None:
            raise ModelError(f"{config.model_type}: a {kind} layer, but the shape of its state is not known")
        return {family.mixer: LayerSpec("state", family.state(config, dtype))}

    parts: dict[str, Callable[[], dict[str, LayerSpec]]] = {
        "full_attention": lambda: attention(Visibility("full")),
        "sliding_attention": lambda: attention(window()),
        "chunked_attention": lambda: attention(Visibility("chunked", config.size("attention_chunk_size"))),
        "cross_attention": lambda: {
            "cross": LayerSpec("token", family.token(config, kv_dtypes["cross"]), axis="media")
        },
        "linear_attention": state,
        "conv": state,
        "hybrid": lambda: attention(Visibility("full")) | state(),
        "hybrid_sliding": lambda: attention(window()) | state(),
        "indexed_attention": lambda: attention(Visibility("full")),
        "heavily_compressed_attention": lambda: attention(Visibility("full")) | state(),
        "compressed_sparse_attention": lambda: attention(Visibility("full")) | state(),
        "shared": dict,
        "mlp": dict,
        "moe": dict,
    }
    if kind not in parts:
        raise ModelError(f"{config.model_type}: layer kind {kind!r} is not known; known: {', '.join(parts)}")
    return parts[kind]()


def _media(config: Mapping[str, Any], layers: Mapping[str, LayerSpec]) -> Media | None:
    token = config.get("image_token_id", config.get("image_token_index"))
    if any(spec.axis == "media" for spec in layers.values()):
        return Media("cross", token)
    sees = config.get("model_type") in TEXT_TYPES or "vision_config" in config
    return Media("stream", token) if sees else None

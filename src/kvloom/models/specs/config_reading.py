"""Functions that read a config: the kind of every layer, the fields of a token, and the fields of a recurrent state.

`families_table` selects the functions for each family. `layer_specs` turns their results into layer specs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvloom.core import DTYPE_BYTES, QUANTISED, Field, attention_fields

__all__ = [
    "MAMBA2",
    "Config",
    "Family",
    "ModelError",
    "bamba",
    "dbrx",
    "deepseek_v4",
    "deepseek_v4_layers",
    "deepseek_v4_windows",
    "delta",
    "dtype_name",
    "every_layer",
    "falcon",
    "full_within",
    "gated_recurrence",
    "indexed_latent",
    "inkling",
    "inkling_states",
    "interleaved",
    "jamba",
    "kimi",
    "kimi_delta",
    "latent",
    "lfm2",
    "lightning",
    "llama4",
    "mamba1",
    "mamba2",
    "mimo",
    "mimo_layers",
    "mllama",
    "multi_query",
    "nemotron",
    "olmo_delta",
    "qwen4",
    "recurrent_gemma",
    "rwkv",
    "short_conv",
    "sparse_blocks",
    "twice_as_many_layers",
    "uniform_window",
    "windows_from_layer",
    "xlstm",
    "zamba",
    "zamba2_layers",
    "zamba_layers",
    "zaya",
]

_MAX_LAYERS = 10_000
_MAX_SIZE = 2**40
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


class ModelError(ValueError):
    """Raised if a model cannot be read or run. The message states the value and the remedy."""


def dtype_name(name: object) -> str:
    text = str(name).removeprefix("torch.")
    text = _DTYPES.get(text, text)
    if text not in DTYPE_BYTES:
        raise ModelError(f"dtype {name!r} is not known; known: {', '.join([*_DTYPES, *DTYPE_BYTES])}")
    return text


class Config:
    """The fields of a config, with the defaults of its family. Reading a missing or invalid field raises ModelError
    with the name of the field.
    """

    def __init__(
        self, raw: Mapping[str, Any], defaults: Mapping[str, Any], names: Mapping[str, str] | None = None
    ) -> None:
        self._values = {**defaults, **raw}
        self._values.update({ours: raw[own] for own, ours in (names or {}).items() if own in raw})
        self.model_type = str(raw.get("model_type"))

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def size(self, *keys: str) -> int:
        """Return the value of the first field among `keys` that is set, as a positive integer. Raises ModelError if
        none is set."""
        for key in keys:
            if self.get(key) is not None:
                return self._integer(key, self.get(key), least=1)
        raise ModelError(f"{self.model_type}: the config has no {' or '.join(keys)}")

    def optional(self, key: str) -> int | None:
        return None if self.get(key) is None else self.size(key)

    def count(self, key: str) -> int:
        """Return the field as a non-negative integer, or 0 if it is unset."""
        return self._integer(key, self.get(key, 0), least=0)

    def numbers(self, key: str) -> list[int]:
        values = self.get(key, [])
        if not isinstance(values, list):
            raise ModelError(f"{self.model_type}: {key} is {values!r}; give a list of integers")
        return [self._integer(key, value, least=0) for value in values]

    def nested(self, key: str) -> Config:
        """Return the config inside a field, or an empty config if the field is unset."""
        inner = self.get(key, {})
        if not isinstance(inner, Mapping):
            raise ModelError(f"{self.model_type}: {key} is {inner!r}; give a JSON object")
        return Config({"model_type": self.model_type, **inner}, {})

    def layer(self, index: int, kind: str) -> Config:
        """Return the config of layer number `index`, with the additional fields `layer_index` and `layer_kind`. The
        field `per_layer_config` may override values for single layers."""
        own = self.nested("per_layer_config")._values
        values: Mapping[str, Any] = next(
            (given for name, given in own.items() if name.isdigit() and int(name) == index), {}
        )
        return Config(
            {"model_type": self.model_type, **values, "layer_index": index, "layer_kind": kind}, self._values
        )

    def _integer(self, key: str, value: object, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_SIZE:
            raise ModelError(f"{self.model_type}: {key} is {value!r}; give an integer from {least} to 2**40")
        return value

    def quotient(self, over: str, under: str) -> int:
        a, b = self.size(over), self.size(under)
        if a % b:
            raise ModelError(f"{self.model_type}: {over} {a} is not a multiple of {under} {b}")
        return a // b

    @property
    def depth(self) -> int:
        layers = self.size("num_hidden_layers")
        if layers > _MAX_LAYERS:
            raise ModelError(f"{self.model_type}: num_hidden_layers {layers} is over {_MAX_LAYERS}")
        return layers


Pattern = Callable[[Config], list[str]]
Fields = Callable[[Config, str], tuple[Field, ...]]


# Patterns: the kind of every layer, for configs that do not list the kinds.


def every_layer(kind: str) -> Pattern:
    return lambda config: [kind] * config.depth


def interleaved(period: int | str, rare: str, common: str) -> Pattern:
    """Return a pattern in which every `period`-th layer is `rare` and all others are `common`. `period` is a number
    or the name of a config field.
    """

    def pattern(config: Config) -> list[str]:
        n = config.size(period) if isinstance(period, str) else period
        return [common if (i + 1) % n else rare for i in range(config.depth)]

    return pattern


def uniform_window(config: Config) -> list[str]:
    """Return sliding for every layer if a window is set and enabled, else full."""
    slides = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    return ["sliding_attention" if slides else "full_attention"] * config.depth


def windows_from_layer(config: Config) -> list[str]:
    """Return the layer kinds of Qwen. If windows are enabled, layers from `max_window_layers` on are sliding."""
    on = config.get("use_sliding_window") and config.get("sliding_window")
    first = config.count("max_window_layers") if on else config.depth
    return ["sliding_attention" if i >= first else "full_attention" for i in range(config.depth)]


def full_within(field: str) -> Pattern:
    """Return a pattern (a function that returns the kind of each layer) with full attention in all layers. The config
    field `field` is a number of tokens. In prompts with more tokens, results depend on how the prompt is split into
    chunks. The pattern therefore raises ModelError if the model's context has more tokens."""

    def pattern(config: Config) -> list[str]:
        limit, context = config.optional(field), config.size("max_position_embeddings")
        if limit is not None and limit < context:
            raise ModelError(
                f"{config.model_type}: {field} is {limit}, and max_position_embeddings {context}. Beyond {limit} tokens "
                f"the modeling code computes a prompt differently when it is split: set max_position_embeddings to {limit}"
            )
        return ["full_attention"] * config.depth

    return pattern


def mimo_layers(config: Config) -> list[str]:
    """Return the layer kinds of MiMo V2: the first layer and every sixth layer are full."""
    kinds = interleaved(6, rare="full_attention", common="sliding_attention")(config)
    return ["full_attention", *kinds[1:]]


def zamba_layers(config: Config) -> list[str]:
    """Return the layer kinds of Zamba. The first three layers are two recurrent layers and one hybrid layer. After
    these three, every period of `attn_layer_period` layers has one hybrid layer."""
    period, offset = config.size("attn_layer_period"), config.count("attn_layer_offset")
    rest = ["hybrid" if i % period == offset else "linear_attention" for i in range(config.depth - 3)]
    return ["linear_attention", "linear_attention", "hybrid", *rest]


def zamba2_layers(config: Config) -> list[str]:
    """Return the layer kinds of Zamba 2, for configs that do not list them."""
    hybrid = {*range(6, 43, 6), 47, 51}
    return ["hybrid" if i in hybrid else "linear_attention" for i in range(config.depth)]


def llama4(config: Config) -> list[str]:
    """Return the layer kinds of Llama 4. Layers with rotary positions have chunked attention, if the config sets
    `attention_chunk_size`. All other layers have full attention."""
    rotary = config.numbers("no_rope_layers") or [
        (i + 1) % config.size("no_rope_layer_interval") for i in range(config.depth)
    ]
    chunked = config.get("attention_chunk_size") is not None
    return ["chunked_attention" if chunked and flag else "full_attention" for flag in rotary]


def mllama(config: Config) -> list[str]:
    cross = set(config.numbers("cross_attention_layers"))
    return ["cross_attention" if i in cross else "full_attention" for i in range(config.depth)]


def jamba(config: Config) -> list[str]:
    period, offset = config.size("attn_layer_period"), config.count("attn_layer_offset")
    return ["full_attention" if i % period == offset else "linear_attention" for i in range(config.depth)]


def bamba(config: Config) -> list[str]:
    attention = set(config.numbers("attn_layer_indices"))
    return ["full_attention" if i in attention else "linear_attention" for i in range(config.depth)]


def lfm2(config: Config) -> list[str]:
    attention = config.numbers("full_attn_idxs") or list(range(config.depth))
    return ["full_attention" if i in attention else "conv" for i in range(config.depth)]


def kimi(config: Config) -> list[str]:
    """Return the layer kinds of Kimi. Its config lists the numbers of the attention layers, counted from one."""
    listed = config.nested("linear_attn_config").numbers("full_attn_layers")
    attention = [i - 1 for i in listed] or range(4, config.depth, 4)
    return ["full_attention" if i in attention else "linear_attention" for i in range(config.depth)]


def nemotron(config: Config) -> list[str]:
    letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not set(pattern) <= set(letters):
        raise ModelError(
            f"{config.model_type}: hybrid_override_pattern is {pattern!r}; give a text of M, *, - and E, "
            "or a list layers_block_type"
        )
    return [letters[letter] for letter in pattern]


# Fields: the data of an attention layer per token, and of a recurrent layer per sequence.


def _key_value(config: Config, dtype: str) -> tuple[Field, ...]:
    heads = config.optional("num_key_value_heads") or config.size("num_attention_heads")
    head_dim = config.optional("attention_head_dim") or config.optional("head_dim")
    return attention_fields(heads, head_dim or config.quotient("hidden_size", "num_attention_heads"), dtype)


def latent(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the field of MLA: the compressed latent followed by the shared rotary key. This field is not sharded, so
    every rank has a copy."""
    fields: tuple[Field, ...] = (
        Field("latent", (config.size("kv_lora_rank") + config.size("qk_rope_head_dim"),), dtype),
    )
    return fields if dtype not in QUANTISED else (*fields, Field("latent_scale", (1,), "fp32"))


def _state(
    config: Config, dtype: str, channels: tuple[int, ...], kernel: int, shape: tuple[int, ...]
) -> tuple[Field, ...]:
    """Return two fields: the last `kernel` inputs of the convolution, and the recurrent state.

    Both fields are sharded along axis 0. The channels of the convolution may consist of several parts, such as queries,
    keys and values. Sharding splits each part separately. The recurrent state has the dtype in the config, by default
    float32.
    """
    recurrent = config.get("mamba_ssm_cache_dtype", config.get("mamba_ssm_dtype", "float32"))
    return (
        Field("conv", (sum(channels), kernel), dtype, 0, channels if len(channels) > 1 else ()),
        Field("recurrent", shape, dtype_name(recurrent), shard_axis=0),
    )


def mamba1(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of Mamba-1. In a pure Mamba config, `intermediate_size` is the inner width of the mixer. In a
    hybrid config, it is the width of an MLP, so the inner width follows from `mamba_expand`."""
    own = None if config.get("mamba_expand") else config.optional("intermediate_size")
    inner = own or config.size("mamba_expand", "expand") * config.size("hidden_size")
    state, kernel = config.size("mamba_d_state", "state_size"), config.size("mamba_d_conv", "conv_kernel")
    return _state(config, dtype, (inner,), kernel, (inner, state))


def mamba2(heads: str, head_dim: str, groups: str, state: str, kernel: str) -> Fields:
    """Return a function that reads the fields of Mamba-2. The arguments are the names of the config fields in one
    family."""

    def fields(config: Config, dtype: str) -> tuple[Field, ...]:
        n = config.size(heads)
        inner = config.optional("mamba_d_ssm") or 0
        if config.get(head_dim) in (None, "auto"):
            width = (inner or config.size("mamba_expand") * config.size("hidden_size")) // n
        else:
            width = config.size(head_dim)
        groups_ = config.size(f"mamba_{groups}", groups)
        both = groups_ * config.size(state)
        channels = (inner or n * width, both, both)
        return _state(config, dtype, channels, config.size(kernel), (n, width, config.size(state)))

    return fields


MAMBA2 = mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def delta(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of the gated delta rule. Its state is a key-by-value matrix per value head."""
    keys, values = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    key_heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    channels = (key_heads * keys, key_heads * keys, value_heads * values)
    kernel = config.size("linear_conv_kernel_dim")
    return _state(config, dtype, channels, kernel, (value_heads, keys, values))


def kimi_delta(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of Kimi's delta rule, which has one decay per channel. Queries, keys and values have the same
    number of heads.
    """
    own = config.nested("linear_attn_config")
    heads = own.optional("num_heads") or config.size("linear_num_heads")
    width = own.optional("head_dim") or config.size("linear_head_dim")
    kernel = own.optional("short_conv_kernel_size") or config.size("linear_conv_kernel_dim")
    return _state(config, dtype, (heads * width,) * 3, kernel, (heads, width, width))


def olmo_delta(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of OLMo's gated delta rule. Sizes that are not set are derived from the attention sizes."""
    heads = config.size("num_attention_heads")
    key_heads = config.optional("linear_num_key_heads") or heads
    keys = config.optional("linear_key_head_dim") or 3 * config.size("hidden_size") // (4 * key_heads)
    sizes = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": config.optional("linear_num_value_heads") or heads,
        "linear_key_head_dim": keys,
        "linear_value_head_dim": config.optional("linear_value_head_dim") or 2 * keys,
        "linear_conv_kernel_dim": config.size("linear_conv_kernel_dim"),
    }
    return delta(Config({"model_type": config.model_type, **sizes}, {}), dtype)


def lightning(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of lightning attention. Its state is a value-by-key matrix per head, in the model's dtype.
    There is no convolution."""
    heads = config.size("num_attention_heads")
    width = config.optional("head_dim") or config.quotient("hidden_size", "num_attention_heads")
    return (Field("lightning", (heads, width, width), dtype, shard_axis=0),)


def short_conv(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the only field of a gated convolution: its last inputs."""
    return (Field("conv", (config.size("hidden_size"), config.size("conv_L_cache")), dtype, shard_axis=0),)


def indexed_latent(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of MLA with an indexer: the latent, and the indexer's key, which is never quantised. Some
    layers have no indexer, and so no key. They use the tokens that the indexer of an earlier layer has selected."""
    index, kinds, period = (
        config.count("layer_index"),
        config.get("indexer_types"),
        config.get("indexer_period"),
    )
    if kinds is None and period is not None:  # layer 0 has an indexer, and then one layer per period
        kinds = ["shared" if i and (i - 1) % period else "full" for i in range(index + 1)]
    if kinds is not None and kinds[index] == "shared":
        return latent(config, dtype)
    own = dtype if dtype not in QUANTISED else dtype_name(config.get("dtype", "bfloat16"))
    return (*latent(config, dtype), Field("index", (config.size("index_head_dim"),), own))


def deepseek_v4(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of DeepSeek V4. A token has one vector that is both key and value. In compressed layers, a
    compressed entry follows the vector. In sparse layers, the indexer's entry also follows. Only the last token of a
    window uses the space of these entries.
    """
    more = {
        "heavily_compressed_attention": config.size("head_dim"),
        "compressed_sparse_attention": config.size("head_dim") + config.size("index_head_dim"),
    }
    width = config.size("head_dim") + more.get(config.get("layer_kind"), 0)
    fields: tuple[Field, ...] = (Field("latent", (width,), dtype),)
    return fields if dtype not in QUANTISED else (*fields, Field("latent_scale", (1,), "fp32"))


def deepseek_v4_windows(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of DeepSeek V4's state: the compressors' inputs from a window that is not complete yet. In
    sparse layers, the state also has the inputs of the window before."""
    kind, dim = config.get("layer_kind"), config.size("head_dim")
    rate = config.nested("compress_rates").size(kind)
    if kind == "heavily_compressed_attention":
        return tuple(Field(f"compressor_{name}", (rate, dim), dtype) for name in ("kv", "gate"))
    return tuple(
        field
        for part, width in (("compressor", dim), ("indexer", config.size("index_head_dim")))
        for name in ("kv", "gate")
        for field in (
            Field(f"{part}_{name}", (rate, 2 * width), dtype),
            Field(f"{part}_overlap_{name}", (rate, width), dtype),
        )
    )


def deepseek_v4_layers(config: Config) -> list[str]:
    """Return the layer kinds of DeepSeek V4, for configs that do not list them. The first two layers are heavily
    compressed. Then heavily compressed layers and compressed sparse layers alternate."""
    kinds = ("compressed_sparse_attention", "heavily_compressed_attention")
    return [kinds[1] if i < 2 else kinds[(i + 1) % 2] for i in range(config.depth)]


def sparse_blocks(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of MiniMax M3 and Qwen4: K and V, and in sparse layers the key of an indexer."""
    if config.get("layer_kind") != "indexed_attention":
        return _key_value(config, dtype)
    own = dtype if dtype not in QUANTISED else dtype_name(config.get("dtype", "bfloat16"))
    return (
        *_key_value(config, dtype),
        Field("index", (config.size("index_head_dim", "indexer_head_dim"),), own),
    )


def qwen4(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of Qwen4's recurrent layers. Every layer has the fields of a delta rule. Layers with n-gram
    embeddings also have the last inputs of a dilated convolution, and the last token ids, stored as float32."""
    fields = delta(config, dtype)
    if config.count("layer_index") + 1 not in config.numbers("ple_layer_ids"):
        return fields
    size = config.size("ngram_size")
    channels = config.size("hidden_size") * config.size("hc_count")
    width = (config.size("ple_conv_kernel_size") - 1) * size
    return (*fields, Field("conv_2", (size - 1,), "fp32"), Field("conv_1", (channels, width), dtype))


def rwkv(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of RWKV: the last inputs of attention and MLP, and a weighted average over all tokens. The
    average has three parts: numerator, denominator and largest exponent."""
    width = config.size("hidden_size")
    names = ("numerator", "denominator", "maximum")
    return (
        *(Field(name, (width,), "fp32") for name in names),
        *(Field(name, (width,), dtype) for name in ("mlp_input", "input")),
    )


def xlstm(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of xLSTM: a memory matrix per head, its normaliser and its largest exponent."""
    heads, hidden, unit = config.size("num_heads"), config.size("hidden_size"), 64

    def width(factor: str) -> int:
        return -(-int(hidden * float(config.get(factor))) // unit) * unit // heads

    keys, values = width("qk_dim_factor"), width("v_dim_factor")
    return (
        Field("memory", (heads, keys, values), dtype),
        Field("normaliser", (heads, keys), dtype),
        Field("maximum", (heads, 1), dtype),
    )


def recurrent_gemma(config: Config) -> list[str]:
    """Return the layer kinds of RecurrentGemma. Its config lists the kinds of one period, which repeats."""
    kinds = {"recurrent": "linear_attention", "attention": "sliding_attention"}
    period = config.get("block_types")
    return [kinds[period[i % len(period)]] for i in range(config.depth)]


def gated_recurrence(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of RecurrentGemma's recurrent layers: the convolution's last inputs, and the state."""
    width = config.optional("lru_width") or config.size("hidden_size")
    return (
        Field("recurrent", (width,), "fp32"),
        Field("conv", (width, config.size("conv1d_width") - 1), dtype),
    )


def zamba(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of Zamba's recurrent layers: Mamba-1 with several heads."""
    inner = config.size("mamba_expand") * config.size("hidden_size")
    heads = config.size("n_mamba_heads")
    return _state(
        config,
        dtype,
        (inner,),
        config.size("mamba_d_conv"),
        (heads, inner // heads, config.size("mamba_d_state")),
    )


def zaya(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of Zaya's states: the last inputs of the convolutions over queries and keys, and a value of
    the last token."""
    heads, kv = config.size("num_attention_heads"), config.size("num_key_value_heads")
    width = config.size("head_dim")
    kernel = config.size("cca_time0") + config.size("cca_time1") - 2
    return (
        Field("conv", ((heads + kv) * width, kernel), dtype),
        Field("recurrent", (kv * width // 2,), dtype),
    )


def inkling(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of Inkling. Its config has separate numbers and sizes of heads for sliding layers."""
    prefix = "swa_" if config.get("layer_kind") == "hybrid_sliding" else ""
    return attention_fields(
        config.size(f"{prefix}num_key_value_heads"), config.size(f"{prefix}head_dim"), dtype
    )


def inkling_states(config: Config, _: str) -> tuple[Field, ...]:
    """Return the fields of Inkling's four convolutions in each layer: over keys, values and the outputs of attention
    and MLP. Their inputs are stored in float32."""
    prefix = "swa_" if config.get("layer_kind") == "hybrid_sliding" else ""
    kv = config.size(f"{prefix}num_key_value_heads") * config.size(f"{prefix}head_dim")
    hidden, kernel = config.size("hidden_size"), config.size("conv_kernel_size", "sconv_kernel_size")
    names = {"conv": kv, "conv_1": kv, "conv_2": hidden, "conv_3": hidden}
    return tuple(Field(name, (channels, kernel), "fp32") for name, channels in names.items())


def falcon(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of Falcon. The old architecture has one KV head, or one per query head. The new
    architecture (`new_decoder_architecture`) copies its KV heads, and stores one copy for every query head."""
    heads = config.size("num_attention_heads")
    if not config.get("new_decoder_architecture"):
        heads = 1 if config.get("multi_query", True) else config.optional("num_kv_heads") or heads
    return attention_fields(heads, config.quotient("hidden_size", "num_attention_heads"), dtype)


def mimo(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of MiMo V2. Its sliding layers have twice as many KV heads as its full layers. Values have
    fewer dims than keys."""
    heads = config.size("num_key_value_heads") * (2 if config.get("layer_kind") == "sliding_attention" else 1)
    return attention_fields(heads, config.size("head_dim"), dtype, v_dim=config.size("v_head_dim"))


def dbrx(config: Config, dtype: str) -> tuple[Field, ...]:
    heads = config.nested("attn_config").size("kv_n_heads")
    return attention_fields(heads, config.quotient("hidden_size", "num_attention_heads"), dtype)


def twice_as_many_layers(config: Config) -> list[str]:
    """Return the layer kinds of LongCat. Each of its layers has two attention modules, which count as two layers
    here."""
    return ["full_attention"] * (2 * config.size("num_layers"))


def multi_query(config: Config, dtype: str) -> tuple[Field, ...]:
    """Return the fields of GPT-2 and related models. The config selects one KV head for all query heads, or one KV
    head per query head."""
    heads = config.size("num_attention_heads")
    width = config.quotient("hidden_size", "num_attention_heads")
    return attention_fields(1 if config.get("multi_query") else heads, width, dtype)


@dataclass(frozen=True, slots=True)
class Family:
    """The rules for reading the config of one model type.

    - `pattern` returns the layer kinds.
    - `token` and `state` return the fields of a token and of a state.
    - `mixer` is the last word in the names of state specs, such as "mamba" in "layers.3.mamba".
    - `defaults` are values that published configs may omit.
    - `names` maps config fields of this type to our names.
    """

    pattern: Pattern
    defaults: Mapping[str, Any]
    token: Fields = _key_value
    state: Fields | None = None
    mixer: str = "mamba"
    names: Mapping[str, str] | None = None

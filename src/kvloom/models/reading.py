"""How the config of each model family is read: one row of FAMILIES each.

A row gives the kind of every layer, what an attention layer keeps of a token, what a recurrent layer
keeps of everything, and the values that published configs may leave out. Knows fields of configs;
`specs` turns them into layer specs.

Attention sinks (gpt-oss) are weights, one per head: nothing is kept for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvloom.core.layers import DTYPE_BYTES, QUANTISED, Field, attention_fields

__all__ = ["FAMILIES", "TEXT_TYPES", "Config", "Family", "ModelError", "dtype_name", "plain_family"]

_MAX_LAYERS = 10_000
_MAX_SIZE = 2**40
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


class ModelError(ValueError):
    """A model that cannot be read; the message names the value and the way out."""


def dtype_name(name: object) -> str:
    text = str(name).removeprefix("torch.")
    text = _DTYPES.get(text, text)
    if text not in DTYPE_BYTES:
        raise ModelError(f"dtype {name!r} is not known; known: {', '.join([*_DTYPES, *DTYPE_BYTES])}")
    return text


class Config:
    """A config's fields over its family's defaults; a missing or odd one is an error that names it."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = {**defaults, **raw}
        self.model_type = str(raw.get("model_type"))

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def size(self, *keys: str) -> int:
        """The first of `keys` that is set, as a positive integer."""
        for key in keys:
            if self.get(key) is not None:
                return self._integer(key, self.get(key), least=1)
        raise ModelError(f"{self.model_type}: the config has no {' or '.join(keys)}")

    def optional(self, key: str) -> int | None:
        return None if self.get(key) is None else self.size(key)

    def count(self, key: str) -> int:
        """A number that may be zero, and is when unset."""
        return self._integer(key, self.get(key, 0), least=0)

    def numbers(self, key: str) -> list[int]:
        values = self.get(key, [])
        if not isinstance(values, list):
            raise ModelError(f"{self.model_type}: {key} is {values!r}; a list of integers is needed")
        return [self._integer(key, value, least=0) for value in values]

    def _integer(self, key: str, value: object, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_SIZE:
            raise ModelError(
                f"{self.model_type}: {key} is {value!r}; an integer from {least} to 2**40 is needed"
            )
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


# Patterns: the kind of every layer, where the config does not list them itself.


def _all(kind: str) -> Pattern:
    return lambda config: [kind] * config.depth


def _every(period: int | str, rare: str, common: str) -> Pattern:
    """`rare` at the end of every `period` layers (a number, or the field that holds it)."""

    def pattern(config: Config) -> list[str]:
        n = config.size(period) if isinstance(period, str) else period
        return [common if (i + 1) % n else rare for i in range(config.depth)]

    return pattern


def _one_window(config: Config) -> list[str]:
    """Every layer slides where a window is set and not switched off."""
    slides = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    return ["sliding_attention" if slides else "full_attention"] * config.depth


def _late_windows(config: Config) -> list[str]:
    """Qwen: layers from `max_window_layers` on slide, if windows are switched on at all."""
    on = config.get("use_sliding_window") and config.get("sliding_window")
    first = config.count("max_window_layers") if on else config.depth
    return ["sliding_attention" if i >= first else "full_attention" for i in range(config.depth)]


def _llama4(config: Config) -> list[str]:
    """Layers with rotary positions attend in chunks, the others to everything."""
    rotary = config.numbers("no_rope_layers") or [
        (i + 1) % config.size("no_rope_layer_interval") for i in range(config.depth)
    ]
    chunked = config.get("attention_chunk_size") is not None
    return ["chunked_attention" if chunked and flag else "full_attention" for flag in rotary]


def _mllama(config: Config) -> list[str]:
    cross = set(config.numbers("cross_attention_layers"))
    return ["cross_attention" if i in cross else "full_attention" for i in range(config.depth)]


def _jamba(config: Config) -> list[str]:
    period, offset = config.size("attn_layer_period"), config.count("attn_layer_offset")
    return ["full_attention" if i % period == offset else "linear_attention" for i in range(config.depth)]


def _bamba(config: Config) -> list[str]:
    attention = set(config.numbers("attn_layer_indices"))
    return ["full_attention" if i in attention else "linear_attention" for i in range(config.depth)]


def _nemotron(config: Config) -> list[str]:
    letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not set(pattern) <= set(letters):
        raise ModelError(
            f"{config.model_type}: hybrid_override_pattern is {pattern!r}; needed is a text of M, *, - and E, "
            "or a list layers_block_type"
        )
    return [letters[letter] for letter in pattern]


# Fields: what an attention layer keeps of a token, what a recurrent layer keeps of everything.


def _key_value(config: Config, dtype: str) -> tuple[Field, ...]:
    heads = config.optional("num_key_value_heads") or config.size("num_attention_heads")
    head_dim = config.optional("attention_head_dim") or config.optional("head_dim")
    return attention_fields(heads, head_dim or config.quotient("hidden_size", "num_attention_heads"), dtype)


def _latent(config: Config, dtype: str) -> tuple[Field, ...]:
    """MLA: the compressed latent and the shared rotary key side by side, on every rank."""
    fields: tuple[Field, ...] = (
        Field("latent", (config.size("kv_lora_rank") + config.size("qk_rope_head_dim"),), dtype),
    )
    return fields if dtype not in QUANTISED else (*fields, Field("latent_scale", (1,), "fp32"))


def _state(
    config: Config, dtype: str, channels: int, kernel: int, shape: tuple[int, ...]
) -> tuple[Field, ...]:
    """The convolution's last `kernel` inputs and the recurrent state.

    The convolution's channels are several parts end to end (inputs, then what the heads share):
    whoever shards it along axis 0 cuts each part. The recurrence runs in float32.
    """
    recurrent = config.get("mamba_ssm_cache_dtype", config.get("mamba_ssm_dtype", "float32"))
    return (
        Field("conv", (channels, kernel), dtype, shard_axis=0),
        Field("recurrent", shape, dtype_name(recurrent), shard_axis=0),
    )


def _mamba1(config: Config, dtype: str) -> tuple[Field, ...]:
    """Mamba-1. A pure Mamba states its inner width; in a hybrid that field is the width of an MLP."""
    own = None if config.get("mamba_expand") else config.optional("intermediate_size")
    inner = own or config.size("mamba_expand", "expand") * config.size("hidden_size")
    state, kernel = config.size("mamba_d_state", "state_size"), config.size("mamba_d_conv", "conv_kernel")
    return _state(config, dtype, inner, kernel, (inner, state))


def _mamba2(heads: str, head_dim: str, groups: str, state: str, kernel: str) -> Fields:
    """Mamba-2 under the names that one family gives its sizes."""

    def fields(config: Config, dtype: str) -> tuple[Field, ...]:
        n = config.size(heads)
        inner = config.optional("mamba_d_ssm") or 0
        if config.get(head_dim) in (None, "auto"):
            width = (inner or config.size("mamba_expand") * config.size("hidden_size")) // n
        else:
            width = config.size(head_dim)
        groups_ = config.size(f"mamba_{groups}", groups)
        channels = (inner or n * width) + 2 * groups_ * config.size(state)
        return _state(config, dtype, channels, config.size(kernel), (n, width, config.size(state)))

    return fields


_MAMBA2 = _mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def _delta(config: Config, dtype: str) -> tuple[Field, ...]:
    """Gated delta rule: a key-by-value matrix per value head."""
    keys, values = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    key_heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    channels = 2 * key_heads * keys + value_heads * values
    kernel = config.size("linear_conv_kernel_dim")
    return _state(config, dtype, channels, kernel, (value_heads, keys, values))


@dataclass(frozen=True, slots=True)
class Family:
    """How one model type is read. `defaults` are the values that its published configs may leave out."""

    pattern: Pattern
    defaults: Mapping[str, Any]
    token: Fields = _key_value
    state: Fields | None = None
    mixer: str = "mamba"


def _sizes(
    layers: int | None, hidden: int, heads: int, kv: int | None, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": context,
        **more,
    }


_HYBRID_STATE = {
    "mamba_expand": 2,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN_VL = _sizes(80, 8192, 64, 8, 32768, max_window_layers=80, **_QWEN_WINDOW)

FAMILIES: dict[str, Family] = {
    "llama": Family(_all("full_attention"), _sizes(32, 4096, 32, None, 2048)),
    "qwen2": Family(_late_windows, _sizes(32, 4096, 32, 32, 32768, max_window_layers=28, **_QWEN_WINDOW)),
    "qwen3": Family(
        _late_windows, _sizes(32, 4096, 32, 32, 32768, head_dim=128, max_window_layers=28, **_QWEN_WINDOW)
    ),
    "qwen3_moe": Family(_one_window, _sizes(24, 2048, 32, 4, 32768, **_QWEN_WINDOW)),
    "qwen2_5_vl_text": Family(_late_windows, _QWEN_VL),
    "mistral": Family(_one_window, _sizes(32, 4096, 32, 8, 131072, sliding_window=4096)),
    "ministral": Family(_one_window, _sizes(32, 4096, 32, 8, 131072, sliding_window=4096)),
    "gemma2": Family(
        _every(2, rare="full_attention", common="sliding_attention"),
        _sizes(26, 2304, 8, 4, 8192, head_dim=256, sliding_window=4096),
    ),
    "gemma3_text": Family(
        _every("sliding_window_pattern", rare="full_attention", common="sliding_attention"),
        _sizes(26, 2304, 8, 4, 131072, head_dim=256, sliding_window=4096, sliding_window_pattern=6),
    ),
    "gpt_oss": Family(
        _every(2, rare="full_attention", common="sliding_attention"),
        _sizes(36, 2880, 64, 8, 131072, head_dim=64, sliding_window=128),
    ),
    "llama4_text": Family(
        _llama4,
        _sizes(48, 5120, 40, 8, 131072, head_dim=128, attention_chunk_size=8192, no_rope_layer_interval=4),
    ),
    "mllama_text_model": Family(
        _mllama, _sizes(40, 4096, 32, 8, 131072, cross_attention_layers=list(range(3, 40, 5)))
    ),
    "deepseek_v2": Family(
        _all("full_attention"),
        _sizes(32, 4096, 32, None, 2048, kv_lora_rank=512, qk_rope_head_dim=64),
        token=_latent,
    ),
    "deepseek_v3": Family(
        _all("full_attention"),
        _sizes(61, 7168, 128, 128, 4096, kv_lora_rank=512, qk_rope_head_dim=64),
        token=_latent,
    ),
    "mamba": Family(
        _all("linear_attention"),
        {"num_hidden_layers": 32, "hidden_size": 768, "expand": 2, "state_size": 16, "conv_kernel": 4},
        state=_mamba1,
    ),
    "mamba2": Family(
        _all("linear_attention"),
        {
            "num_hidden_layers": 64,
            "hidden_size": 4096,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
        },
        state=_mamba2("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
    ),
    "jamba": Family(
        _jamba,
        _sizes(32, 4096, 32, 8, 262144, attn_layer_period=8, attn_layer_offset=4)
        | {"mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4},
        state=_mamba1,
    ),
    "bamba": Family(_bamba, _sizes(32, 4096, 32, 8, 262144) | _HYBRID_STATE, state=_MAMBA2),
    "granitemoehybrid": Family(
        _all("linear_attention"), _sizes(32, 4096, 32, None, 2048) | _HYBRID_STATE, state=_MAMBA2
    ),
    "falcon_h1": Family(
        _all("hybrid"), _sizes(32, 4096, 32, 8, 8192, mamba_d_ssm=1024) | _HYBRID_STATE, state=_MAMBA2
    ),
    "qwen3_next": Family(
        _every("full_attention_interval", rare="full_attention", common="linear_attention"),
        _sizes(48, 2048, 16, 2, 32768, head_dim=256, full_attention_interval=4)
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        state=_delta,
        mixer="linear",
    ),
    "nemotron_h": Family(
        _nemotron,
        _sizes(None, 4096, 32, 8, 4096, head_dim=128, mamba_num_heads=128, mamba_head_dim=64)
        | {"n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
        state=_mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    ),
}

TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "mllama": "mllama_text_model",
    "qwen2_5_vl": "qwen2_5_vl_text",
}
"""The text model inside a multimodal one."""

_PLAIN = Family(_one_window, {})
_NOT_PLAIN = (
    "kv_lora_rank",
    "ssm",
    "mamba",
    "linear_num_",
    "linear_attn",
    "state_size",
    "rwkv",
    "kv_shared",
    "index_",
    "cross_attention",
)


def plain_family(text: Mapping[str, Any]) -> Family:
    """Reads a type nobody described, if every field it has is that of plain attention."""
    model_type = text["model_type"]
    missing = [
        key for key in ("num_hidden_layers", "hidden_size", "num_attention_heads") if not text.get(key)
    ]
    odd = sorted(key for key in text if any(mark in key for mark in _NOT_PLAIN) and text[key])
    if missing or odd:
        why = f"it lacks {', '.join(missing)}" if missing else f"it has {', '.join(odd)}"
        raise ModelError(
            f"model type {model_type!r} is not known and cannot be read as plain attention: {why}. "
            f"Known types: {', '.join(sorted([*FAMILIES, *TEXT_TYPES]))}"
        )
    return _PLAIN

"""The rules for reading the config of each model family. Each family is one row of FAMILIES. Model types that are
not listed are read as plain attention, if possible.

A row has the layer pattern, the fields of tokens and states, and values that published configs may omit. Attention
sinks (gpt-oss) are weights, so they need no field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .config_reading import (
    MAMBA2,
    Family,
    ModelError,
    bamba,
    dbrx,
    deepseek_v4,
    deepseek_v4_layers,
    deepseek_v4_windows,
    delta,
    every_layer,
    falcon,
    full_within,
    gated_recurrence,
    indexed_latent,
    inkling,
    inkling_states,
    interleaved,
    jamba,
    kimi,
    kimi_delta,
    latent,
    lfm2,
    lightning,
    llama4,
    mamba1,
    mamba2,
    mimo,
    mimo_layers,
    mllama,
    multi_query,
    nemotron,
    olmo_delta,
    qwen4,
    recurrent_gemma,
    rwkv,
    short_conv,
    sparse_blocks,
    twice_as_many_layers,
    uniform_window,
    windows_from_layer,
    xlstm,
    zamba,
    zamba2_layers,
    zamba_layers,
    zaya,
)

__all__ = ["ENCODER_DECODERS", "FAMILIES", "TEXT_TYPES", "plain_attention_family"]


def _sizes(
    layers: int | None, hidden: int, heads: int, kv: int | None, context: int | None, **more: Any
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
_QWEN_DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_GPT2_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
_T5_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_decoder_layers": "num_hidden_layers",  # if both are set, this one counts
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "d_kv": "head_dim",
}
_T5_SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "head_dim": 64,
    "is_encoder_decoder": True,
}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_QWEN_VL = _sizes(80, 8192, 64, 8, 32768, max_window_layers=80, **_QWEN_WINDOW)

FAMILIES: dict[str, Family] = {
    "llama": Family(every_layer("full_attention"), _sizes(32, 4096, 32, None, 2048)),
    "qwen2": Family(
        windows_from_layer, _sizes(32, 4096, 32, 32, 32768, max_window_layers=28, **_QWEN_WINDOW)
    ),
    "qwen3": Family(
        windows_from_layer,
        _sizes(32, 4096, 32, 32, 32768, head_dim=128, max_window_layers=28, **_QWEN_WINDOW),
    ),
    "qwen3_moe": Family(uniform_window, _sizes(24, 2048, 32, 4, 32768, **_QWEN_WINDOW)),
    "qwen2_5_vl_text": Family(windows_from_layer, _QWEN_VL),
    "mistral": Family(uniform_window, _sizes(32, 4096, 32, 8, 131072, sliding_window=4096)),
    "ministral": Family(uniform_window, _sizes(32, 4096, 32, 8, 131072, sliding_window=4096)),
    "gemma2": Family(
        interleaved(2, rare="full_attention", common="sliding_attention"),
        _sizes(26, 2304, 8, 4, 8192, head_dim=256, sliding_window=4096),
    ),
    "gemma3_text": Family(
        interleaved("sliding_window_pattern", rare="full_attention", common="sliding_attention"),
        _sizes(26, 2304, 8, 4, 131072, head_dim=256, sliding_window=4096, sliding_window_pattern=6),
    ),
    "gpt_oss": Family(
        interleaved(2, rare="full_attention", common="sliding_attention"),
        _sizes(36, 2880, 64, 8, 131072, head_dim=64, sliding_window=128),
    ),
    "llama4_text": Family(
        llama4,
        _sizes(48, 5120, 40, 8, 131072, head_dim=128, attention_chunk_size=8192, no_rope_layer_interval=4),
    ),
    "mllama_text_model": Family(
        mllama, _sizes(40, 4096, 32, 8, 131072, cross_attention_layers=list(range(3, 40, 5)))
    ),
    "deepseek_v2": Family(
        every_layer("full_attention"),
        _sizes(32, 4096, 32, None, 2048, **_LATENT),
        token=latent,
    ),
    "deepseek_v3": Family(
        every_layer("full_attention"),
        _sizes(61, 7168, 128, 128, 4096, **_LATENT),
        token=latent,
    ),
    "glm4_moe_lite": Family(
        every_layer("full_attention"), _sizes(47, 2048, 20, 20, 202752, **_LATENT), token=latent
    ),
    "youtu": Family(every_layer("full_attention"), _sizes(32, 2048, 16, 16, 131072, **_LATENT), token=latent),
    "axk1": Family(every_layer("full_attention"), _sizes(61, 7168, 64, 64, 32768, **_LATENT), token=latent),
    "minicpm3": Family(
        every_layer("full_attention"),
        _sizes(62, 2560, 40, 40, 32768, kv_lora_rank=256, qk_rope_head_dim=32),
        token=latent,
    ),
    "deepseek_v32": Family(
        every_layer("indexed_attention"),
        _sizes(61, 7168, 128, 128, 163840, index_head_dim=128, **_LATENT),
        token=indexed_latent,
    ),
    "glm_moe_dsa": Family(
        every_layer("indexed_attention"),
        _sizes(78, 6144, 64, 64, 202752, index_head_dim=128, **_LATENT),
        token=indexed_latent,
    ),
    "axk2": Family(
        every_layer("indexed_attention"),
        _sizes(48, 2048, 32, 32, 131072, index_head_dim=128, kv_lora_rank=128, qk_rope_head_dim=32),
        token=indexed_latent,
    ),
    "hy_v4": Family(
        every_layer("indexed_attention"),
        _sizes(34, 2816, 32, 32, 262144, index_head_dim=128, indexer_period=4, **_LATENT),
        token=indexed_latent,
    ),
    "deepseek_v4": Family(
        deepseek_v4_layers,
        _sizes(43, 4096, 64, 1, 1048576, head_dim=512, index_head_dim=128, sliding_window=128)
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}},
        token=deepseek_v4,
        state=deepseek_v4_windows,
        mixer="windows",
    ),
    "longcat_flash": Family(
        twice_as_many_layers,
        {"num_layers": 28, "max_position_embeddings": 131072, **_LATENT},
        token=latent,
    ),
    "mimo_v2_flash": Family(
        mimo_layers,
        _sizes(48, 4096, 64, 4, 131072, head_dim=192, v_head_dim=128, sliding_window=129),
        token=mimo,
    ),
    "doge": Family(full_within("keep_window_size"), _sizes(32, 1024, 8, 8, 2048, keep_window_size=2048)),
    "moshi": Family(full_within("sliding_window"), _sizes(32, 4096, 32, 32, 3000, sliding_window=3000)),
    "falcon": Family(every_layer("full_attention"), _sizes(32, 4544, 71, None, 2048), token=falcon),
    "dbrx": Family(
        every_layer("full_attention"),
        _sizes(24, 2048, 16, None, 2048, attn_config={"kv_n_heads": 1}),
        token=dbrx,
        names={
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
        },
    ),
    "jetmoe": Family(
        every_layer("full_attention"),
        _sizes(12, 2048, 32, 16, 4096, head_dim=128),
        names={"kv_channels": "head_dim"},
    ),
    "gpt2": Family(
        every_layer("full_attention"), _sizes(12, 768, 12, None, 1024), token=multi_query, names=_GPT2_NAMES
    ),
    **dict.fromkeys(("t5", "longt5"), Family(every_layer("full_attention"), _T5_SIZES, names=_T5_NAMES)),
    "switch_transformers": Family(
        every_layer("full_attention"),
        {**_T5_SIZES, "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
        names=_T5_NAMES,
    ),
    **dict.fromkeys(
        ("mt5", "umt5"),
        Family(
            every_layer("full_attention"),
            {**_T5_SIZES, "num_hidden_layers": 8, "num_attention_heads": 6},
            names=_T5_NAMES,
        ),
    ),
    "gpt_bigcode": Family(
        every_layer("full_attention"),
        _sizes(12, 768, 12, None, 1024, multi_query=True),
        token=multi_query,
        names=_GPT2_NAMES,
    ),
    "mamba": Family(
        every_layer("linear_attention"),
        {"num_hidden_layers": 32, "hidden_size": 768, "expand": 2, "state_size": 16, "conv_kernel": 4},
        state=mamba1,
    ),
    "falcon_mamba": Family(
        every_layer("linear_attention"),
        {"num_hidden_layers": 32, "hidden_size": 768, "expand": 2, "state_size": 16, "conv_kernel": 4},
        state=mamba1,
    ),
    "mamba2": Family(
        every_layer("linear_attention"),
        {
            "num_hidden_layers": 64,
            "hidden_size": 4096,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
        },
        state=mamba2("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
    ),
    "jamba": Family(
        jamba,
        _sizes(32, 4096, 32, 8, 262144, attn_layer_period=8, attn_layer_offset=4)
        | {"mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4},
        state=mamba1,
    ),
    "bamba": Family(bamba, _sizes(32, 4096, 32, 8, 262144) | _HYBRID_STATE, state=MAMBA2),
    "granitemoehybrid": Family(
        every_layer("linear_attention"), _sizes(32, 4096, 32, None, 2048) | _HYBRID_STATE, state=MAMBA2
    ),
    "falcon_h1": Family(
        every_layer("hybrid"), _sizes(32, 4096, 32, 8, 8192, mamba_d_ssm=1024) | _HYBRID_STATE, state=MAMBA2
    ),
    "qwen3_next": Family(
        interleaved("full_attention_interval", rare="full_attention", common="linear_attention"),
        _sizes(48, 2048, 16, 2, 32768, head_dim=256, full_attention_interval=4) | _QWEN_DELTA,
        state=delta,
        mixer="linear",
    ),
    "qwen3_5_text": Family(
        interleaved("full_attention_interval", rare="full_attention", common="linear_attention"),
        _sizes(32, 4096, 16, 4, 32768, head_dim=256, full_attention_interval=4) | _QWEN_DELTA,
        state=delta,
        mixer="linear",
    ),
    "qwen3_5_moe_text": Family(
        interleaved("full_attention_interval", rare="full_attention", common="linear_attention"),
        _sizes(40, 2048, 16, 2, 32768, head_dim=256, full_attention_interval=4) | _QWEN_DELTA,
        state=delta,
        mixer="linear",
    ),
    "qwen4_exp_text": Family(
        interleaved(4, rare="indexed_attention", common="linear_attention"),
        _sizes(40, 2048, 16, 2, 32768, head_dim=256, indexer_head_dim=128, ngram_size=3, hc_count=4)
        | {"ple_conv_kernel_size": 4, **_QWEN_DELTA},
        token=sparse_blocks,
        state=qwen4,
        mixer="linear",
    ),
    "olmo_hybrid": Family(
        interleaved(4, rare="full_attention", common="linear_attention"),
        _sizes(32, 3840, 30, None, 65536, linear_conv_kernel_dim=4),
        state=olmo_delta,
        mixer="linear",
    ),
    "kimi_linear": Family(
        kimi,
        _sizes(27, 2304, 32, 32, 1048576, **_LATENT)
        | {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4},
        token=latent,
        state=kimi_delta,
        mixer="linear",
    ),
    "minimax": Family(
        interleaved(2, rare="linear_attention", common="full_attention"),
        _sizes(32, 4096, 32, 8, 131072),
        state=lightning,
        mixer="linear",
    ),
    "bailing_hybrid": Family(
        interleaved("layer_group_size", rare="full_attention", common="linear_attention"),
        _sizes(42, 2560, 32, 32, 262144, layer_group_size=6, **_LATENT)
        | {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4},
        token=latent,
        state=kimi_delta,
        mixer="linear",
        names={"model_max_length": "max_position_embeddings"},
    ),
    "rwkv": Family(
        every_layer("linear_attention"), {"num_hidden_layers": 32, "hidden_size": 4096}, state=rwkv
    ),
    "xlstm": Family(
        every_layer("linear_attention"),
        {"num_hidden_layers": 32, "hidden_size": 4096, "num_heads": 8}
        | {"qk_dim_factor": 0.5, "v_dim_factor": 1.0},
        state=xlstm,
    ),
    "recurrent_gemma": Family(
        recurrent_gemma,
        _sizes(26, 2560, 10, 10, None, head_dim=256, sliding_window=2048, conv1d_width=4)
        | {"block_types": ["recurrent", "recurrent", "attention"]},
        state=gated_recurrence,
        names={"attention_window_size": "sliding_window"},
    ),
    "zamba": Family(
        zamba_layers,
        _sizes(76, 3712, 16, 16, 4096, n_mamba_heads=2, attn_layer_period=6, attn_layer_offset=4)
        | {"mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "attention_head_dim": 464},
        state=zamba,
    ),
    "zamba2": Family(
        zamba2_layers,
        _sizes(54, 2560, 32, 32, 4096, n_mamba_heads=8)
        | {
            "mamba_expand": 2,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_ngroups": 1,
            "attention_head_dim": 160,
        },
        state=mamba2("n_mamba_heads", "mamba_headdim", "ngroups", "mamba_d_state", "mamba_d_conv"),
    ),
    "zaya": Family(
        every_layer("hybrid"),
        _sizes(40, 2048, 8, 2, 131072, head_dim=128, cca_time0=2, cca_time1=2),
        state=zaya,
        mixer="conv",
    ),
    "inkling_text": Family(
        interleaved(6, rare="hybrid", common="hybrid_sliding"),
        _sizes(66, 6144, 64, 8, 131072, head_dim=128, sliding_window_size=512, conv_kernel_size=4)
        | {"swa_num_key_value_heads": 16, "swa_head_dim": 128},
        token=inkling,
        state=inkling_states,
        mixer="conv",
    ),
    "minimax_m3_vl_text": Family(
        every_layer("full_attention"),
        _sizes(60, 6144, 64, 4, 524288, head_dim=128, index_head_dim=128),
        token=sparse_blocks,
    ),
    "lfm2": Family(lfm2, _sizes(32, 2560, 32, 8, 128_000, conv_L_cache=3), state=short_conv, mixer="conv"),
    "lfm2_moe": Family(
        lfm2, _sizes(32, 2048, 32, 8, 128_000, conv_L_cache=3), state=short_conv, mixer="conv"
    ),
    "nemotron_h": Family(
        nemotron,
        _sizes(None, 4096, 32, 8, 4096, head_dim=128, mamba_num_heads=128, mamba_head_dim=64)
        | {"n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
        state=mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    ),
}

TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "mllama": "mllama_text_model",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}
"""Model type of the text model inside each multimodal model."""

ENCODER_DECODERS: dict[str, Literal["text", "audio"]] = {
    "bart": "text",
    "bigbird_pegasus": "text",
    "blenderbot": "text",
    "blenderbot-small": "text",
    "led": "text",
    "longt5": "text",
    "m2m_100": "text",
    "marian": "text",
    "mbart": "text",
    "mt5": "text",
    "mvp": "text",
    "nllb-moe": "text",
    "pegasus": "text",
    "pegasus_x": "text",
    "plbart": "text",
    "switch_transformers": "text",
    "t5": "text",
    "umt5": "text",
    "whisper": "audio",
}
"""Model types of encoder-decoder models that run, and the input of the encoder."""

_OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_attention_heads": (
        *("n_head", "n_heads", "num_heads", "attention_heads"),
        *("decoder_attention_heads", "num_decoder_attention_heads"),
    ),
    "max_position_embeddings": (
        *("n_positions", "max_seq_len", "max_target_positions"),
        "max_decoder_position_embeddings",
    ),
}
"""Names of plain attention's fields in older configs."""
_NOT_PLAIN = (
    "kv_lora_rank",
    "ssm",
    "mamba",
    "linear_num_",
    "linear_attn",
    "state_size",
    "rwkv",
    "index_",
    "cross_attention_layers",
)


def plain_attention_family(text: Mapping[str, Any]) -> Family:
    """Return the family of a model type that is not listed. Raises ModelError if the config has fields that plain
    attention does not have."""
    model_type = text["model_type"]
    names = {
        own: name
        for name, others in _OTHER_NAMES.items()
        for own in others
        if text.get(own) and (not text.get(name) or "decoder" in own or own == "max_target_positions")
    }
    missing = [
        key
        for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        if key not in names.values() and not text.get(key)
    ]
    odd = sorted(key for key in text if any(mark in key for mark in _NOT_PLAIN) and text[key])
    if missing or odd:
        why = f"it lacks {', '.join(missing)}" if missing else f"it has {', '.join(odd)}"
        raise ModelError(
            f"model type {model_type!r} is not known and cannot be read as plain attention: {why}. "
            f"Known types: {', '.join(sorted([*FAMILIES, *TEXT_TYPES]))}"
        )
    return Family(uniform_window, {}, names=names)

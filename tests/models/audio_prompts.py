"""Tiny random models that take audio, clips for them, and the tokens of `generate()` for both."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from kvloom.models.loading import language_model_class
from tests.models.image_prompts import BEGIN, END, IMAGE, TINY as VISION

transformers.logging.set_verbosity_error()

AUDIO, OPEN, CLOSE = 63, 58, 59
"""Token ids of a clip: its placeholder, and the tokens before and after it."""
FRAMES = 40
"""Frames of a padded clip in models whose towers have a fixed size."""

_TEXT: dict[str, Any] = VISION["llava"]["text_config"]
_QWEN_TEXT: dict[str, Any] = VISION["qwen2_5_vl"]["text_config"]
_WHISPER: dict[str, Any] = {
    "num_mel_bins": 8, "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "max_source_positions": FRAMES // 2, "init_std": 0.3, "initializer_range": 0.3,
}  # fmt: skip
_ENCODER: dict[str, Any] = {
    "num_mel_bins": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_source_positions": FRAMES // 2, "initializer_range": 0.3,
}  # fmt: skip
_OMNI_TOKENS = {
    "audio_token_id": AUDIO,
    "audio_start_token_id": OPEN,
    "audio_end_token_id": CLOSE,
    "image_token_id": IMAGE,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "video_token_id": 2,
}
_GEMMA_TOKENS = {
    "audio_token_id": AUDIO, "boa_token_id": OPEN, "eoa_token_index": CLOSE, "image_token_id": IMAGE, "video_token_id": 2,
}  # fmt: skip

TINY: dict[str, dict[str, Any]] = {
    "audioflamingo3": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "audio_config": _ENCODER,
        "audio_token_id": AUDIO,
    },
    "gemma4": {
        "text_config": {**VISION["gemma4"]["text_config"], "sliding_window": 30},
        "vision_config": None,
        "audio_config": {
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [8, 4],
            "conv_kernel_size": 3, "attention_chunk_size": 4, "attention_context_left": 5, "output_proj_dims": 24,
            "initializer_range": 0.3,
        },
        **_GEMMA_TOKENS,
    },
    "gemma4_unified": {
        "text_config": {**VISION["gemma4_unified"]["text_config"], "sliding_window": 30},
        "vision_config": None,
        "audio_config": {"audio_embed_dim": 8, "initializer_range": 0.3},
        **_GEMMA_TOKENS,
    },
    "glmasr": {
        "text_config": _TEXT,
        "audio_config": {**_ENCODER, "max_position_embeddings": FRAMES // 2},
        "audio_token_id": AUDIO,
    },
    "granite_speech": {
        "text_config": {**_TEXT, "model_type": "granite"},
        "encoder_config": {
            "input_dim": 8, "num_layers": 2, "hidden_dim": 16, "num_heads": 2, "dim_head": 8, "output_dim": 6,
            "context_size": 10, "max_pos_emb": 16, "conv_kernel_size": 3, "feedforward_mult": 2, "initializer_range": 0.3,
        },
        "projector_config": {
            "model_type": "blip_2_qformer", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 24, "encoder_hidden_size": 16, "vocab_size": 8, "initializer_range": 0.3,
        },
        "audio_token_index": AUDIO,
        "has_lora_adapter": False,
        "initializer_range": 0.3,
    },
    "qwen2_5_omni_thinker": {
        "text_config": _QWEN_TEXT,
        "vision_config": VISION["qwen2_5_vl"]["vision_config"],
        "audio_config": {**_WHISPER, "n_window": 5, "output_dim": 32},
        **_OMNI_TOKENS,
    },
    "qwen2_audio": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "audio_config": _WHISPER,
        "audio_token_index": AUDIO,
    },
    "qwen3_asr": {
        "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 8},
        "audio_config": {
            **_WHISPER, "max_source_positions": 50, "n_window": 50, "n_window_infer": 200, "output_dim": 32, "downsample_hidden_size": 4,
        },
        "audio_token_id": AUDIO,
    },
    "qwen3_omni_moe_thinker": {
        "text_config": VISION["qwen3_vl_moe"]["text_config"],
        "vision_config": VISION["qwen3_vl"]["vision_config"],
        "audio_config": {
            **_WHISPER, "max_source_positions": 50, "n_window": 50, "n_window_infer": 200, "output_dim": 32, "downsample_hidden_size": 4,
        },
        **_OMNI_TOKENS,
    },
    "voxtral": {"text_config": _TEXT, "audio_config": _ENCODER, "audio_token_id": AUDIO},
}  # fmt: skip
MASKS = {
    "audioflamingo3": "input_features_mask",
    "gemma4": "input_features_mask",
    "gemma4_unified": "input_features_mask",
    "glmasr": "input_features_mask",
    "qwen2_5_omni_thinker": "feature_attention_mask",
    "qwen2_audio": "feature_attention_mask",
    "qwen3_asr": "input_features_mask",
    "qwen3_omni_moe_thinker": "feature_attention_mask",
}
"""Name of the mask that separates the frames of a clip from padding."""
Clip = dict[str, torch.Tensor]


def audio_model(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **copy.deepcopy({**TINY[family], **changes}))
    cls, _ = language_model_class(config)
    model = cls._from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    for name, weight in model.named_parameters():
        if not name.startswith(("model.language_model", "lm_head")) and weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)  # so that clips change tokens
    return model


def clip_of(family: str, seed: int) -> Clip:
    """Return the tensors that the processor of a family would make of a clip. The clips of seeds 0 and 3 have the same
    number of tokens."""
    gen = torch.Generator().manual_seed(seed)
    frames = (36, 28, 40)[seed % 3]
    if family == "granite_speech":
        features = torch.randn(1, frames, 8, generator=gen) * 3
        return {"input_features": features, "input_features_mask": torch.ones(1, -(-frames // 15) * 3) > 0}
    if family == "voxtral":
        return {"input_features": torch.randn(2 + seed % 3, 8, FRAMES, generator=gen) * 3}
    padded = FRAMES
    if family.startswith("gemma4"):
        mask = torch.arange(padded)[None] < frames
        features = torch.randn(1, padded, 8, generator=gen) * 3 * mask[..., None]
        return {"input_features": features, "input_features_mask": mask}
    if family.startswith("qwen3"):  # a window of these towers has 100 frames
        frames, padded = 4 * frames, 5 * FRAMES
    mask = (torch.arange(padded) < frames).long()[None]
    return {"input_features": torch.randn(1, 8, padded, generator=gen) * 3 * mask, MASKS[family]: mask}


def tokens_of(family: str, clip: Clip) -> int:
    """Return the number of tokens of a clip, by the rule of the family's processor."""
    if family == "voxtral":
        return len(clip["input_features"]) * FRAMES // 8
    if family == "granite_speech":
        return int(clip["input_features_mask"].sum())
    frames = int(clip[MASKS[family]].sum())
    if family.startswith("gemma4"):
        return frames if family == "gemma4_unified" else -(-frames // 4)
    if family.startswith("qwen3"):  # 13 tokens for 100 frames
        rest = (frames % 100 - 1) // 2 + 1
        return ((rest - 1) // 2 + 1 - 1) // 2 + 1 + frames // 100 * 13
    halved = (frames - 1) // 2 + 1
    return halved // 4 if family == "glmasr" else (halved - 2) // 2 + 1


def prompt_of(family: str, *parts: list[int] | Clip) -> list[int]:
    """Return text, clips and images one after the other, as token ids."""
    prompt: list[int] = []
    for part in parts:
        if not isinstance(part, dict):
            prompt += part
        elif "input_features" in part:
            prompt += [OPEN, *[AUDIO] * tokens_of(family, part), CLOSE]
        else:
            prompt += [BEGIN, *[IMAGE] * (int(part["image_grid_thw"].prod()) // 4), END]
    return prompt


def expected(family: str, model: Any, prompt: list[int], items: list[Clip], new: int) -> list[int]:
    """Return the greedy tokens of a prompt, prompt included, from transformers' own loop. Each kind of `items` is in
    the order of the prompt."""
    ids = torch.tensor([prompt])
    inputs: Clip = {}
    for item in items:
        for name, part in item.items():
            inputs[name] = torch.cat([inputs[name], part]) if name in inputs else part
    with torch.inference_mode():
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
            do_sample=False, pad_token_id=0, **inputs,
        )  # fmt: skip
    tokens: list[int] = found[0].tolist()
    return tokens

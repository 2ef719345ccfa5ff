"""Tiny random vision-language models, images for them, and what `generate()` says of both."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch.nn import functional

transformers.logging.set_verbosity_error()

IMAGE, BEGIN, END = 60, 61, 62
WINDOW = 20

_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_SIGHT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
    "initializer_range": 0.3,
}
_PIXTRAL = {**_SIGHT, "model_type": "pixtral", "head_dim": 8}
_QWEN_TEXT = {
    **_TEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}
_QWEN = {
    "image_token_id": IMAGE,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "video_token_id": 59,
}

_QWEN3_SIGHT = {
    "depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    "initializer_range": 0.3,
}  # fmt: skip

_GLM_SIGHT = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "image_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_GLM = {
    "image_token_id": IMAGE,
    "image_start_token_id": BEGIN,
    "image_end_token_id": END,
    "video_token_id": 59,
}
_GEMMA4_TEXT: dict[str, Any] = {
    **_TEXT, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_GEMMA4_SIGHT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 8, "patch_size": 2, "pooling_kernel_size": 2, "position_embedding_size": 64, "initializer_range": 0.3,
}  # fmt: skip
_GEMMA4 = {
    "image_token_id": IMAGE,
    "video_token_id": 59,
    "audio_token_id": 58,
    "boi_token_id": BEGIN,
    "eoi_token_id": END,
}

TINY: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_SIGHT},
        "image_token_index": IMAGE,
    },
    "qwen2_vl": {
        "text_config": _QWEN_TEXT,
        "vision_config": {
            "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.3,
        },
        **_QWEN,
    },
    "qwen2_5_vl": {
        "text_config": _QWEN_TEXT,
        "vision_config": {
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
            "initializer_range": 0.3,
        },
        **_QWEN,
    },
    "gemma3": {
        "text_config": {
            **_TEXT, "head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "vision_config": {"model_type": "siglip_vision_model", **_SIGHT},
        "mm_tokens_per_image": 16,
        "tie_word_embeddings": False,
        "image_token_index": IMAGE,
        "boi_token_index": BEGIN,
        "eoi_token_index": END,
    },
    "aya_vision": {
        "text_config": {"model_type": "cohere2", **_TEXT, "sliding_window": WINDOW},
        "vision_config": {"model_type": "siglip_vision_model", **_SIGHT},
        "image_token_index": IMAGE,
        "downsample_factor": 2,
        "alignment_intermediate_size": 32,
    },
    "cohere2_vision": {
        "text_config": {"model_type": "cohere2", **_TEXT, "sliding_window": WINDOW},
        "vision_config": {"model_type": "siglip_vision_model", **_SIGHT},
        "image_token_id": IMAGE,
        "downsample_factor": 2,
        "alignment_intermediate_size": 32,
    },
    "glm4v": {
        "text_config": {**_QWEN_TEXT, "head_dim": 8},
        "vision_config": {
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
            "image_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        "image_token_id": IMAGE,
        "image_start_token_id": BEGIN,
        "image_end_token_id": END,
        "video_token_id": 59,
    },
    "glm4v_moe": {
        "text_config": {
            **_QWEN_TEXT, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        },
        "vision_config": {
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
            "image_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        "image_token_id": IMAGE,
        "image_start_token_id": BEGIN,
        "image_end_token_id": END,
        "video_token_id": 59,
    },
    "qwen3_vl": {"text_config": {**_QWEN_TEXT, "head_dim": 8}, "vision_config": _QWEN3_SIGHT, **_QWEN},
    "qwen3_vl_moe": {
        "text_config": {
            **_QWEN_TEXT, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        },
        "vision_config": _QWEN3_SIGHT,
        **_QWEN,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **_TEXT},
        "vision_config": {**_SIGHT, "image_size": [8, 8], "patch_size": [2, 2]},
        "image_token_id": IMAGE,
        "downsample_ratio": 0.5,
    },
    "llama4": {
        "text_config": {
            **_TEXT, "head_dim": 8, "attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48,
        },
        "vision_config": {
            **_SIGHT, "intermediate_size": 64, "vision_output_dim": 24, "projector_input_dim": 24, "projector_output_dim": 24,
            "pixel_shuffle_ratio": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "image_token_index": IMAGE,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 8, "sliding_window": None},
        "vision_config": {**_PIXTRAL, "image_size": 16},
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
    },
    "pixtral": {
        "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 8, "sliding_window": None},
        "vision_config": {**_PIXTRAL, "image_size": 16},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "qwen3_5": {
        "text_config": {
            **_QWEN_TEXT, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        },
        "vision_config": {**_QWEN3_SIGHT, "deepstack_visual_indexes": []},
        **_QWEN,
    },
    "qwen3_5_moe": {
        "text_config": {
            **_QWEN_TEXT, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        },
        "vision_config": {**_QWEN3_SIGHT, "deepstack_visual_indexes": []},
        **_QWEN,
    },
    "gemma4": {
        "text_config": {**_GEMMA4_TEXT, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
        "vision_config": _GEMMA4_SIGHT,
        **_GEMMA4,
    },
    "gemma4 with windows that see both ways": {
        "text_config": {**_GEMMA4_TEXT, "use_bidirectional_attention": "vision"},
        "vision_config": _GEMMA4_SIGHT,
        **_GEMMA4,
    },
    "gemma4_unified": {
        "text_config": _GEMMA4_TEXT,
        "vision_config": {
            "patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 24, "mm_posemb_size": 32, "output_proj_dims": 24,
            "initializer_range": 0.3,
        },
        **_GEMMA4,
    },
    "kimi_k25": {
        "text_config": {
            "model_type": "deepseek_v3", **_TEXT, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        },
        "vision_config": {
            "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 1, "num_attention_heads": 2,
            "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "merge_kernel_size": [2, 2],
            "initializer_range": 0.3,
        },
        "projection_hidden_size": 16,
        **_QWEN,
    },
    "exaone4_5": {
        "text_config": {"model_type": "exaone4", **_TEXT, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "vision_config": {
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_key_value_heads": 1,
            "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
            "fullatt_block_indexes": [1], "initializer_range": 0.3,
        },
        "image_token_id": IMAGE,
        "video_token_id": 59,
    },
    "glm46v": {
        "text_config": {"model_type": "glm4v_text", **_QWEN_TEXT, "head_dim": 8},
        "vision_config": {"model_type": "glm4v_vision", **_GLM_SIGHT},
        **_GLM,
    },
    "glm_ocr": {
        "text_config": {**_QWEN_TEXT, "head_dim": 8},
        "vision_config": {**_GLM_SIGHT, "initializer_range": 0.3},
        **_GLM,
    },
    "vipllava": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_SIGHT},
        "image_token_index": IMAGE,
        "vision_feature_layers": [-2, -1],
    },
}  # fmt: skip
MAIN = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")
"""One of each kind: plain positions, three axes with and without windows in the tower, features for several layers, tokens
that see each other."""

GRIDS = ((1, 4, 6), (1, 8, 4), (1, 4, 4))
SIZES = ((8, 12), (16, 4), (8, 8))


def vision_model(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    kind = "llava" if family == "pixtral" else family.partition(" ")[0]
    # Transformers changes the dicts it is given, and several families share one.
    settings = copy.deepcopy({**TINY[family], **changes})
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    for name, weight in model.named_parameters():
        if "embed_vision" in name and weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.0)  # so that images of Gemma 4 change tokens
        elif weight.dim() > 1 and not weight.any():
            # Gemma's projection begins at zero: every image would be the same.
            torch.nn.init.normal_(weight, std=0.3)
    return model


def image_of(family: str, seed: int) -> dict[str, torch.Tensor]:
    """What the processor of a family would make of an image; for some these have different sizes."""
    gen = torch.Generator().manual_seed(seed)
    if family.startswith("gemma4"):  # pixels of 16 patches, or of 4 that the processor has joined
        high, wide = ((2, 3), (4, 1), (2, 2))[seed % 3]
        merge, pixels = (1, 48) if family == "gemma4_unified" else (2, 12)
        places = torch.cartesian_prod(torch.arange(wide * merge), torch.arange(high * merge))
        padded = functional.pad(places, (0, 0, 0, 6 * merge**2 - len(places)), value=-1)[None]
        return {
            "pixel_values": torch.rand(1, padded.shape[1], pixels, generator=gen),
            "image_position_ids": padded,
        }
    if family == "kimi_k25":
        grid = torch.tensor([GRIDS[seed % len(GRIDS)]])
        return {
            "pixel_values": torch.randn(int(grid.prod()), 3, 4, 4, generator=gen) * 3,
            "image_grid_thw": grid,
        }
    if family.startswith(("qwen", "glm4", "glm_ocr", "exaone")):
        grid = torch.tensor([GRIDS[seed % len(GRIDS)]])
        patches = torch.randn(int(grid.prod()), 3 * 2 * 4 * 4, generator=gen) * 3
        return {"pixel_values": patches, "image_grid_thw": grid}
    if family in ("mistral3", "pixtral"):
        size = SIZES[seed % len(SIZES)]
        return {
            "pixel_values": torch.randn(1, 3, *size, generator=gen) * 3,
            "image_sizes": torch.tensor([size]),
        }
    return {"pixel_values": torch.randn(1, 3, 8, 8, generator=gen) * 3}


def tokens_of(family: str, image: dict[str, torch.Tensor]) -> int:
    if "image_grid_thw" in image:
        return int(image["image_grid_thw"].prod()) // 4
    if "image_position_ids" in image:
        real = int((image["image_position_ids"] >= 0).all(-1).sum())
        return real if family == "gemma4_unified" else real // 4
    patches = image["pixel_values"].shape[2] * image["pixel_values"].shape[3] // 4
    return patches if family in ("llava", "gemma3", "pixtral", "vipllava") else patches // 4


def prompt_of(family: str, *parts: list[int] | dict[str, torch.Tensor]) -> list[int]:
    """Text and images one after the other, as token ids."""
    prompt: list[int] = []
    for part in parts:
        if isinstance(part, dict):
            prompt += [BEGIN, *[IMAGE] * tokens_of(family, part), END]
        else:
            prompt += part
    return prompt


def words(seed: int, count: int) -> list[int]:
    gen = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, 58, (count,), generator=gen).tolist()


def expected(
    family: str, model: Any, prompt: list[int], images: list[dict[str, torch.Tensor]], new: int
) -> list[int]:
    """Greedy tokens of a prompt by itself, prompt included, from transformers' own loop."""
    ids = torch.tensor([prompt])
    inputs = inputs_of(family, ids, images)
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            pad_token_id=0, **inputs,
        )  # fmt: skip
    tokens: list[int] = found[0].tolist()
    return tokens


def inputs_of(
    family: str, ids: torch.Tensor, images: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """What a model takes beside its token ids, where those have images."""
    inputs: dict[str, torch.Tensor] = {}
    if images:
        inputs = _together(images)
        if family == "gemma3":
            inputs["token_type_ids"] = (ids == IMAGE).int()
        elif family.startswith(("qwen", "glm", "gemma4")):
            inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return inputs


def _together(images: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Images in one batch; where they say their sizes, padded to the largest."""
    if "image_sizes" in images[0]:
        high, wide = torch.cat([image["image_sizes"] for image in images]).amax(0).tolist()
        images = [
            {
                **image,
                "pixel_values": functional.pad(
                    pixels, (0, wide - pixels.shape[3], 0, high - pixels.shape[2])
                ),
            }
            for image in images
            for pixels in [image["pixel_values"]]
        ]
    return {name: torch.cat([image[name] for image in images]) for name in images[0]}

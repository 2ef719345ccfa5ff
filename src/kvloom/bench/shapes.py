"""The models of `kvloom bench engine`: real and tiny shapes with random weights, and the embedded Llama with its
trained weights.

Most real shapes use a config that is part of the package. The other shapes have their configs in this file.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from kvloom.models.loading import load, transformers_config

__all__ = ["SHAPES", "Shape", "build", "hf_config"]

TINY = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """A model shape. If `config` is empty, the package's config with the name of the shape is used.

    `small` shapes run on a CPU in float32, with scaled workloads. `embedded` is the name of an embedded model.
    """

    what: str
    config: dict[str, Any] = field(default_factory=dict)
    small: bool = False
    embedded: str = ""

    @property
    def folder(self) -> str:
        return str(Path(str(resources.files("kvloom.models"))) / "embedded" / self.embedded)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.small else torch.bfloat16

    @property
    def scale(self) -> float:
        return 1 / 16 if self.small else 1.0


SHAPES: dict[str, Shape] = {
    "llama-3.1-8b": Shape("Llama-3.1-8B"),
    "llama-3.2-1b": Shape("Llama-3.2-1B"),
    "gemma-3-12b": Shape("the text model of Gemma-3-12B: 40 layers of window 1024, 8 full"),
    "qwen3-30b-a3b": Shape("Qwen3-30B-A3B: 8 of 128 experts"),
    "qwen3-next-24l": Shape(
        "Qwen3-Next with 24 of 48 layers and 128 of 512 experts: 3 recurrent layers to 1 full",
        {
            "model_type": "qwen3_next",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
    ),
    "bamba-9b": Shape("Bamba-9B: 29 Mamba-2 layers, 3 full"),
    "falcon-h1-7b": Shape("Falcon-H1-7B: attention and Mamba-2 side by side in each layer"),
    "deepseek-v2-lite": Shape(
        "DeepSeek-V2-Lite: MLA, 6 of 64 experts",
        {
            "model_type": "deepseek_v2",
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek-v3-4l": Shape(
        "DeepSeek-V3 with 4 of 61 layers and 32 of 256 experts: MLA with 128 heads",
        {
            "model_type": "deepseek_v3",
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 4,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 32,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
    ),
    "kvloom-llama": Shape("the embedded Llama of 8 million parameters", small=True, embedded="llama"),
    "tiny": Shape(
        "a Llama of 5 million parameters", {"model_type": "llama", "num_hidden_layers": 4, **TINY}, small=True
    ),
    "tiny-sliding": Shape(
        "a Gemma-3 of 6 million parameters: 5 layers of window 64 to 1 full",
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "sliding_window": 64,
            "query_pre_attn_scalar": 64,
            **TINY,
        },
        small=True,
    ),
    "tiny-hybrid": Shape(
        "a Qwen3-Next of 5 million parameters: 3 recurrent layers to 1 full, no experts",
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 4,
            "mlp_only_layers": [0, 1, 2, 3],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            **TINY,
        },
        small=True,
    ),
}


def hf_config(name: str) -> Any:
    """Return the transformers config of a shape, without an end-of-text token."""
    from transformers import AutoConfig

    if name not in SHAPES:
        raise ValueError(f"shape {name!r} is not known; known: {', '.join(SHAPES)}")
    given = dict(SHAPES[name].config)
    if SHAPES[name].embedded:
        config = AutoConfig.from_pretrained(SHAPES[name].folder)
    elif given:
        config = AutoConfig.for_model(given.pop("model_type"), **given)
    else:
        config = transformers_config(name, "random").get_text_config()
    config.eos_token_id = config.bos_token_id = None
    config.pad_token_id = 0
    return config


def build(config: Any, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Any:
    """Build a model on the device. It has the weights in the config's folder if there are any, and random weights
    otherwise.

    The same seed gives the same weights on the same device. On "meta" there are no weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if torch.device(device).type == "meta":
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if (Path(config.name_or_path) / "model.safetensors").is_file():
        loaded = load(config.name_or_path, dtype, device)[0]
        loaded.config.eos_token_id = loaded.generation_config.eos_token_id = None
        return loaded
    with tempfile.TemporaryDirectory(prefix="kvloom-shape-") as folder:
        config.save_pretrained(folder)
        return load(folder, dtype, device, "random", seed=seed)[0]

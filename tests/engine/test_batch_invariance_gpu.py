"""Batch invariance on a GPU, in bfloat16: the same bits alone, among 64, and in chunks; with CUDA graphs and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kvloom.engine import SamplingParams
from tests.engines import make_engine

from .invariance import apart, interrupted, prompts_of, together

SHAPE: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192, "initializer_range": 0.1,
}  # fmt: skip
SLIDING = {
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": SLIDING,
    "gpt_oss": {**SLIDING, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
}
MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "shared_expert_intermediate_size": 256,
}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 16},
    "falcon_mamba": {"state_size": 16},
    "jamba": {
        "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16, "num_experts": 4,
    },
    "mamba2": {"num_heads": 16, "state_size": 128, "n_groups": 2},
    "bamba": {"attn_layer_indices": [1], **MAMBA2},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 1024},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba", "mamba"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 512, **MAMBA2,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*", "mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 2,
    },
    "qwen3_next": {**EXPERTS, **DELTA},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA,
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_heads": 8, "linear_head_dim": 64,
        "q_lora_rank": None, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "n_group": 1, "topk_group": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax": {"num_local_experts": 4},
}  # fmt: skip


def made(family: str, **more: Any) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers knows no {family}")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, **{**SHAPE, **{**FAMILIES, **RECURRENT}[family], **more}, eos_token_id=None, pad_token_id=0
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def params_of(count: int) -> list[SamplingParams]:
    ways = (
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "min_p": 0.02},
    )
    return [SamplingParams(max_tokens=32, seed=i, logprobs=3, **ways[i % 4]) for i in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_tokens_and_logprobs_are_bit_equal_alone_in_a_batch_and_in_chunks(
    family: str, kv_dtype: str | None
) -> None:
    model = made(family)
    prompts = prompts_of(64, SHAPE["vocab_size"], 1500)
    params = params_of(len(prompts))
    options: dict[str, Any] = {"pool_bytes": 1 << 30, "kv_dtype": kv_dtype, "batch_invariant": True}
    alone = apart(make_engine(model, max_running=64, **options), prompts, params)
    assert together(make_engine(model, max_running=64, **options), prompts, params) == alone
    assert together(make_engine(model, max_running=64, token_budget=100, **options), prompts, params) == alone
    if family == "llama":
        few = slice(0, 12)
        assert (
            apart(make_engine(model, cuda_graphs=False, **options), prompts[few], params[few]) == alone[few]
        )
        small = make_engine(
            model, **{**options, "pool_bytes": 6 << 20}, max_running=64
        )  # many give their pages up
        assert together(small, prompts, params) == alone


@pytest.mark.parametrize("family", ["llama", "mamba2", "qwen3_5_text"])
def test_invariant_results_are_close_to_normal_ones(family: str) -> None:
    model = made(family)
    prompts = prompts_of(8, SHAPE["vocab_size"], 300)
    params = [SamplingParams(max_tokens=1, temperature=0, logprobs=5)] * len(prompts)
    ours = apart(make_engine(model, 1 << 28, batch_invariant=True), prompts, params)
    theirs = apart(make_engine(model, 1 << 28), prompts, params)
    for one, other in zip(ours, theirs, strict=True):
        assert abs(one[0][1][0] - other[0][1][0]) < 0.1


@pytest.mark.parametrize("family", RECURRENT)
def test_states_are_bit_equal_alone_in_a_batch_in_chunks_and_resumed(family: str) -> None:
    model = made(family)
    prompts = prompts_of(20, SHAPE["vocab_size"], 700)
    params = params_of(len(prompts))
    options: dict[str, Any] = {"pool_bytes": 1 << 30, "batch_invariant": True, "max_running": 20}
    alone = apart(make_engine(model, **options), prompts, params)
    assert together(make_engine(model, **options), prompts, params) == alone
    assert together(make_engine(model, token_budget=100, **options), prompts, params) == alone
    few = slice(0, 4)
    assert apart(make_engine(model, cuda_graphs=False, **options), prompts[few], params[few]) == alone[few]
    assert interrupted(make_engine(model, **options), prompts, params) == alone

"""Batch-invariance on a GPU, in bfloat16: the same bits alone, among 64, and by chunks; with CUDA graphs and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kvloom.engine.engine import Engine
from kvloom.engine.request import SamplingParams

from .invariance import apart, prompts_of, together

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


def made(family: str, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, **{**SHAPE, **FAMILIES[family], **more}, eos_token_id=None, pad_token_id=0
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
def test_tokens_and_logprobs_are_the_same_bits_alone_among_64_and_by_chunks(
    family: str, kv_dtype: str | None
) -> None:
    model = made(family)
    prompts = prompts_of(64, SHAPE["vocab_size"], 1500)
    params = params_of(len(prompts))
    options: dict[str, Any] = {"pool_bytes": 1 << 30, "kv_dtype": kv_dtype, "batch_invariant": True}
    alone = apart(Engine(model, max_running=64, **options), prompts, params)
    assert together(Engine(model, max_running=64, **options), prompts, params) == alone
    assert together(Engine(model, max_running=64, token_budget=100, **options), prompts, params) == alone
    if family == "llama":
        few = slice(0, 12)
        assert apart(Engine(model, graphs=False, **options), prompts[few], params[few]) == alone[few]
        small = Engine(
            model, **{**options, "pool_bytes": 6 << 20}, max_running=64
        )  # many give their pages up
        assert together(small, prompts, params) == alone


def test_what_it_gives_is_close_to_what_is_computed_without() -> None:
    model = made("llama")
    prompts = prompts_of(8, SHAPE["vocab_size"], 300)
    params = [SamplingParams(max_tokens=1, temperature=0, logprobs=5)] * len(prompts)
    ours = apart(Engine(model, 1 << 28, batch_invariant=True), prompts, params)
    theirs = apart(Engine(model, 1 << 28), prompts, params)
    for one, other in zip(ours, theirs, strict=True):
        assert abs(one[0][1][0] - other[0][1][0]) < 0.1


def test_recurrent_models_are_refused() -> None:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        hidden_size=64,
        num_hidden_layers=2,
        vocab_size=64,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=1,
    )
    with pytest.raises(ValueError, match="keeps recurrent states"):
        Engine(Mamba2ForCausalLM(config).to("cuda", torch.bfloat16), 1 << 24, batch_invariant=True)

"""MLA prompts with expanded keys and values on a GPU, in chunks and after hits."""

from __future__ import annotations

import copy

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

import transformers

from kvloom.engine import SamplingParams
from kvloom.models.paged import latents
from tests.engines import make_engine
from tests.models.test_zoo_gpu import WIDE, _within_rounding
from tests.models.zoo import config_of, prompts_of

DIMS = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
}


@pytest.mark.parametrize("pieces", [512, 16384])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_expanded_prompts(family: str, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = config_of(family, **{**WIDE, **DIMS, "max_position_embeddings": 4096})
    own = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().cuda()
    own.set_attn_implementation("eager")
    engine = make_engine(copy.deepcopy(own), 1 << 28, token_budget=700, max_running=8)
    engine.runner.pages.expanded_tokens = pieces
    engine.prepare()
    calls = []
    attend = latents.ExpandedPlan.attend
    monkeypatch.setattr(
        latents.ExpandedPlan,
        "attend",
        lambda plan, *rest: calls.append(len(plan._parts)) or attend(plan, *rest),
    )
    params = SamplingParams(max_tokens=10, temperature=0)
    prompts = prompts_of(1, (5, 300, 1500, 640, 70, 128))
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    again = [
        engine.add([*request.tokens, *prompt[:290]], params)
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    engine.run()
    assert max(calls) > (pieces < 1500)
    assert all(request.cached_tokens for request in again[1:])
    _within_rounding(own, requests)
    _within_rounding(own, again)
    engine.cache.check()

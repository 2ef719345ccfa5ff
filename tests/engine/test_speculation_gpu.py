"""Speculation on a GPU: steps that run ahead, CUDA graphs, Triton kernels, a draft model in the same pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

import transformers

from kvloom.engine import Engine, SamplingParams
from tests.engine.test_speculation import Oracle, fixed
from tests.engines import make_engine
from tests.models.zoo import config_of, prompts_of

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.05}
SIZES = (5, 17, 29, 8, 40, 3, 21, 33)
FAMILIES = ["llama", "gemma3_text", "deepseek_v3", "mamba", "mamba2", "bamba", "qwen3_next"]


def made(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = config_of(family, **changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().cuda()


def ran(engine: Engine, prompts: list[list[int]], **params: Any) -> list[Any]:
    asked = [SamplingParams(max_tokens=40, seed=i, **params) for i in range(len(prompts))]
    requests = [engine.add(prompt, one) for prompt, one in zip(prompts, asked, strict=True)]
    engine.run()
    engine.cache.check()
    return requests


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without_speculation(family: str, temperature: float) -> None:
    """In float32, so that rows of several tokens and single ones differ by rounding only."""
    model, prompts = made(family), prompts_of(1, SIZES)
    plain = make_engine(model, 1 << 26, max_running=16)
    wanted = ran(plain, prompts, temperature=temperature)
    engine = fixed(make_engine(model, 1 << 26, max_running=16, speculate="ngram", draft_tokens=5))
    assert engine.speculation is not None
    engine.speculation.proposers = [Oracle({one.prompt: one.tokens for one in wanted}, 0.8)]
    found = ran(engine, prompts, temperature=temperature)
    same = sum(one.tokens == other.tokens for one, other in zip(found, wanted, strict=True))
    assert same >= len(prompts) - 1  # a tie may be decided by rounding
    assert sum(one.accepted_tokens for one in found) > 60


def test_a_draft_model_equal_to_the_target_is_accepted(tmp_path: Path) -> None:
    model = made("llama", **WIDE)
    model.save_pretrained(tmp_path)
    engine = fixed(make_engine(model, 1 << 26, speculate=f"draft={tmp_path}", max_running=16))
    engine.prepare()
    found = ran(engine, prompts_of(1, SIZES), temperature=0)
    assert sum(one.accepted_tokens for one in found) > 0.95 * sum(one.draft_tokens for one in found)


def test_the_controller_lets_steps_run_ahead_while_it_is_off() -> None:
    model = made("llama", torch.bfloat16, **WIDE)
    engine = make_engine(model, 1 << 26, speculate="suffix", max_running=64)
    assert engine.ahead
    found = ran(engine, prompts_of(1, SIZES * 4), temperature=1.0)
    assert all(one.finish_reason == "length" for one in found)
    assert engine.speculation is not None
    assert engine.speculation.controller is not None
    assert engine.speculation.controller.reasons

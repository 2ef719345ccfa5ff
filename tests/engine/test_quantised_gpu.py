"""Quantised pages with dynamic and static scales, and pools that find their size, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

import transformers

from kvloom.engine import Engine, SamplingParams, calibrate
from tests.engines import make_engine
from tests.models.zoo import config_of, prompts_of

GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=3)
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.05}


def made(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = config_of(family, **changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().cuda()


def ran(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    requests = [engine.add(prompt, GREEDY) for prompt in prompts]
    engine.run()
    engine.cache.check()
    return requests


@pytest.mark.parametrize("scales", ["dynamic", "static"])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_8_bit_pages_match_16_bit_within_rounding(
    family: str, dtype: str, scales: str, tmp_path: Path
) -> None:
    model, prompts = made(family, **WIDE), prompts_of(1, (5, 17, 29, 40))
    plain = ran(make_engine(model, 1 << 26), prompts)
    kv_scales = scales
    if scales == "static":
        kv_scales = str(tmp_path / "scales.safetensors")
        calibrate(model, prompts, dtype=dtype).save(kv_scales)
    engine = make_engine(model, 1 << 26, kv_dtype=dtype, kv_scales=kv_scales, token_budget=24)
    sizes = [x.layout.bytes_per_token() for x in (engine, make_engine(model, 1 << 26, kv_dtype=dtype))]
    assert (sizes[0] < sizes[1]) == (scales == "static")
    short = ran(engine, prompts)
    for one, other in zip(plain, short, strict=True):
        first = next(iter(one.logprobs[0].values())).logprob
        assert other.logprobs[0][one.output[0]].logprob == pytest.approx(first, abs=0.15)
    again = ran(engine, prompts)
    assert [request.cached_tokens for request in again] == [len(prompt) - 1 for prompt in prompts]
    # What was found is what was written, so that only the order of sums differs.
    for one, other in zip(short, again, strict=True):
        first = next(iter(one.logprobs[0].values())).logprob
        assert other.logprobs[0][one.output[0]].logprob == pytest.approx(first, abs=0.05)


@pytest.mark.alone
def test_pool_is_measured_for_a_model_with_position_tables() -> None:
    model = made("gpt2", n_embd=256, n_head=4, n_inner=256)
    engine = make_engine(model, memory_fraction=0.5, max_running=16)
    assert engine.memory_budget is not None
    assert engine.memory_budget.pool > 0
    assert engine.limit == 128  # a trial must not run past the table
    engine.prepare()
    for request in ran(engine, prompts_of(1, (5, 100))):
        assert request.finish_reason == "length"

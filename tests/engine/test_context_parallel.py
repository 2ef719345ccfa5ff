"""Context parallelism: ranks that divide the context generate the tokens of one rank, which are those of Hugging Face."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvloom.engine import LLM, Engine, EngineConfig, SamplingParams
from kvloom.models.sharding import RankError
from kvloom.models.specs import ModelError
from tests.engine.test_tensor_parallel import GREEDY, POOL, generate, made
from tests.engine.thread_ranks import context_engine
from tests.engines import make_engine
from tests.models.zoo import expected, prompts_of, tiny

FAMILIES = (
    *("llama", "gemma3_text", "qwen3_next", "bamba", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text"),
    *("gemma2", "qwen2 with windows", "cohere2", "qwen3_moe", "jamba", "falcon_h1", "nemotron_h", "mamba2"),
)


@contextmanager
def ranks(model: Any, count: int, pool_bytes: int = POOL, **settings: Any) -> Iterator[Engine]:
    engine = context_engine(model, count, pool_bytes=pool_bytes, **settings)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_generate_the_tokens_of_hugging_face(family: str) -> None:
    model, prompts = made(family), prompts_of(3, (40, 33, 7))
    wanted = expected(model, prompts)
    with ranks(model, 2, token_budget=16) as engine:
        assert generate(engine, prompts) == wanted

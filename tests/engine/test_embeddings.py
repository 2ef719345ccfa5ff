"""Embeddings of prompts against Hugging Face's hidden states: chunks, batches, the cache, preemption."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvloom.core import CacheControl
from kvloom.engine import LLM, SamplingParams
from tests.engines import make_engine
from tests.models.zoo import tiny

FAMILIES = ("llama", "gemma3_text", "mamba2", "qwen3_next", "opt", "llama4_text")
POOLINGS = ("mean", "last")


def reference(model: Any, prompt: list[int], pooling: str) -> Any:
    """Return the embedding by Hugging Face's own forward pass."""
    with torch.inference_mode():
        states = _decoder(model)(torch.tensor([prompt])).last_hidden_state[0].float()
    pooled = states[-1] if pooling == "last" else states.mean(0)
    return np.asarray(torch.nn.functional.normalize(pooled, dim=0))


def _decoder(model: Any) -> Any:
    return model.model if model.get_decoder() is model else model.get_decoder()


def prompts_of(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 60, size).tolist() for size in (1, 5, 17, 33, 70, 48)[:count]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(2)
def test_embeddings_equal_hugging_faces_hidden_states(family: str) -> None:
    prompts, model = prompts_of(6), tiny(family)
    wanted = {pooling: np.stack([reference(model, one, pooling) for one in prompts]) for pooling in POOLINGS}
    llm = LLM(model, pool_bytes=8 << 20, token_budget=24)  # chunks, several prompts in a step
    for _ in range(2):  # the second time, pages are cached
        for pooling in POOLINGS:
            found = llm.embed(prompts, pooling=pooling)  # type: ignore[arg-type]
            assert found.dtype == np.float32
            np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
            np.testing.assert_allclose(found, wanted[pooling], atol=2e-5)
    llm.close()


def test_a_mean_reads_no_cache_but_stores_and_the_last_state_reads_it() -> None:
    model, prompt = tiny("llama"), prompts_of(5)[4]
    engine = make_engine(model, 1 << 22)
    for pooling, cached in (("mean", 0), ("mean", 0), ("last", len(prompt) - 1)):
        params = SamplingParams(max_tokens=1, temperature=0, pooling=pooling)  # type: ignore[arg-type]
        request = engine.add(prompt, params, CacheControl(tenant="a"))
        engine.run()
        assert request.cached_tokens == cached
    plain = engine.add(prompt, SamplingParams(max_tokens=4, temperature=0), CacheControl(tenant="a"))
    engine.run()
    assert plain.cached_tokens == len(prompt) - 1
    assert plain.embedding is None


@pytest.mark.parametrize("ahead", [False, True])
def test_embeddings_beside_generation_start_again_after_a_failed_step(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = tiny("llama"), prompts_of(6)
    wanted = [reference(model, one, "mean") for one in prompts]
    engine = make_engine(model, 1 << 22, token_budget=16, ahead=ahead)
    running = [engine.add(one, SamplingParams(max_tokens=9, temperature=0)) for one in prompts]
    mean = SamplingParams(max_tokens=1, temperature=0, pooling="mean")
    embedded = [engine.add(one, mean) for one in prompts]
    run = engine.runner.run
    while not any(request.hidden_sum is not None for request in embedded):
        engine.step()

    def fail(*given: Any) -> torch.Tensor:
        run(*given)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
    engine.run()
    assert sum(request.preemptions for request in embedded)
    assert all(request.finish_reason in ("length", "stop") for request in (*running, *embedded))
    for request, one in zip(embedded, wanted, strict=True):
        assert request.embedding is not None
        np.testing.assert_allclose(request.embedding, one, atol=2e-5)
    engine.cache.check()


def test_pooling_that_cannot_work_is_refused() -> None:
    engine = make_engine(tiny("llama"), 1 << 22)
    engine.runner.decoder = None
    with pytest.raises(ValueError, match="LlamaForCausalLM has no separate decoder"):
        engine.add([3, 4], SamplingParams(max_tokens=1, pooling="mean"))
    for options in (
        {"max_tokens": 2},
        {"max_tokens": 1, "n": 2, "temperature": 1.0},
        {"max_tokens": 1, "regex": "a"},
    ):
        with pytest.raises(ValueError, match="pooling needs max_tokens 1 and one sample"):
            SamplingParams(pooling="mean", **{"temperature": 0.0, **options})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pooling 'cls' must be mean or last"):
        SamplingParams(max_tokens=1, pooling="cls")  # type: ignore[arg-type]

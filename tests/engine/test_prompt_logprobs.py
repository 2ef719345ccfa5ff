"""Log-probabilities of prompts equal those of Hugging Face's logits, whatever was cached, chunked or preempted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvloom.engine import LLM, Request, SamplingParams
from kvloom.engine.scheduling import scheduler
from tests.engines import make_engine
from tests.models.zoo import prompts_of, tiny


def wanted(model: Any, prompt: list[int]) -> torch.Tensor:
    """Return the log-probabilities of each prompt token but the first, over the whole vocabulary."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)


def check(request: Request, exact: torch.Tensor, count: int) -> None:
    told = request.prompt_logprobs
    assert len(told) == len(request.prompt)
    assert told[0] is None
    for token, row, one in zip(request.prompt[1:], exact, told[1:], strict=True):
        assert one is not None
        assert one[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert one[token].rank == int((row > row[token]).sum()) + 1
        top = row.topk(count)
        assert set(one) == {token, *top.indices.tolist()}
        for value, place in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            assert one[place].logprob == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba"])
@pytest.mark.parametrize("ahead", [False, True])
def test_prompt_logprobs_match_the_logits_for_any_chunks(family: str, ahead: bool) -> None:
    model, prompts = tiny(family), [*prompts_of(3, (40, 1, 2, 33))]
    prompts[3] = prompts[0][:20] + prompts[3][20:]
    exact = [wanted(model, prompt) for prompt in prompts]
    engine = make_engine(model, 8 << 20, token_budget=9, ahead=ahead)
    engine.add(prompts[0], SamplingParams(max_tokens=5, temperature=0))
    engine.run()  # what it left in the cache must hide nothing
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=2)
    requests = [engine.add(prompt, params) for prompt in prompts]
    plain = [engine.add(prompt, SamplingParams(max_tokens=4, temperature=0)) for prompt in prompts]
    engine.run()
    for request, rows, other in zip(requests, exact, plain, strict=True):
        if len(request.prompt) > 1:
            check(request, rows, 2)
        assert request.cached_tokens == 0
        assert request.output == other.output
        assert not other.prompt_logprobs
    again = engine.add(prompts[0], SamplingParams(max_tokens=1, temperature=0))
    engine.run()
    assert again.cached_tokens  # they add to the cache as others do


def test_preempted_request_returns_prompt_logprobs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_PROMPT_LOGPROBS", 7)
    model, prompts = tiny("llama"), prompts_of(5, (50, 60, 70, 45))
    exact = [wanted(model, prompt) for prompt in prompts]
    engine = make_engine(model, 96 << 10, token_budget=16)
    engine.scheduler.admission = None  # admit every request for which pages are free, so that pages run out
    params = SamplingParams(max_tokens=20, temperature=0, prompt_logprobs=0)
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    assert sum(request.preemptions for request in requests) > 0
    for request, rows in zip(requests, exact, strict=True):
        check(request, rows, 0)


def test_samples_share_prompt_logprobs() -> None:
    model, prompt = tiny("llama"), prompts_of(7)[1]
    llm = LLM(model, pool_bytes=8 << 20)
    params = SamplingParams(max_tokens=3, temperature=0.8, seed=1, n=3, prompt_logprobs=1)
    found, other = llm.generate([prompt, prompt], [params, SamplingParams(max_tokens=3)])
    assert found.prompt_logprobs is not None
    assert other.prompt_logprobs is None
    assert [one is None for one in found.prompt_logprobs] == [True] + [False] * (len(prompt) - 1)
    assert len(found.outputs) == 3
    alone = llm.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
    assert alone.prompt_logprobs == [None]


def test_prompt_logprobs_have_a_limit() -> None:
    with pytest.raises(ValueError, match="prompt_logprobs 2000 must be from 0 to 1024"):
        SamplingParams(prompt_logprobs=2000)

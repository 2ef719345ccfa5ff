"""Several answers to one prompt: forks sample the same tokens as separate requests, with any pool and batch."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvloom.core import CacheControl
from kvloom.engine import Engine, Request, SamplingParams
from tests.engines import make_engine
from tests.models.zoo import tiny

from .made_tokenizers import words

FAMILIES = ["llama", "gemma3_text", "qwen3_next", "bamba"]
DRAWN = SamplingParams(max_tokens=10, temperature=1.0, seed=5, n=4)
POOL = 1 << 24


def alone(model: Any, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """Return each answer computed by a separate request with its seed, alone and with an empty cache."""
    found, engine = [], make_engine(model, POOL)
    for i in range(params.samples):
        assert params.seed is not None
        single = replace(params, n=1, best_of=None, seed=params.seed + i)
        one = engine.add(prompt, single, CacheControl(read=False, store=False))
        engine.run()
        found.append(one.output)
    return found


def idle(engine: Engine) -> bool:
    """Return whether no request runs and no page is in use."""
    engine.cache.take_copies()
    engine.cache.check()
    return not engine.busy and engine.cache.stats()["in_use_pages"] == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(1)
def test_samples_match_separate_requests(family: str, ahead: bool) -> None:
    model = tiny(family)
    model.set_attn_implementation("eager")
    prompts = [list(range(3, 3 + size)) for size in (21, 5, 37)]
    wanted = [alone(model, prompt, DRAWN) for prompt in prompts]
    assert len({tuple(one) for one in wanted[0]}) > 1
    engine = make_engine(model, POOL, token_budget=16, ahead=ahead)
    requests = [engine.add(prompt, DRAWN) for prompt in prompts]
    engine.run()
    assert [[one.output for one in request.family] for request in requests] == wanted
    assert {one.finish_reason for request in requests for one in request.family} == {"length"}
    assert idle(engine)
    again = engine.add(prompts[2], DRAWN)  # now it finds its prompt
    engine.run()
    assert again.cached_tokens
    assert [one.output for one in again.family] == wanted[2]


def test_samples_share_one_prompt_computation() -> None:
    engine = make_engine(tiny("llama"), POOL, token_budget=8)
    computed = 0
    launched = engine.scheduler.step_launched

    def count(work: Any) -> None:
        nonlocal computed
        computed += sum(len(part.tokens) for _, part in work)
        launched(work)

    engine.scheduler.step_launched = count  # type: ignore[method-assign]
    engine.add(range(3, 40), DRAWN)
    engine.run()
    assert computed == 37 + 4 * 9


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("family", "slabs"), [("llama", 0), ("gemma3_text", 0), ("qwen3_next", 4), ("bamba", 8)]
)
@pytest.mark.few(1)
def test_forks_in_a_small_pool_survive_preemption(family: str, slabs: int, ahead: bool) -> None:
    rng = random.Random(family)
    model = tiny(family)
    model.set_attn_implementation("eager")
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(4, 34))] for _ in range(6)]
    wanted = [alone(model, prompt, DRAWN) for prompt in prompts]
    layout = make_engine(model, POOL).layout
    room = slabs * layout.slab_bytes or 3 * layout.slab_bytes_for(max(map(len, prompts)) + 10)
    engine = make_engine(model, room, token_budget=24, max_running=6, ahead=ahead)
    engine.scheduler.admission = None  # admit every request for which pages are free, so that pages run out
    requests = [engine.add(prompt, DRAWN, priority=i % 2) for i, prompt in enumerate(prompts)]
    cancelled: Request | None = None
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        if steps == 12:
            cancelled = next(request for request in requests if request.finish_reason is None)
            engine.cancel(cancelled)
        engine.cache.check()
        assert steps < 3000
    for request, tokens in zip(requests, wanted, strict=True):
        for one, mine in zip(request.family, tokens, strict=True):
            assert one.output == mine[: len(one.output)]
            assert one.finish_reason == "length" or request is cancelled
            assert one.finish_reason is not None
    assert sum(one.preemptions for request in requests for one in request.family)
    assert idle(engine)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"seed": 3, "n": 3},
    {"seed": 5, "n": 2, "best_of": 4, "top_k": 8},
    {"temperature": 0, "beam_width": 3, "n": 2},
    {"seed": 7, "n": 2, "frequency_penalty": 1.0},
    {"seed": 9, "n": 2, "stop": ["w17", "w3 w4"]},
]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba"])
@pytest.mark.few(1)
def test_mixed_requests_match_their_results_alone(family: str, ahead: bool) -> None:
    rng = random.Random(family)
    model = tiny(family)
    calm = make_engine(model, POOL, tokenizer=words())
    asked = []
    for i in range(12):
        prompt = [rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))]
        asked.append((prompt, SamplingParams(max_tokens=rng.randrange(1, 10), **KINDS[i % len(KINDS)])))
    wanted = []
    for prompt, params in asked:
        one = calm.add(prompt, params, CacheControl(read=False, store=False))
        calm.run()
        wanted.append([(answer.output, answer.finish_reason) for answer in one.returned_samples])
    room = {"llama": 6, "gemma3_text": 5, "bamba": 4}[family] * calm.layout.slab_bytes
    engine = make_engine(model, room, token_budget=16, max_running=5, ahead=ahead, tokenizer=words())
    engine.scheduler.admission = None  # admit every request for which pages are free, so that pages run out
    requests = [engine.add(prompt, params, priority=i % 2) for i, (prompt, params) in enumerate(asked)]
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert [
        [(answer.output, answer.finish_reason) for answer in one.returned_samples] for one in requests
    ] == wanted
    assert sum(one.preemptions for request in requests for one in request.family)
    assert idle(engine)


def test_more_samples_than_max_running() -> None:
    model = tiny("llama")
    params = replace(DRAWN, n=9)
    wanted = alone(model, [5, 6, 7, 8], params)
    engine = make_engine(model, POOL, max_running=3, ahead=True)
    request = engine.add([5, 6, 7, 8], params)
    engine.run()
    assert [one.output for one in request.family] == wanted
    assert idle(engine)


def test_best_of_returns_the_most_likely_samples() -> None:
    engine = make_engine(tiny("llama"), POOL)
    request = engine.add(range(3, 20), SamplingParams(max_tokens=6, seed=3, n=2, best_of=6))
    engine.run()
    assert len(request.family) == 6
    totals = sorted((one.cumulative_logprob for one in request.family), reverse=True)
    assert [one.cumulative_logprob for one in request.returned_samples] == totals[:2]
    assert totals[0] > totals[-1]


def test_penalties_and_seeds_do_not_depend_on_ahead_or_batch() -> None:
    """Requests that need their last token, in a batch with others that do not."""
    model = tiny("llama")
    kinds = [
        SamplingParams(max_tokens=12, temperature=0, frequency_penalty=1.5),
        SamplingParams(max_tokens=12, temperature=0.8, seed=4, repetition_penalty=1.3, top_k=20),
        SamplingParams(max_tokens=12, temperature=1.2, seed=9, top_p=0.8),
        SamplingParams(max_tokens=12, temperature=0, min_tokens=5, logit_bias={7: -100}),
    ]
    wanted = []
    for params in kinds:
        engine = make_engine(model, POOL, ahead=False)
        one = engine.add([9, 8, 7], params)
        engine.run()
        wanted.append(one.output)
    assert len(set(wanted[0])) > 4  # it may not repeat itself
    engine = make_engine(model, POOL, token_budget=4, ahead=True)
    requests = [engine.add([9, 8, 7], params) for params in kinds * 2]
    engine.run()
    assert [request.output for request in requests] == wanted * 2


def test_cancel_finishes_all_samples_at_any_time() -> None:
    for steps in range(5):
        engine = make_engine(tiny("llama"), POOL, token_budget=8, ahead=True)
        request = engine.add(range(3, 20), DRAWN)
        for _ in range(steps):
            engine.step()
        engine.cancel(request)
        assert {one.finish_reason for one in request.family} == {"cancelled"}
        engine.run()
        assert idle(engine)


def test_logprobs_match_the_model() -> None:
    model = tiny("llama")
    engine = make_engine(model, POOL, ahead=True)
    request = engine.add([5, 6, 7, 8], replace(DRAWN, n=2, logprobs=3))
    engine.run()
    for one in request.family:
        reference = tiny("llama")
        reference.set_attn_implementation("eager")
        with torch.inference_mode():
            logits = reference(torch.tensor([one.tokens])).logits[0].log_softmax(-1)
        total = 0.0
        for i, (token, told) in enumerate(zip(one.output, one.logprobs, strict=True)):
            row = logits[len(one.prompt) - 1 + i]
            assert told[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert set(row.topk(3).indices.tolist()) <= set(told)
            total += float(row[token])
        assert one.cumulative_logprob == pytest.approx(total, abs=1e-3)

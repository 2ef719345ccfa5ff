"""Two hundred requests of random lengths in a pool far too small, cancelled and preempted at random: every token that comes
out is generate()'s, and no page is lost."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from kvloom.engine import Request, SamplingParams
from tests.engines import make_engine

from .zoo import expected, tiny

REQUESTS = 200
LONGEST = 60


@cache
def asked(family: str) -> tuple[Any, list[list[int]], list[int], list[list[int]]]:
    """A model, prompts, how many tokens each wants, and what generate() says."""
    rng = random.Random(family)
    model = tiny(family)
    stems = [[rng.randrange(3, 64) for _ in range(32)] for _ in range(4)]
    prompts = []
    for _ in range(REQUESTS):
        own = [rng.randrange(3, 64) for _ in range(rng.randrange(1, 28))]
        prompts.append(rng.choice(stems)[: rng.choice((0, 0, 16, 23, 32))] + own)
    news = [rng.randrange(1, 13) for _ in prompts]
    model.set_attn_implementation("eager")
    wanted = [expected(model, [prompt], new)[0] for prompt, new in zip(prompts, news, strict=True)]
    return model, prompts, news, wanted


@pytest.mark.parametrize("family", ["llama", "bamba"])
@pytest.mark.slow
def test_two_hundred_requests_in_a_pool_far_too_small(family: str) -> None:
    model, prompts, news, wanted = asked(family)
    rng = random.Random(1)
    layout = make_engine(model, 1 << 26).layout
    engine = make_engine(
        model, 3 * layout.slab_bytes_for(LONGEST + 16, states=2), token_budget=48, max_running=12
    )
    engine.buffer.view(torch.float32).fill_(torch.nan)
    engine.scheduler.admission = None  # admit every request for which pages are free, so that pages run out
    requests: list[Request] = []
    cancelled: set[int] = set()
    waiting = list(zip(prompts, news, strict=True))
    steps = 0
    while waiting or engine.busy:
        for prompt, new in [waiting.pop(0) for _ in range(min(len(waiting), rng.randrange(5)))]:
            params = SamplingParams(max_tokens=new, temperature=0)
            requests.append(engine.add(prompt, params, priority=rng.randrange(3)))
        live = [request for request in requests if request.finish_reason is None]
        if live and rng.random() < 0.15:
            victim = rng.choice(live)
            engine.cancel(victim)
            cancelled.add(victim.order)
        engine.step()
        steps += 1
        if steps % 20 == 0:
            engine.cache.check()
        assert steps < 5000
    assert len(requests) == REQUESTS
    assert 10 < len(cancelled) < 100
    for request, tokens in zip(requests, wanted, strict=True):
        whole = request.order not in cancelled
        assert request.finish_reason == ("length" if whole else "cancelled")
        assert request.tokens == (tokens if whole else tokens[: len(request.tokens)])
    assert sum(request.preemptions for request in requests) > 5
    if not layout.of("state"):  # a snapshot rarely outlives its request in such a pool
        assert sum(request.cached_tokens or 0 for request in requests) > 0
    engine.cache.take_copies()
    engine.cache.check()
    assert engine.cache.stats()["in_use_pages"] == 0

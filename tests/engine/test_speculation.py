"""Speculation: the tokens are those of plain decoding, for every layer type and with every feature of the cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvloom.engine import Engine, SamplingParams
from kvloom.engine.speculation import DraftedRequest, TokenIndex
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

FAMILIES = [
    "llama",
    "gemma3_text",
    "llama4_text",
    "deepseek_v3",
    "mamba",
    "mamba2",
    "bamba",
    "qwen3_next",
    "jamba",
]


class Oracle:
    """Proposes the right tokens with a given chance each, else wrong ones."""

    name = "oracle"

    def __init__(self, answers: dict[tuple[int, ...], list[int]], chance: float = 0.7) -> None:
        self.answers, self.chance, self.rng = answers, chance, random.Random(1)

    def propose(self, requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[list[int]]:
        drafts = []
        for request, count in zip(requests, counts, strict=True):
            answer = self.answers.get(request.prompt, [])
            draft = answer[len(request.tokens) : len(request.tokens) + self.rng.randint(0, count)]
            drafts.append([t if self.rng.random() < self.chance else 3 + (t + 1) % 60 for t in draft])
        return drafts

    def request_finished(self, request: DraftedRequest) -> None:
        pass


def speculating(
    model: Any, pool: int, answers: dict[tuple[int, ...], list[int]], chance: float = 0.7, **settings: Any
) -> Engine:
    engine = make_engine(model, pool, speculate="ngram", draft_tokens=5, **settings)
    assert engine.speculation is not None
    engine.speculation.proposer = Oracle(answers, chance)
    return engine


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(8)
def test_greedy_tokens_match_generate(family: str, ahead: bool) -> None:
    rng = random.Random(family)
    model = tiny(family)
    model.set_attn_implementation("eager")
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in range(8)]
    wanted = expected(model, prompts, 30)
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, wanted, strict=True)}
    engine = speculating(model, 1 << 24, answers, token_budget=24, max_running=8, ahead=ahead)
    requests = []
    for prompt in prompts:
        requests.append(engine.add(prompt, SamplingParams(max_tokens=30, temperature=0)))
        engine.step()
        engine.cache.check()
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert [request.tokens for request in requests] == wanted
    assert sum(request.accepted_tokens for request in requests) > 40
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


@pytest.mark.parametrize("how", ["ngram", "suffix"])
def test_lookup_proposes_what_followed(how: str) -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    prompt = [5, 9, 11, 13, 17] * 6
    (wanted,) = expected(model, [prompt], 60)
    engine = make_engine(model, 1 << 22, speculate=how)
    assert engine.speculation is not None
    request = engine.add(prompt, SamplingParams(max_tokens=60, temperature=0))
    engine.run()
    assert request.tokens == wanted
    again = engine.add(prompt, SamplingParams(max_tokens=60, temperature=0))
    before = engine.speculation.stats.steps
    engine.run()
    assert again.tokens == wanted
    if how == "suffix":  # the past answer is the draft
        assert again.accepted_tokens > 40
        assert engine.speculation.stats.steps - before < 15


def test_index_finds_the_longest_match_in_bulk_and_token_by_token() -> None:
    rng = random.Random(0)
    for _ in range(30):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(3, 300))]
        bulk, single = TokenIndex(), TokenIndex()
        cut = rng.randrange(len(tokens))
        bulk.add(tokens[:cut])
        bulk.add(tokens[cut:])
        for token in tokens:
            single.add([token])
        assert bulk._earlier == single._earlier
        assert bulk._last == single._last
        at, length = bulk.longest_match(tokens[-24:], own=True)
        if length:
            assert tokens[at - length : at] == tokens[-length:]
            assert at < len(tokens)

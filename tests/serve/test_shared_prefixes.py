"""Prompts that share a prefix on a model with recurrent states, through a real server and `LLM`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvloom import LLM, SamplingParams
from kvloom.core import CacheControl, RetainRange

from .running import Running, running

HYBRID = "kvloom-hybrid"
SHARED = [5 + i * 7 % 300 for i in range(600)]
ASKED: dict[str, Any] = {
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
    "model": HYBRID,
}
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def prompts(shared: int, count: int = 3, first: int = 0) -> list[list[int]]:
    """Prompts with `shared` equal first tokens. Prompts with different values of `first` share nothing."""
    return [[300 + first, *SHARED[1:shared], 310 + i, *range(9, 20 + i)] for i in range(count)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(HYBRID, pool_bytes=64 << 20, device="cpu", dtype="float32", token_budget=128)


def fresh_tokens(llm: LLM, prompt: list[int]) -> list[int]:
    """The tokens after a prompt without the cache."""
    (result,) = llm.generate([prompt], PARAMS, control=CacheControl(read=False, store=False))
    return list(result.outputs[0].token_ids)


def test_llm_hits_at_branches(llm: LLM) -> None:
    # One after another: the second prompt shows the branch, the third resumes there.
    found = [llm.generate([prompt], PARAMS)[0] for prompt in prompts(70)]
    assert [one.num_cached_tokens for one in found] == [0, 0, 64]
    # Queued at once: the first prompt, of several chunks, takes the checkpoint that the others wait for.
    queued = llm.generate(prompts(300, first=1), PARAMS)
    assert [one.num_cached_tokens for one in queued] == [0, 288, 288]
    # A retained range ends where later prompts branch.
    control = CacheControl(retain=(RetainRange(stop=70),))
    retained = [llm.generate([prompt], PARAMS, control=control)[0] for prompt in prompts(70, first=2)]
    assert [one.num_cached_tokens for one in retained] == [0, 64, 64]
    for one in [*found, *queued, *retained]:
        assert one.outputs[0].token_ids == fresh_tokens(llm, one.prompt_token_ids)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def complete(server: Running, prompt: list[int], **fields: Any) -> dict[str, Any]:
    return server.complete(prompt=prompt, **ASKED, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "first"), [("0", 0), ("64", 64)])
def test_server_hits_at_branches(llm: LLM, every: str, first: int) -> None:
    options = ("--pool", "64MiB", "--dtype", "float32", "--token-budget", "128")
    with running(HYBRID, *options, "--checkpoint-every", every) as server:
        serial = [complete(server, prompt) for prompt in prompts(70)]
        assert [cached(one) for one in serial] == [0, first, 64]
        asked = {"cache": {"retain": [{"stop": 70}]}}
        retained = [complete(server, prompt, **asked) for prompt in prompts(70, first=1)]
        assert [cached(one) for one in retained] == [0, 64, 64]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda prompt: complete(server, prompt), prompts(560, 4, first=2)))
        # Whichever came first computes the prefix. The others may come while it does.
        assert sorted(cached(one) for one in together)[1:] == [560] * 3
        for prompt, one in zip(
            [*prompts(70), *prompts(70, first=1), *prompts(560, 4, first=2)],
            [*serial, *retained, *together],
            strict=True,
        ):
            assert one["choices"][0]["token_ids"] == fresh_tokens(llm, prompt)

"""MLA prompts with expanded keys and values: the tokens are those of transformers, in groups and in pieces."""

from __future__ import annotations

import copy

import pytest
import torch

from kvloom.engine import SamplingParams
from kvloom.models.paged import latents, pages
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

SIZES = (3, 70, 33, 5, 18)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("budget", [16, 64, 400], ids=["pieces", "chunks", "whole"])
def test_expanded_prompts(family: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beside decoding requests, in chunks, and after a hit. Pieces have 32 tokens."""
    calls: list[int] = []
    attend = latents.ExpandedPlan.attend

    def counted(plan: latents.ExpandedPlan, *rest: torch.Tensor) -> None:
        calls.append(len(plan._parts))
        attend(plan, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(pages, "supports_dense", lambda *_: True)
    monkeypatch.setattr(latents.ExpandedPlan, "attend", counted)
    monkeypatch.setattr(latents, "MIN_QUERIES", 6)
    monkeypatch.setattr(latents, "MIN_QUERIES_ALONE", 4)
    model = tiny(family)
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 60, (size,), generator=generator).tolist() for size in SIZES]
    own = copy.deepcopy(model)
    wanted = expected(own, prompts, 8)
    engine = make_engine(model, 1 << 24, token_budget=budget)
    engine.runner.pages.expanded_tokens = 32
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    requests = []
    for prompt in prompts:
        requests.append(engine.add(prompt, params))
        engine.step()  # the next prompt starts beside decoding requests
    engine.run()
    assert [request.tokens for request in requests] == wanted
    assert max(calls) > (budget < max(SIZES))
    again = [engine.add([*request.tokens, *range(3, 20)], params) for request in requests]
    engine.run()
    assert all(request.cached_tokens for request in again[1:3])
    assert [request.tokens for request in again] == expected(
        own, [list(request.prompt) for request in again], 8
    )

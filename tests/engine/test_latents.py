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
@pytest.mark.few(3)
def test_expanded_prompts(family: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beside decoding requests, in chunks, and after a hit. Pieces have 32 tokens."""
    calls: list[int] = []
    attend = latents.ExpandedPlan.attend

    def counted(plan: latents.ExpandedPlan, *rest: torch.Tensor) -> None:
        calls.append(len(plan._parts))
        attend(plan, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(pages, "supports_dense", lambda *_: True)
    monkeypatch.setattr(latents.ExpandedPlan, "attend", counted)
    monkeypatch.setattr(latents, "MIN_QUERIES", 4)
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


def test_only_sequences_with_many_new_tokens_are_expanded() -> None:
    """Short prompts after a long cached prefix stay in latent space, wherever they are in a step."""
    counts = [1, 400, 64, 300, 64, 1000]
    lengths = [90, 400, 4160, 4000, 64, 1000]
    bounds = [0, *torch.tensor(counts).cumsum(0).tolist()]
    plan = latents.ExpandedPlan.of_step(bounds, lengths, 5000, torch.device("cpu"))
    assert plan is not None
    assert [(part.queries.start, part.queries.stop) for part in plan._parts] == [
        (1, 401),
        (465, 765),
        (829, 1829),
    ]
    assert plan.absorbed is not None
    assert plan.absorbed.lengths == (90, 4160, 64)
    assert plan.absorbed.bounds == (0, 1, 65, 129)
    assert isinstance(plan.absorbed.queries, torch.Tensor)
    assert plan.absorbed.queries.tolist() == [0, *range(401, 465), *range(765, 829)]
    assert latents.ExpandedPlan.of_step([0, 64, 128], [4160, 4160], 5000, torch.device("cpu")) is None
    whole = latents.ExpandedPlan.of_step([0, 400], [400], 5000, torch.device("cpu"))
    assert whole is not None
    assert whole.absorbed is None


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.few(1)
def test_short_prompts_after_a_long_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt stands between short ones in one step."""
    kinds: set[type] = set()
    attend = latents.ExpandedPlan.attend

    def counted(plan: latents.ExpandedPlan, *rest: torch.Tensor) -> None:
        kinds.add(type(plan.absorbed and plan.absorbed.queries))
        attend(plan, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(pages, "supports_dense", lambda *_: True)
    monkeypatch.setattr(latents.ExpandedPlan, "attend", counted)
    monkeypatch.setattr(latents, "MIN_QUERIES", 16)
    model = tiny(family)
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, 60, (size,), generator=generator).tolist() for size in (7, 60, 9, 50, 11)]
    wanted = expected(copy.deepcopy(model), prompts, 8)
    engine = make_engine(model, 1 << 24, token_budget=400)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    assert torch.Tensor in kinds
    assert [request.tokens for request in requests] == wanted

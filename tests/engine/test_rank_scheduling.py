"""Preemption, forks, prefix hits and draft models on several ranks. The ranks divide the weights, the context, or both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvloom.engine import SamplingParams
from kvloom.models.paged import divided_step
from tests.engine.test_offload import PATIENT
from tests.engine.test_tensor_parallel import GREEDY, POOL, generate, made
from tests.engine.thread_ranks import grid_engine
from tests.engines import make_engine
from tests.models.zoo import expected, prompts_of

WEIGHTS, CONTEXT, BOTH = (2, 1), (1, 2), (2, 2)
"""The number of parts of the weights and of the context."""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "parts", "ahead", "tiers"),
    [
        *(
            (family, WEIGHTS, ahead, tiers)
            for family in ("llama", "bamba")
            for ahead in (False, True)
            for tiers in (False, True)
        ),
        ("llama", CONTEXT, False, False),
        ("llama", CONTEXT, True, True),
        ("bamba", CONTEXT, True, False),
        ("gemma3_text", CONTEXT, False, True),
        ("deepseek_v3", CONTEXT, True, True),
        ("llama", BOTH, True, True),
    ],
    ids=str,
)
def test_a_draft_model_on_rank_0_gives_the_tokens_of_one_rank(
    family: str,
    parts: tuple[int, int],
    ahead: bool,
    tiers: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft is the target itself, or another model. A second engine loads the pages of both models from disk."""
    monkeypatch.setattr(divided_step, "MIN_TOKENS", 8)
    model, prompts = made(family), prompts_of(5, (40, 33, 50))
    wanted = expected(model, prompts)
    made("llama").save_pretrained(tmp_path / "draft")
    settings: dict[str, Any] = {"speculate": f"draft={tmp_path / 'draft'}", "draft_tokens": 3, "ahead": ahead}
    if tiers:
        settings |= {"tiers": ["host:4MiB", f"disk:{tmp_path / 'tier'}:64MiB"], "offload": PATIENT}
    for round_ in range(2):
        engine = grid_engine(model, *parts, pool_bytes=POOL, **settings)
        try:
            assert {group.parts for group in engine.layout.groups if group.spec.lifetime == "draft"} == {1}
            requests = [engine.add(prompt, GREEDY) for prompt in prompts]
            engine.run()
            assert [request.tokens for request in requests] == wanted
            if tiers and round_:
                assert sum(request.cached_tokens or 0 for request in requests) > 0
            if family == "llama":  # with wrong pages from disk, the draft model would guess wrongly
                assert all(request.accepted_tokens == request.draft_tokens > 0 for request in requests)
        finally:
            engine.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("parts", [WEIGHTS, CONTEXT, BOTH], ids=str)
def test_hits_forks_and_preemption_give_the_tokens_of_one_rank(parts: tuple[int, int]) -> None:
    """A pool of few pages preempts; samples fork the prompt; a second round hits the prefix cache."""
    prompts = prompts_of(6, (40, 40, 41))
    several = SamplingParams(max_tokens=30, temperature=1.0, n=2, seed=7, ignore_eos=True)
    slab = make_engine(made("llama"), POOL).layout.slab_bytes
    found = []
    for ranks in (1, parts[0] * parts[1]):
        config: dict[str, Any] = {"token_budget": 16, "max_running": 8, "pool_bytes": 20 * slab // ranks}
        engine = (
            make_engine(made("llama"), **config)
            if ranks == 1
            else grid_engine(made("llama"), *parts, **config)
        )
        first = generate(engine, prompts, several)
        again = [engine.add(prompt, several) for prompt in prompts]
        engine.run()
        assert any(request.cached_tokens for request in again)
        found.append((first, [list(sample.tokens) for request in again for sample in request.family]))
        engine.close()
    assert found[0] == found[1]

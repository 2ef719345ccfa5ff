"""Heads on a GPU: hidden states are written in CUDA graphs, and steps run ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from kvloom.engine import SamplingParams
from kvloom.engine.speculation.controller import _TurnedOff
from tests.engine.test_heads import GREEDY, assert_same_pages, recorded, save
from tests.engine.test_speculation import fixed
from tests.engines import make_engine
from tests.models.heads import EagleReference, Reference
from tests.models.zoo import prompts_of

SIZES = (5, 17, 29, 8, 40, 3, 21, 33)
FAMILIES = ["llama", "deepseek_v3", "qwen3_next"]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_drafts(family: str, tmp_path: Path) -> None:
    model, how = save(tmp_path, family)
    reference = EagleReference(tmp_path) if family == "llama" else Reference(tmp_path, family)
    model, prompts = model.cuda(), prompts_of(1, SIZES)
    params = SamplingParams(max_tokens=30, **GREEDY)
    results: list[list[Any]] = []
    for speculate in ("off", how):
        engine = make_engine(model, 1 << 26, speculate=speculate, max_running=16)
        drafts = recorded(fixed(engine)) if speculate == how else []
        engine.prepare()
        requests = [engine.add(prompt, params) for prompt in prompts]
        engine.run()
        engine.cache.check()
        results.append(requests)
    same = sum(one.tokens == other.tokens for one, other in zip(*results, strict=True))
    assert same >= len(prompts) - 1  # a tie may be decided by rounding
    assert sum(one.accepted_tokens for one in results[1]) > 10
    checked = drafts[::10]
    right = sum(draft == reference.drafts(tokens, len(draft)) for tokens, draft in checked)
    assert right > 0.8 * len(checked)


@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_pages_are_the_same_with_graphs_and_ahead(family: str, drafting: bool, tmp_path: Path) -> None:
    """Output tokens in graphs, with drafts or in steps that run ahead, give the pages of a prompt without graphs."""
    model, how = save(tmp_path, family)
    model = model.cuda()
    engine = make_engine(model, 1 << 26, speculate=how, max_running=16, tiers=["host:64MiB"])
    assert engine.ahead
    assert engine.speculation is not None
    assert engine.speculation.controller is not None
    name = how.partition("=")[0]
    engine.speculation.controller.reasons[name] = "off"
    engine.speculation.controller._off[name] = _TurnedOff(requests=8, value=1.0, wait=100, steps=-1000)
    if drafting:
        fixed(engine)
    engine.prepare()
    requests = [
        engine.add(prompt, SamplingParams(max_tokens=40, **GREEDY)) for prompt in prompts_of(2, SIZES)
    ]
    engine.run()
    assert bool(requests[0].draft_tokens) == drafting
    plain = make_engine(model, 1 << 26, speculate=how, cuda_graphs=False, token_budget=19)
    for request in requests[:3]:
        plain.add([*request.tokens, 3], SamplingParams(max_tokens=1))
        plain.run()
        assert_same_pages(engine, plain, request.tokens, len(request.tokens) - 2, 1e-2)
    engine.close()

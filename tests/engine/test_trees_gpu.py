"""Draft trees on a GPU: tree masks in the Triton kernels, with and without CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from kvloom.engine import EngineConfig, SamplingParams
from tests.engine.test_heads import save
from tests.engine.test_speculation_gpu import SIZES, WIDE, made, ran
from tests.engine.test_trees import TreeOracle, assert_pages_of_a_prompt, trees_of
from tests.engines import make_engine
from tests.models.heads import EagleReference, Reference, save_eagle
from tests.models.zoo import prompts_of

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 64, "sliding_window": 8},
    "llama4_text": {"head_dim": 64},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", SHAPES)
def test_tokens_and_pages_are_those_without_trees(
    family: str, graphs: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = made(family, **WIDE, **SHAPES[family]), prompts_of(1, SIZES)
    plain = make_engine(model, 1 << 26, max_running=16)
    wanted = ran(plain, prompts, temperature=temperature)
    monkeypatch.setattr(EngineConfig, "tree_nodes", property(lambda config: 12))
    settings: dict[str, Any] = {"max_running": 16, "cuda_graphs": graphs}
    engine = make_engine(model, 1 << 26, speculate="ngram", draft_tokens=12, **settings)
    assert engine.runner.pages.is_replayable
    assert engine.speculation is not None
    answers = {one.prompt: one.tokens for one in wanted}
    engine.speculation.proposers, engine.speculation.controller = [TreeOracle(answers, 0.8)], None
    engine.prepare()
    found = ran(engine, prompts, temperature=temperature)
    same = sum(one.tokens == other.tokens for one, other in zip(found, wanted, strict=True))
    assert same >= len(prompts) - 1  # a tie may be decided by rounding
    assert sum(one.accepted_tokens for one in found) > 60
    monkeypatch.undo()
    for request in found[:2]:
        assert_pages_of_a_prompt(engine, request.tokens[:-1], 1e-2)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_pages(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = made("llama", torch.bfloat16, **WIDE), prompts_of(1, SIZES)
    monkeypatch.setattr(EngineConfig, "tree_nodes", property(lambda config: 12))
    engine = make_engine(model, 1 << 26, kv_dtype, speculate="ngram", draft_tokens=12, max_running=16)
    assert engine.speculation is not None
    assert engine.runner.draft_graphs is not None
    plain = make_engine(model, 1 << 26, kv_dtype, max_running=16)
    answers = {one.prompt: one.tokens for one in ran(plain, prompts, temperature=0)}
    engine.speculation.proposers, engine.speculation.controller = [TreeOracle(answers, 0.8)], None
    found = ran(engine, prompts, temperature=0)
    same = sum(one.tokens == answers[one.prompt] for one in found)
    assert same >= len(prompts) // 2  # in 16 bits, rows of several tokens round differently
    assert sum(one.accepted_tokens for one in found) > 40


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "wide"])
def test_trees_of_heads(family: str, tmp_path: Path) -> None:
    """The kernels and graphs support only the heads of the wide model. The others run in torch."""
    reference: EagleReference | Reference
    if family == "wide":
        model, how = save_eagle(tmp_path, sizes=WIDE), f"eagle={tmp_path / 'eagle'}"
        reference = EagleReference(tmp_path)
    else:
        model, how = save(tmp_path, family)
        reference = EagleReference(tmp_path) if family == "llama" else Reference(tmp_path, family)
    model, prompts = model.cuda(), prompts_of(1, SIZES)
    params = SamplingParams(max_tokens=30, temperature=0)
    results: list[list[Any]] = []
    drafts: list[Any] = []
    for speculate in ("off", f"{how},tree=12"):
        engine = make_engine(model, 1 << 26, speculate=speculate, max_running=16)
        if speculate != "off":
            drafts = trees_of(engine)
        engine.prepare()
        requests = [engine.add(prompt, params) for prompt in prompts]
        engine.run()
        engine.cache.check()
        results.append(requests)
    same = sum(one.tokens == other.tokens for one, other in zip(*results, strict=True))
    assert same >= len(prompts) - 1  # a tie may be decided by rounding
    assert family == "wide" or sum(one.accepted_tokens for one in results[1]) > 10
    if family == "wide":
        assert engine._draft_runner is not None
        assert engine._draft_runner.draft_graphs is not None
        assert engine.runner.draft_graphs is not None
    paths = [(tokens, draft.best_path().tokens) for tokens, draft in drafts[::10]]
    right = sum(path == reference.drafts(tokens, len(path)) for tokens, path in paths)
    assert right > 0.8 * len(paths)

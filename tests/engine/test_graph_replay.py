"""Replayed decode steps on a CPU: instead of replaying a graph, the model runs again on the uploaded numbers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.engine import Engine, SamplingParams
from kvloom.engine.execution import DecodeGraphs, GraphMemory, ModelRunner
from kvloom.models.fusion.fused_attention import GpuFusedAttention, fuse_attention
from kvloom.models.fusion.modules import _fuse_projections
from kvloom.models.paged import BatchBuilder, install
from tests.engines import make_engine
from tests.models.lora_adapters import greedy, merged, write_adapter
from tests.models.zoo import expected, prompts_of, tiny

from .invariance import run_interrupted


@dataclass
class Eager:
    """Replaces a captured graph: replaying it runs the model, and writes to the same logits."""

    runner: ModelRunner
    size: int
    logits: torch.Tensor
    adapted: bool = False
    replays: int = 0

    @property
    def graph(self) -> Eager:
        return self

    def replay(self) -> None:
        self.replays += 1
        batch = self.runner.stage.replayed(self.size, self.runner.chosen, adapted=self.adapted)
        self.logits.copy_(self.runner._forward(batch, None))


def replaying(model: Any, rows: int, **options: Any) -> tuple[Engine, dict[tuple[int, bool], Eager]]:
    engine = make_engine(model, 1 << 24, max_running=rows, ahead=True, **options)
    runner, made = engine.runner, dict[tuple[int, bool], Eager]()
    adapted = engine.adapters is not None
    runner.observe(runner.pages)  # without native steps, as on a GPU
    runner.stage = BatchBuilder(engine.cache, "cpu", 256, rows, mirrored=True, adapted=adapted)
    runner.decode_graphs = graphs = DecodeGraphs(
        runner.stage, runner._forward, runner.chosen, rows, None, adapted, GraphMemory()
    )
    graphs._sizes = [2, rows]

    def captured(variant: tuple[int, bool, bool]) -> Eager:
        size, _, adapted = variant
        if (size, adapted) not in made:
            made[size, adapted] = Eager(runner, size, torch.zeros(size, engine._vocabulary), adapted)
        return made[size, adapted]

    graphs._captured = captured  # type: ignore[assignment, method-assign]
    return engine, made


@pytest.mark.parametrize(
    ("family", "turned"), [("llama", True), ("gemma3_text", True), ("qwen3", True), ("qwen3_next", False)]
)
@pytest.mark.few(1)
def test_replayed_steps_match_generate(family: str, turned: bool) -> None:
    prompts = prompts_of(3, (5, 17, 29, 40, 14))
    wanted = expected(tiny(family), prompts, 40)  # over a few blocks, where tables change
    model = tiny(family)
    install(model)
    if turned:
        for module in [module for module in model.modules() if hasattr(module, "q_proj")]:
            assert _fuse_projections(module)
            assert fuse_attention(module, GpuFusedAttention)
            module.is_fused = True
    engine, made = replaying(model, 4)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    engine.cache.check()
    assert [request.tokens for request in requests] == wanted
    assert sum(eager.replays for eager in made.values()) > 30


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.few(1)
def test_replayed_steps_use_the_adapters_of_their_rows(family: str, tmp_path: Path) -> None:
    plain, targets = tiny(family), ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    paths = {name: write_adapter(tmp_path / name, plain, targets, seed) for seed, name in enumerate("ab")}
    model = copy.deepcopy(plain)
    install(model)
    if family != "qwen3_next":
        for module in [module for module in model.modules() if hasattr(module, "q_proj")]:
            assert _fuse_projections(module)
            assert fuse_attention(module, GpuFusedAttention)
            module.is_fused = True
    lora = {name: str(path) for name, path in paths.items()}
    engine, made = replaying(model, 4, lora=lora, token_budget=32)
    prompts, names = prompts_of(3, (5, 17, 29, 40, 14, 8)), [None, "a", "b", None, "b", "a"]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    requests = [engine.add(prompt, params, lora=name) for prompt, name in zip(prompts, names, strict=True)]
    engine.run()
    alone = engine.add(prompts[0], params)  # later steps of the base model use graphs without terms
    engine.run()
    models = {None: plain, **{name: merged(plain, path) for name, path in paths.items()}}
    for request, prompt, name in zip([*requests, alone], [*prompts, prompts[0]], [*names, None], strict=True):
        assert request.output == greedy(models[name], prompt, 30)
    assert {adapted for _, adapted in made} == {True, False}
    engine.cache.check()


def test_preempted_rows_resume_with_their_block_tables() -> None:
    prompts = prompts_of(4, (30, 20, 40, 25, 33, 18))
    wanted = expected(tiny("llama"), prompts, 30)
    engine, made = replaying(tiny("llama"), 4, token_budget=16)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    run_interrupted(engine, requests, every=9)
    assert [request.tokens for request in requests] == wanted
    assert made

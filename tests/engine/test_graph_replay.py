"""Replayed decode steps on a CPU: instead of replaying a graph, the model runs again on the uploaded numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvloom.engine import Engine, SamplingParams
from kvloom.engine.execution import ModelRunner
from kvloom.models.fusion.fused_attention import GpuFusedAttention, fuse_attention
from kvloom.models.fusion.modules import _fuse_projections
from kvloom.models.paged import BatchBuilder, install
from tests.engines import make_engine
from tests.models.zoo import expected, prompts_of, tiny

from .invariance import run_interrupted


@dataclass
class Eager:
    """Replaces a captured graph: replaying it runs the model, and writes to the same logits."""

    runner: ModelRunner
    size: int
    logits: torch.Tensor
    replays: int = 0

    @property
    def graph(self) -> Eager:
        return self

    def replay(self) -> None:
        self.replays += 1
        batch = self.runner.stage.replayed(self.size, self.runner.chosen)
        self.logits.copy_(self.runner._forward(batch, None))


def replaying(model: Any, rows: int, **options: Any) -> tuple[Engine, dict[int, Eager]]:
    engine = make_engine(model, 1 << 24, max_running=rows, ahead=True, **options)
    runner, made = engine.runner, dict[int, Eager]()
    runner.stage = BatchBuilder(engine.cache, "cpu", 256, rows, mirrored=True)
    runner._sizes = [2, rows]
    runner._shared_column = None

    def captured(size: int, shares: bool) -> Eager:
        if size not in made:
            made[size] = Eager(runner, size, torch.zeros(size, engine._vocabulary))
        return made[size]

    runner._captured = captured  # type: ignore[assignment, method-assign]
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


def test_preempted_rows_resume_with_their_block_tables() -> None:
    prompts = prompts_of(4, (30, 20, 40, 25, 33, 18))
    wanted = expected(tiny("llama"), prompts, 30)
    engine, made = replaying(tiny("llama"), 4, token_budget=16)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    run_interrupted(engine, requests, every=9)
    assert [request.tokens for request in requests] == wanted
    assert made

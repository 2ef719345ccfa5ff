"""The parts of a step that recurrent layers compute one after the other, in steps with and without a CUDA graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvloom.engine import Engine
from kvloom.models.paged import BatchBuilder, Work
from kvloom.models.paged.batch import PROMPT_ROWS
from kvloom.models.paged.mixers import MixerSteps
from tests.engines import make_engine

from .test_attention import tiny

FAMILIES = ["qwen3_next", "bamba", "mamba", "lfm2", "minimax"]


def mixed_step(family: str) -> tuple[Engine, list[Work]]:
    """Return an engine, and a step of five sequences: three with one token, a prompt of 21 tokens, and one more token."""
    engine = make_engine(tiny(family), 1 << 24, token_budget=64, max_running=8)
    works = []
    for i, (before, new) in enumerate(((9, 1), (3, 1), (17, 1), (0, 21), (5, 1))):
        tokens = np.arange(5 + i, 5 + i + before + new)
        sequence = engine.cache.open(engine.cache.match(tokens.astype(np.int32)))
        if before:
            assert not sequence.extend(before)
            engine.runner.run([Work(sequence, tokens[:before])])
            sequence.commit(tokens[:before].astype(np.int32))
        assert not sequence.extend(new)
        works.append(Work(sequence, tokens[before:]))
    return engine, works


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_compute_what_one_call_computes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, works = mixed_step(family)
    before = engine.buffer.clone()
    found = engine.runner.run(works).clone()
    after = engine.buffer.clone()
    steps = engine.runner.pages.steps
    parts = steps.parts(engine.runner.pages.state_view(engine.runner.pages.state_layers[0]))
    assert [part.rows.longest for part in parts] == [1, 21]
    engine.buffer.copy_(before)
    monkeypatch.setattr(MixerSteps, "_halves", lambda _, counts: [(0, len(counts))])
    wanted = engine.runner.run(works)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        after.view(torch.float32), engine.buffer.view(torch.float32), rtol=1e-4, atol=1e-4, equal_nan=True
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_of_a_graph_compute_the_same_step(family: str) -> None:
    """The inputs that a GPU replays, on a CPU. They have fixed numbers of sequences, so padding sequences follow."""
    engine, works = mixed_step(family)
    runner = engine.runner
    before = engine.buffer.clone()
    wanted = runner.run(works).clone()
    after = engine.buffer.clone()
    engine.buffer.copy_(before)
    stage = BatchBuilder(engine.cache, "cpu", 64 + 8, 8, mirrored=True)
    assert stage.fits_graph(works)
    stage.send(works, 9, 25)
    plain = runner.stage.lay_out(works, runner.chosen)
    batch = replace(stage.packed(25, runner.chosen), bounds=plain.bounds, sizes=plain.sizes)
    found = runner._forward(batch, plain.last)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        engine.buffer.view(torch.float32), after.view(torch.float32), rtol=1e-4, atol=1e-4, equal_nan=True
    )


def test_a_step_with_too_many_prompts_uses_no_graph() -> None:
    engine, works = mixed_step("qwen3_next")
    prompt = works[3]
    assert engine.runner.stage.fits_graph([*works[:3], *[prompt] * PROMPT_ROWS])
    assert not engine.runner.stage.fits_graph([*works[:3], *[prompt] * (PROMPT_ROWS + 1)])

"""`prepare` on a GPU: nothing is compiled while requests run, and graphs are captured despite garbage collection."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from triton import knobs

from kvloom.engine import SamplingParams
from tests.engines import make_engine

from .invariance import prompts_of
from .test_batch_invariance_gpu import made


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_requests_compile_nothing_after_prepare(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(made(family), 1 << 30)
    engine.prepare()
    compiled: list[str] = []

    def hook(**told: Any) -> None:
        compiled.append(str(told["repr"]))

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    prompts = prompts_of(24, 4096, 1500)
    for prompt in prompts:
        engine.add(prompt, greedy)
    engine.run()
    for prompt in prompts:  # parts with what was said inside a block: its page is copied
        engine.add([*prompt, *range(3, 30)], greedy)
    engine.run()
    assert engine.cache.stats()["hit_tokens"]
    assert not compiled


def test_capture_while_old_graphs_are_garbage() -> None:
    """As if garbage were collected in the middle of each capture, wherever that is allowed."""
    model, before = made("llama"), gc.get_threshold()
    gc.collect()
    gc.set_threshold(1 << 30)  # no other collection
    try:
        gone: Any = make_engine(model, 1 << 28, max_running=16)
        gone.prepare()
        gone.itself = gone
        del gone
        engine = make_engine(model, 1 << 28, max_running=16)
        forward, recordings = engine.runner._forward, 0

        def collecting(*given: Any) -> torch.Tensor:
            nonlocal recordings
            if torch.cuda.is_current_stream_capturing():
                recordings += 1
                if gc.isenabled():
                    gc.collect()
            return forward(*given)

        assert engine.runner.piecewise is not None
        assert engine.runner.decode_graphs is not None
        engine.runner.decode_graphs._forward = engine.runner.piecewise._forward = collecting
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.prepare()
    finally:
        gc.set_threshold(*before)
        gc.collect()
    assert recordings
    assert engine.runner.piecewise is not None
    assert torch.randn(4, device="cuda").shape == (4,)

"""Metrics cost less than one percent of the work on the smallest model, where their share is the largest."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("msgspec", reason="the server's packages (extra serve) are not installed")

from kvloom.bench.metrics import Parts, time_parts
from kvloom.engine import SamplingParams
from kvloom.models.specs import folder_of
from kvloom.serve.worker.engine_process import load_engine
from kvloom.serve.worker.messages import Add, Start
from kvloom.serve.worker.worker import Worker

STREAMS, PROMPT, TOKENS = 16, 64, 24


def test_metrics_cost_under_one_percent() -> None:
    """The denominator is the engine's own processor time without HTTP: with it the share is smaller still."""
    engine = load_engine(
        Start(folder_of("kvloom-llama"), cpu_dtype="float32", settings={"pool_bytes": 64 << 20}, threads=1)
    )
    spent, told = [], 0
    for turn in range(3):
        worker = Worker(engine, observe=False)
        for i in range(STREAMS):
            prompt = [5 + (turn * 7 + i * k) % 200 for k in range(PROMPT)]
            worker.handle(Add(i, prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True), stream=True))
        began, told = time.thread_time(), 0
        while worker.engine.busy:
            outputs = worker.step()
            assert outputs is None or not (outputs.progress or outputs.stats)
            told += sum(len(delta.tokens) for delta in outputs.deltas) if outputs else 0
        spent.append(time.thread_time() - began)
        assert told == STREAMS * TOKENS
    a_token = 1e6 * min(spent) / told
    share = time_parts(engine).share(a_token, TOKENS, 1e6 / a_token)
    assert 0 < share < 0.01, f"{share:.2%} of {a_token:.0f} µs a token"


def test_parts_are_weighted_by_their_rate() -> None:
    parts = Parts(token=1.0, request=24.0, stats=100.0, scrape=600.0)
    assert parts.share(cpu_us_a_token=1000.0, tokens_a_request=24, tokens_per_second=1000) == pytest.approx(
        (1 + 1 + 1) / 1000
    )

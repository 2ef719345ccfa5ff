"""Admission leaves pages for the growth of running requests, so that none is preempted and recomputed."""

from __future__ import annotations

import random

import pytest

from kvloom.core import CacheControl
from kvloom.engine import Request, SamplingParams
from kvloom.engine.scheduling import Admission
from kvloom.engine.scheduling.admission import MEMORY, TYPICAL
from tests.engines import make_engine
from tests.models.zoo import expected, tiny


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def asked(seed: str, count: int, longest: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 64) for _ in range(rng.randrange(8, longest))] for _ in range(count)]


@pytest.mark.parametrize(
    ("family", "ahead", "foresees"),
    [
        ("llama", False, True), ("llama", True, True), ("llama", True, False),
        ("gemma3_text", True, True), ("llama4_text", True, True), ("qwen3_next", True, True),
    ],
)  # fmt: skip
@pytest.mark.few(1)
def test_no_preemption_with_known_output_lengths(family: str, ahead: bool, foresees: bool) -> None:
    model, prompts = tiny(family), asked(family, 10, 40)
    wanted = expected(model, prompts, 28)
    layout = make_engine(model, 1 << 24).layout
    room = 4 * layout.slab_bytes_for(68, states=2) + 2 * layout.slab_bytes
    engine = make_engine(model, room, token_budget=32, max_running=12, ahead=ahead)
    if not foresees:
        engine.scheduler.admission = None
    requests = [engine.add(prompt, greedy(28)) for prompt in prompts]
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert [request.tokens for request in requests] == wanted
    assert (sum(request.preemptions for request in requests) == 0) is foresees
    assert most > 2  # several at once nevertheless
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


def test_shared_pages_count_once_for_admission() -> None:
    """Twelve requests with one long prompt, in a pool for two separate ones."""
    model = tiny("llama", max_position_embeddings=512)
    layout = make_engine(model, 1 << 24).layout
    root = asked("root", 1, 10)[0] * 40
    prompts = [[*root[:320], 3 + i, 4, 5] for i in range(12)]
    engine = make_engine(model, 3 * layout.slab_bytes_for(340), max_running=12)
    engine.add(root[:320], greedy(1))
    engine.run()
    requests = [engine.add(prompt, greedy(8)) for prompt in prompts]
    engine.step()
    engine.step()
    assert len(engine.scheduler.running) == 12
    engine.run()
    assert not any(request.preemptions for request in requests)


def test_prompt_needs_all_its_pages_at_admission() -> None:
    """Long prompts and short answers, with most of a prompt's pages free: a request admitted now would lose them to the growth
    of the others."""
    model, rng = tiny("llama", max_position_embeddings=512), random.Random("long")
    prompts = [[rng.randrange(3, 64) for _ in range(320)] for _ in range(9)]
    layout = make_engine(model, 1 << 24).layout
    pages = layout.slab_bytes_for(320)
    engine = make_engine(model, 5 * pages + pages * 19 // 20, token_budget=320, ahead=True)
    assert engine.scheduler.admission is not None
    engine.scheduler.admission._typical = 60.0
    requests = [engine.add(prompt, greedy(30)) for prompt in prompts]
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 5
    assert not any(request.preemptions for request in requests)


def test_expected_output_length_follows_recent_outputs() -> None:
    engine = make_engine(tiny("llama", max_position_embeddings=4096), 1 << 24)
    growth = Admission(engine.cache)

    def request(said: int, limit: int = 3000) -> Request:
        made = Request(0, (3, 4, 5), greedy(limit), CacheControl())
        made.tokens += [7] * said
        return made

    assert growth.end_of(request(0)) == 3 + TYPICAL
    assert growth.end_of(request(0, limit=20)) == 23
    assert growth.end_of(request(1000)) == 3 + 1251  # longer than most: it goes on for a while
    for _ in range(20 * MEMORY):
        growth.request_finished(request(10))
    assert growth.end_of(request(0)) <= 3 + 11


@pytest.mark.slow
def test_preemption_corrects_low_estimates() -> None:
    model, prompts = tiny("llama", max_position_embeddings=512), asked("low", 4, 30)
    wanted = expected(model, prompts, 100)
    layout = make_engine(model, 1 << 24).layout
    engine = make_engine(model, 2 * layout.slab_bytes_for(140) + layout.slab_bytes)
    growth = engine.scheduler.admission
    assert growth is not None
    growth._typical = 8.0
    requests = [engine.add(prompt, greedy(100)) for prompt in prompts]
    engine.run()
    assert [request.tokens for request in requests] == wanted
    assert any(request.preemptions for request in requests)

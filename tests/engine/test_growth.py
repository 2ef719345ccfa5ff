"""Room that those who run will come to need is left to them: nobody computes twice for want of it."""

from __future__ import annotations

import random

import pytest

from kvloom.core import Control
from kvloom.engine.engine import Engine
from kvloom.engine.growth import MEMORY, TYPICAL, Growth
from kvloom.engine.request import Request, SamplingParams
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
def test_nobody_gives_its_pages_up_where_ends_are_known(family: str, ahead: bool, foresees: bool) -> None:
    model, prompts = tiny(family), asked(family, 10, 40)
    wanted = expected(model, prompts, 28)
    layout = Engine(model, 1 << 24).layout
    room = 4 * layout.slab_bytes_for(68, states=2) + 2 * layout.slab_bytes
    engine = Engine(model, room, token_budget=32, max_running=12, ahead=ahead)
    if not foresees:
        engine.scheduler.growth = None
    requests = [engine.add(prompt, greedy(28)) for prompt in prompts]
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert [request.tokens for request in requests] == wanted
    assert (sum(request.preemptions for request in requests) == 0) is foresees
    assert most > 2  # several at once nevertheless
    engine.cache.take_copies()
    assert engine.cache.stats()["held_pages"] == 0


def test_who_shares_what_is_held_needs_room_for_its_own_alone() -> None:
    """Twelve of one long prompt in a pool for two of them apart."""
    model = tiny("llama", max_position_embeddings=512)
    layout = Engine(model, 1 << 24).layout
    root = asked("root", 1, 10)[0] * 40
    prompts = [[*root[:320], 3 + i, 4, 5] for i in range(12)]
    engine = Engine(model, 3 * layout.slab_bytes_for(340), max_running=12)
    engine.add(root[:320], greedy(1))
    engine.run()
    requests = [engine.add(prompt, greedy(8)) for prompt in prompts]
    engine.step()
    engine.step()
    assert len(engine.scheduler.running) == 12
    engine.run()
    assert not any(request.preemptions for request in requests)


def test_a_prompt_needs_its_room_at_once_and_not_by_and_by() -> None:
    """Long prompts and short answers, with most of a prompt's room left over: whoever began in that would lose it to the growth
    of the others."""
    model, rng = tiny("llama", max_position_embeddings=512), random.Random("long")
    prompts = [[rng.randrange(3, 64) for _ in range(320)] for _ in range(9)]
    layout = Engine(model, 1 << 24).layout
    pages = layout.slab_bytes_for(320)
    engine = Engine(model, 5 * pages + pages * 19 // 20, token_budget=320, ahead=True)
    assert engine.scheduler.growth is not None
    engine.scheduler.growth._typical = 60.0
    requests = [engine.add(prompt, greedy(30)) for prompt in prompts]
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 5
    assert not any(request.preemptions for request in requests)


def test_answers_are_expected_to_be_as_long_as_they_were_of_late() -> None:
    engine = Engine(tiny("llama", max_position_embeddings=4096), 1 << 24)
    growth = Growth(engine.cache)

    def request(said: int, limit: int = 3000) -> Request:
        made = Request(0, (3, 4, 5), greedy(limit), Control())
        made.tokens += [7] * said
        return made

    assert growth.end_of(request(0)) == 3 + TYPICAL
    assert growth.end_of(request(0, limit=20)) == 23
    assert growth.end_of(request(1000)) == 3 + 1251  # longer than most: it goes on for a while
    for _ in range(20 * MEMORY):
        growth.ended(request(10))
    assert growth.end_of(request(0)) <= 3 + 11


def test_where_estimates_are_too_low_somebody_still_gives_way() -> None:
    model, prompts = tiny("llama", max_position_embeddings=512), asked("low", 4, 30)
    wanted = expected(model, prompts, 100)
    layout = Engine(model, 1 << 24).layout
    engine = Engine(model, 2 * layout.slab_bytes_for(140) + layout.slab_bytes)
    growth = engine.scheduler.growth
    assert growth is not None
    growth._typical = 8.0
    requests = [engine.add(prompt, greedy(100)) for prompt in prompts]
    engine.run()
    assert [request.tokens for request in requests] == wanted
    assert any(request.preemptions for request in requests)

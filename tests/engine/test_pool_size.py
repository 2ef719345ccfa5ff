"""An elastic pool: tokens stay the same while it grows and shrinks, memory is given back, the rule decides."""

from __future__ import annotations

import random

import pytest

from kvloom.engine import Engine, SamplingParams
from kvloom.engine.execution import PoolRule
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

GREEDY = SamplingParams(max_tokens=12, temperature=0)
LONG = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def elastic(family: str, **settings: object) -> Engine:
    """An engine whose pool has 24 slabs, and may have 4 to 96."""
    model = tiny(family)
    slab = make_engine(model, 1 << 20, max_pool_bytes=1 << 22).layout.slab_bytes
    sizes = {"pool_bytes": 24 * slab, "max_pool_bytes": 96 * slab, "min_pool_bytes": 4 * slab}
    return make_engine(model, **{"token_budget": 48, "keep_free": 0, **sizes, **settings})


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba", "qwen3_next"])
@pytest.mark.few(1)
def test_tokens_are_the_same_while_the_pool_is_resized(family: str, ahead: bool) -> None:
    rng = random.Random(family)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randint(5, 60))] for _ in range(10)]
    model = tiny(family)
    model.set_attn_implementation("eager")
    wanted = expected(model, prompts, 12)
    engine = elastic(family, ahead=ahead)
    address, slab = engine.buffer.data_ptr(), engine.layout.slab_bytes
    sizes = set()
    for _ in range(3):  # the second and third time with cached prefixes
        requests = [engine.add(prompt, GREEDY) for prompt in prompts]
        steps = 0
        while engine.busy:
            if steps % 3 == 0:
                engine.resize_pool(rng.randint(4, 95) * slab)
            engine.step()
            sizes.add(engine.cache.usable_slabs)
            steps += 1
        assert [request.tokens for request in requests] == wanted
        engine.cache.take_copies()
        engine.cache.check()
    assert len(sizes) > 5
    assert engine.buffer.data_ptr() == address


def test_a_target_below_the_pages_in_use_is_reached_when_requests_finish() -> None:
    engine = elastic("llama")
    size = engine.pool_size
    assert size is not None
    requests = [engine.add(range(3, 60), LONG) for _ in range(4)]
    for _ in range(6):
        engine.step()
    least = size.least * engine.layout.slab_bytes
    engine.resize_pool(least)
    assert engine.busy
    engine.run()
    assert all(request.finish_reason == "length" for request in requests)
    size._next_attempt = 0.0
    engine.adjust_pool()
    assert size.is_reached
    assert size.pool_bytes == least


def test_a_fixed_pool_cannot_be_resized() -> None:
    engine = make_engine(tiny("llama"), 1 << 20)
    with pytest.raises(ValueError, match="set max_pool_bytes"):
        engine.resize_pool(1 << 21)


def test_a_full_pool_grows_and_an_idle_one_gives_memory_back() -> None:
    engine = elastic("llama", idle_seconds=0.0)
    start = engine.cache.usable_slabs
    rng = random.Random(1)
    for _ in range(24):
        engine.add([rng.randrange(3, 64) for _ in range(100)], GREEDY)
    largest = 0
    while engine.busy:
        assert engine.pool_rule is not None
        engine.pool_rule._next = 0.0  # every step, not every quarter of a second
        engine.step()
        largest = max(largest, engine.cache.usable_slabs)
    assert largest > start
    assert not engine.cache.free_pages(16 * 90)  # evicts nearly everything
    engine.pool_rule._next = 0.0
    engine.adjust_pool()
    assert engine.cache.usable_slabs == start


def test_rule_leaves_memory_to_others_first() -> None:
    rule = PoolRule(start_bytes=100, keep_free=50, idle_seconds=10)
    assert rule.decide(0.0, 200, 0, 5, True, lambda: 30) == 180, "others need 20 bytes"
    assert rule.decide(0.1, 180, 0, 9, True, lambda: 500) is None, "too early"
    assert rule.decide(1.0, 200, 0, 9, True, lambda: 500) == 251, "pages were evicted: grow by a quarter"
    assert rule.decide(2.0, 251, 0, 20, True, lambda: 60) == 261, "no more than is free"
    assert rule.decide(3.0, 261, 0, 20, True, lambda: 500) is None, "nothing was evicted"
    assert rule.decide(12.0, 261, 90, 20, False, lambda: 500) is None, "idle for 9 s"
    assert rule.decide(13.1, 261, 90, 20, False, lambda: 500) == 171, "unused memory is given back"
    assert rule.decide(14.0, 261, 261, 20, False, lambda: 500) == 100, "but not below the first size"

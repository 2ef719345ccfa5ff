"""Requests at their limits: failed steps, pools for a single request, requests that can never run, retries."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.core import CacheControl, Tenant
from kvloom.engine import Engine, Request, SamplingParams
from kvloom.engine.execution import InflightStep, kv_memory as pool_module, memory_budget as sizing
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

POOL = 1 << 22


def greedy(new: int) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0)


def idle(engine: Engine) -> bool:
    engine.cache.take_copies()
    engine.cache.check()
    return not engine.busy and engine.cache.stats()["in_use_pages"] == 0


def steps_until_idle(engine: Engine, most: int) -> int:
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        assert steps < most, "it never ends"
    return steps


class BrokenError(RuntimeError):
    pass


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "bamba"])
@pytest.mark.few(2)
def test_failed_step_is_discarded_and_recomputed(family: str, ahead: bool) -> None:
    rng = random.Random(f"{family}, no ties")  # of two tokens with equal logits, rounding would choose
    model = tiny(family)
    model.set_attn_implementation("eager")
    prompts = [[rng.randrange(3, 64) for _ in range(size)] for size in (5, 20, 33, 40)]
    wanted = expected(model, prompts, 10)
    engine = make_engine(model, POOL, token_budget=24, ahead=ahead)
    lonely = engine.add(prompts[1], SamplingParams(max_tokens=10, seed=5, n=3))
    engine.run()
    engine = make_engine(model, POOL, token_budget=24, ahead=ahead)
    choose = engine.sampler.choose

    def breaks(*_: Any, **__: Any) -> None:
        if rng.random() < 0.03:
            raise BrokenError

    def breaks_later(*args: Any, **named: Any) -> Any:
        if rng.random() < 0.1:
            raise BrokenError
        return choose(*args, **named)

    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    hooks = [layer.register_forward_pre_hook(breaks) for layer in layers]
    engine.sampler.choose = breaks_later  # type: ignore[method-assign]
    requests = [engine.add(prompt, greedy(10)) for prompt in prompts]
    several = engine.add(prompts[1], SamplingParams(max_tokens=10, seed=5, n=3))
    penalised = engine.add(prompts[2], SamplingParams(max_tokens=10, temperature=0, presence_penalty=1e-9))
    broken = steps = 0
    while engine.busy:
        try:
            engine.step()
        except BrokenError:
            broken += 1
        engine.cache.check()
        steps += 1
        assert steps < 2000
    for hook in hooks:
        hook.remove()
    assert broken
    assert [request.tokens for request in (*requests, penalised)] == [*wanted, wanted[2]]
    assert [one.output for one in several.family] == [one.output for one in lonely.family]
    again = [engine.add([*tokens[:-1], 7], greedy(1)) for tokens in wanted]  # on what was left in the cache
    engine.sampler.choose = choose  # type: ignore[method-assign]
    engine.run()
    model.set_attn_implementation("eager")
    fresh = make_engine(model, POOL)
    for request in again:
        other = fresh.add(request.prompt, greedy(1), CacheControl(read=False))
        fresh.run()
        assert other.output == request.output
        assert request.cached_tokens
    assert idle(engine)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["llama", "bamba"])
@pytest.mark.few(1)
def test_interrupt_while_waiting_for_tokens_loses_none(
    family: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(family)
    model = tiny(family)
    model.set_attn_implementation("eager")
    prompts = [[rng.randrange(3, 64) for _ in range(size)] for size in (5, 20, 33, 40)]
    wanted = expected(model, prompts, 10)
    beams = {"max_tokens": 10, "temperature": 0, "beam_width": 3}
    calm = make_engine(model, POOL)
    alone = calm.add(prompts[1], SamplingParams(**beams))
    calm.run()
    land, broken = InflightStep.results, 0

    def interrupted(flight: InflightStep) -> Any:
        if rng.random() < 0.2:
            raise BrokenError
        return land(flight)

    def breaks(*_: Any) -> None:
        if rng.random() < 0.03:
            raise BrokenError

    monkeypatch.setattr(InflightStep, "results", interrupted)
    for several in (False, True):  # beams must see their tokens at once, and those beside them
        engine = make_engine(model, POOL, token_budget=24, ahead=ahead)
        layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
        hooks = [layer.register_forward_pre_hook(breaks) for layer in layers]
        requests = [engine.add(prompt, greedy(10)) for prompt in prompts]
        searched = engine.add(prompts[1], SamplingParams(**beams)) if several else None
        told: set[Request] = set()
        steps = 0
        while engine.busy:
            try:
                told |= {request for request in engine.step() if request.finish_reason is not None}
            except BrokenError:
                broken += 1
            steps += 1
            assert steps < 500, "it never ends"
        for hook in hooks:
            hook.remove()
        assert [request.tokens for request in requests] == wanted
        assert told >= set(requests)
        if searched is not None:
            assert [one.output for one in searched.returned_samples] == [
                one.output for one in alone.returned_samples
            ]
        assert idle(engine)
    assert broken


def test_chunk_without_free_pages_is_shortened_for_windows() -> None:
    model = tiny("gemma3_text", max_position_embeddings=512)
    model.set_attn_implementation("eager")
    prompt = [3 + i % 50 for i in range(200)]
    wanted = expected(model, [prompt], 10)[0]
    slab = make_engine(model, POOL).layout.slab_bytes
    engine = make_engine(model, 6 * slab, token_budget=256)
    request = engine.add(prompt, greedy(10))
    steps_until_idle(engine, 100)
    assert request.tokens == wanted
    assert request.finish_reason == "length"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "bamba"])
def test_feasibility_is_exact(family: str) -> None:
    model = tiny(family, max_position_embeddings=1024)
    slab = make_engine(model, POOL).layout.slab_bytes
    engine = make_engine(model, 6 * slab, token_budget=40)

    def accepted(size: int) -> Request | None:
        try:
            return engine.add([3 + i * i % 50 for i in range(size)], greedy(2))
        except ValueError:
            return None

    low, high = 1, 1022
    while low < high:
        middle = (low + high + 1) // 2
        request = accepted(middle)
        if request is not None:
            engine.cancel(request)
        low, high = (middle, high) if request is not None else (low, middle - 1)
    for _ in range(2):
        request = accepted(low)
        assert request is not None
        steps_until_idle(engine, 200)
        assert request.finish_reason == "length", low
    if low < 1022:
        with pytest.raises(ValueError, match="bytes of pages, but the pool has"):
            engine.add([3] * (low + 1), greedy(2))


def test_finished_forks_free_their_pages() -> None:
    model = tiny("bamba", max_position_embeddings=1024)
    slab = make_engine(model, POOL).layout.slab_bytes
    engine = make_engine(model, 6 * slab)
    first = engine.add([3, 4, 5, 6], SamplingParams(max_tokens=1, seed=1, n=3))
    engine.step()
    assert [one.finish_reason for one in first.family] == ["length"] * 3
    prompt = [7 + i % 40 for i in range(574)]  # all that there is
    request = engine.add(prompt, greedy(2), CacheControl(store=False))
    engine.run()
    assert request.finish_reason == "length"


@pytest.mark.parametrize("budget", [16, 256])
def test_stuck_prompt_finishes(budget: int) -> None:
    engine = make_engine(tiny("llama"), POOL)
    engine = make_engine(tiny("llama"), 9 * engine.layout.slab_bytes, token_budget=budget)
    held = engine.cache.open(engine.cache.match(np.array([1, 2, 3], np.int32)))
    assert not held.extend(64)  # pages in use, which cannot be evicted
    request = engine.add([3 + i % 50 for i in range(100)], greedy(10))
    told: list[Request] = []
    steps = 0
    while engine.busy:
        told += engine.step()
        steps += 1
        assert steps < 200, "it never ends"
    assert request.finish_reason == "no_room"
    assert told == [request]
    several = engine.add([3 + i % 50 for i in range(100)], SamplingParams(max_tokens=10, n=3))
    told = []
    while engine.busy:
        told += engine.step()
    assert [one.finish_reason for one in several.family] == ["no_room"] * 3
    assert told == several.family
    held.close()
    request = engine.add([3 + i % 50 for i in range(100)], greedy(10))
    engine.run()
    assert request.finish_reason == "length"


def test_quota_below_the_widest_window_is_refused_at_once() -> None:
    model = tiny("gemma3_text", max_position_embeddings=512)
    layout = make_engine(model, POOL).layout
    prompt = [3 + i % 50 for i in range(117)]
    control = CacheControl(tenant="small")
    quotas = layout.slab_bytes_for(122), max(map(layout.slab_bytes_for, range(1, 123)))
    assert quotas[0] < quotas[1]  # at its end, and where windows reach into two blocks
    engine = make_engine(model, POOL, tenants=[Tenant("small", quota=quotas[0])])
    with pytest.raises(ValueError, match="but the tenant's quota is"):
        engine.add(prompt, greedy(5), control)
    engine = make_engine(model, POOL, tenants=[Tenant("small", quota=quotas[1])])
    request = engine.add(prompt, greedy(5), control)
    steps_until_idle(engine, 200)
    assert request.finish_reason == "length"
    assert idle(engine)


def test_request_beyond_quota_or_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_engine(tiny("llama"), POOL).layout
    tenant = Tenant("small", quota=layout.slab_bytes_for(40))
    engine = make_engine(tiny("llama"), POOL, tenants=(tenant,))
    with pytest.raises(ValueError, match=r"need [\d,]+ bytes of pages, but the tenant's quota is"):
        engine.add(range(3, 53), greedy(10), CacheControl(tenant="small"))
    engine.add(range(3, 33), greedy(10), CacheControl(tenant="small"))
    engine.add(range(3, 53), greedy(10))
    engine.run()
    monkeypatch.setattr(pool_module, "MAX_TOKENS", 64)
    model = tiny("mamba")
    del model.config.max_position_embeddings
    engine = make_engine(model, POOL)
    with pytest.raises(ValueError, match="60 prompt tokens and max_tokens 5 exceed the engine's limit of 64"):
        engine.add([5] * 60, greedy(5))
    request = engine.add([5] * 60, greedy(4))
    engine.run()
    assert request.finish_reason == "length"
    with pytest.raises(ValueError, match="token_budget 0"):
        make_engine(model, POOL, token_budget=0)


def test_waiting_is_not_preemption_and_cached_tokens_are_those_of_the_first_start() -> None:
    engine = make_engine(tiny("llama"), POOL)
    engine = make_engine(tiny("llama"), 9 * engine.layout.slab_bytes, token_budget=128)
    prompt = [3 + i % 50 for i in range(40)]
    engine.add(prompt, greedy(1))
    engine.run()
    other = engine.add([5, 6, 7], greedy(12), priority=1)
    engine.step()
    held = engine.cache.open(engine.cache.match(np.array([1, 2, 3], np.int32)))
    assert not held.extend(4 * 16)  # with the others' four blocks, that is all
    waits = engine.add([*prompt, *range(3, 60)], greedy(2))
    for _ in range(4):
        engine.step()
    assert waits.sequence is None
    assert not held.extend(7 * 16)  # what it would have found is gone now
    while other.finish_reason is None:
        engine.step()
    held.close()
    engine.run()
    assert waits.finish_reason == "length"
    assert (waits.preemptions, waits.cached_tokens) == (0, 0)


def test_half_shared_page_does_not_finish_a_request_of_pool_size() -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    prompt = [3 + i * 7 % 50 for i in range(20)]
    last = [*prompt[:18], *[58] * 22]
    wanted = expected(model, [last], 24)[0]
    slab = make_engine(model, POOL).layout.slab_bytes
    engine = make_engine(model, 5 * slab, token_budget=2)
    for first in (prompt, [*prompt[:18], 60, 61]):  # they part inside a block
        engine.add(first, greedy(1))
        engine.run()
    request = engine.add(last, greedy(24))
    steps_until_idle(engine, 200)
    assert request.finish_reason == "length"
    assert request.tokens == wanted


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.few(1)
def test_request_beyond_its_quota_preempts_only_its_own_tenant(ahead: bool) -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    prompts = [[3 + (i * 7 + own) % 50 for i in range(30)] for own in range(3)]
    wanted = expected(model, prompts, 60)
    slab = make_engine(model, POOL).layout.slab_bytes
    engine = make_engine(model, POOL, tenants=[Tenant("red", quota=8 * slab), Tenant("blue")], ahead=ahead)
    red = [engine.add(prompt, greedy(60), CacheControl(tenant="red"), priority=1) for prompt in prompts[:2]]
    blue = engine.add(
        prompts[2], greedy(60), CacheControl(tenant="blue")
    )  # lowest rank: it would be preempted first
    steps_until_idle(engine, 400)
    assert [one.tokens for one in (*red, blue)] == wanted
    assert sum(one.preemptions for one in red) > 0
    assert blue.preemptions == 0


def test_tenant_within_its_share_is_not_preempted() -> None:
    model = tiny("llama")
    slab = make_engine(model, POOL).layout.slab_bytes
    engine = make_engine(model, 13 * slab, tenants=[Tenant("red", weight=1), Tenant("blue", weight=1)])
    engine.scheduler.admission = None  # admit every request for which pages are free, so that pages run out
    red = [
        engine.add([3 + own] * 30, greedy(50), CacheControl(tenant="red"), priority=1) for own in range(2)
    ]  # ten blocks together, of which six are its share
    blue = engine.add([9] * 30, greedy(50), CacheControl(tenant="blue"))
    steps_until_idle(engine, 400)
    assert {one.finish_reason for one in (*red, blue)} == {"length"}
    assert sum(one.preemptions for one in red) > 0
    assert blue.preemptions == 0


def test_tenant_of_weight_0_uses_the_rest_of_the_pool() -> None:
    model = tiny("llama")
    slab = make_engine(model, POOL).layout.slab_bytes
    engine = make_engine(model, 9 * slab, tenants=[Tenant("red", weight=1), Tenant("blue", weight=0)])

    def ran(tenant: str, start: int, length: int) -> Request:
        request = engine.add(
            [3 + (start + i) % 60 for i in range(length)], greedy(2), CacheControl(tenant=tenant)
        )
        steps_until_idle(engine, 50)
        return request

    assert ran("blue", 3, 30).finish_reason == "length"  # an idle pool is anyone's
    assert ran("red", 3, 60).finish_reason == "length"
    assert ran("red", 30, 60).finish_reason == "length"  # the whole pool is its share: what blue left is gone
    assert engine.cache.state.accounts["blue"].used == 0
    assert ran("blue", 3, 40).finish_reason == "no_room"


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "logprobs", "n"])
def test_non_integer_parameters_are_refused(name: str) -> None:
    for wrong in (2.5, "2"):
        with pytest.raises(ValueError, match=f"{name} {wrong!r} must be an integer"):
            SamplingParams(**{name: wrong})  # type: ignore[arg-type]
    assert getattr(SamplingParams(**{name: np.int64(2)}), name) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma3_text", "qwen3_next"])
def test_memory_trial_stays_within_the_models_limits(
    family: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)  # not available on a CPU
    model = tiny(family)  # of 128 positions
    layout = make_engine(model, POOL).layout
    assert sizing._trial(model, layout, 500, rows, None, 128, False, None) == (0, rows * 64 * 4)
    assert sizing._trial(model, layout, 100, rows, None, 128, False, None) == (0, rows * 64 * 4)

"""Requests longer than the pool: their oldest pages are in host memory, and their tokens stay the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvloom.core import CacheControl, Tenant
from kvloom.engine import Engine, Request, SamplingParams
from kvloom.engine.offload import HostPages
from kvloom.engine.scheduling import Feasibility
from tests.engines import make_engine
from tests.models import image_prompts
from tests.models.zoo import expected, tiny

CONTEXT = 2048
NEW = 16
LENGTHS = {"bamba": 900, "gemma3_text": 800, "llama4_text": 400, "qwen3_next": 900}
"""Prompt tokens that make a request four times as long as the smallest pool that runs it."""
FAMILIES = ["llama", "gemma3_text", "qwen3_next", "bamba", "deepseek_v3", "gemma2", "gpt_oss", "llama4_text"]


def model_of(family: str) -> Any:
    model = tiny(family, max_position_embeddings=CONTEXT)
    model.set_attn_implementation("eager")
    return model


def greedy(new: int = NEW) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0)


def drawn(seed: object, *sizes: int) -> list[list[int]]:
    rng = random.Random(str(seed))
    return [[rng.randrange(3, 64) for _ in range(size)] for size in sizes]


def slabs_for(engine: Engine, length: int, most_full: int | None = None) -> int:
    """Return the slabs of one request, with at most `most_full` blocks of full attention in the pool."""
    return Feasibility(engine.cache, 1)._most_slabs(length, most_full)


def small_engine(model: Any, length: int, more: int = 1, **settings: Any) -> Engine:
    """Return an engine whose pool has `more` slabs than a request of `length` tokens needs at least."""
    layout = {name: settings[name] for name in ("kv_dtype", "block_tokens") if name in settings}
    big = make_engine(model, 1 << 22, **layout)
    slabs = slabs_for(big, length, 2) + more
    settings.setdefault("tiers", ["host:8MiB"])
    return make_engine(model, (slabs + 1) * big.layout.slab_bytes, **settings)


def run(engine: Engine, most: int = 3000) -> None:
    """Step until no request is left, and recount all pages after every step."""
    steps = 0
    while engine.busy:
        engine.step()
        engine.cache.check()
        steps += 1
        assert steps < most, "it never ends"


def cold_pages(engine: Engine) -> int:
    assert engine.offload is not None
    return engine.offload.stats.cold_pages


def leased_pages(engine: Engine) -> int:
    """Return the pages of host memory that have leases."""
    assert engine.offload is not None
    index = engine.offload.host.index
    return int(sum(index.slots.refs[slot] for slot in index.slots.slot_at.values()))


def closed(engine: Engine) -> None:
    """Check that no page is in use or leased, and close the tiers."""
    assert engine.offload is not None
    engine.offload.flush()
    engine.cache.take_copies()
    engine.cache.check()
    assert engine.cache.stats()["in_use_pages"] == 0
    assert leased_pages(engine) == 0
    engine.close()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(1)
def test_request_four_times_the_pool_has_the_tokens_of_generate(family: str, ahead: bool) -> None:
    model, size = model_of(family), LENGTHS.get(family, 180)
    prompts = drawn(family, size, size - 7, 20)
    wanted = expected(model, prompts, NEW)
    engine = small_engine(model, size + NEW, more=0, ahead=ahead)
    assert slabs_for(engine, (size + NEW) // 4) >= engine.cache.usable_slabs
    alone = engine.add(prompts[0], greedy())
    run(engine)
    assert alone.is_long
    assert alone.tokens == wanted[0]
    assert alone.preemptions == 0
    assert cold_pages(engine) > 0
    closed(engine)
    engine = small_engine(model, size + NEW, more=2, ahead=ahead)
    requests = [engine.add(prompt, greedy()) for prompt in prompts]
    run(engine)
    assert [request.tokens for request in requests] == wanted
    closed(engine)


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gemma2"])
@pytest.mark.slow
def test_request_becomes_long_while_it_decodes(family: str) -> None:
    model = model_of(family)
    prompts, new = drawn("grows", 20, 33), 600 if family == "qwen3_next" else 150
    wanted = expected(model, prompts, new)
    engine = small_engine(model, 40 + new, more=4 if family == "llama" else 1)
    requests = [engine.add(prompt, greedy(new)) for prompt in prompts]
    assert [one.may_be_long for one in requests] == [True, True]
    assert [one.is_long for one in requests] == [False, False]
    run(engine)
    assert [one.tokens for one in requests] == wanted
    assert requests[0].is_long
    closed(engine)


def test_request_that_could_become_long_uses_the_prefix_cache() -> None:
    model = model_of("llama")
    prompts = drawn("cached", 50, 20)
    engine = small_engine(model, 1024, more=6)
    params = SamplingParams(max_tokens=900, temperature=0, stop_token_ids=tuple(range(64)))  # ends at once
    first, again = engine.add(prompts[0], params), engine.add(prompts[0], params)
    run(engine)
    assert first.may_be_long
    assert not first.is_long
    assert again.hits == {"device": 49}
    assert cold_pages(engine) == 0
    closed(engine)


def test_pool_that_shrank_runs_the_request_with_cold_pages() -> None:
    model = model_of("llama")
    (prompt,) = drawn("shrinks", 200)
    wanted = expected(model, [prompt], NEW)[0]
    engine = small_engine(model, 216, more=20)
    request = engine.add(prompt, greedy())
    assert not request.may_be_long
    assert len(engine.cache.shrink(16))
    run(engine)
    assert request.is_long
    assert request.tokens == wanted
    closed(engine)


def test_short_request_runs_beside_a_long_one() -> None:
    model = model_of("llama")
    prompts = drawn("beside", 300, 20)
    wanted = [*expected(model, prompts[:1], 60), *expected(model, prompts[1:], 30)]
    engine = small_engine(model, 360, more=8)
    long = engine.add(prompts[0], greedy(60))
    while not long.output_count:
        engine.step()
    short = engine.add(prompts[1], greedy(30))
    while short.finish_reason is None:
        engine.step()
        engine.cache.check()
    assert long.finish_reason is None  # the short one did not wait for it
    run(engine)
    assert [long.tokens, short.tokens] == wanted
    assert long.preemptions == short.preemptions == 0
    closed(engine)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_pages_can_be_cold(kv_dtype: Any) -> None:
    model = model_of("llama")
    (prompt,) = drawn(kv_dtype, 300)
    whole = make_engine(model, 1 << 22, kv_dtype=kv_dtype)
    wanted = whole.add(prompt, greedy())
    run(whole)
    engine = small_engine(model, 316, more=2, kv_dtype=kv_dtype)
    request = engine.add(prompt, greedy())
    run(engine)
    assert request.tokens == wanted.tokens
    assert cold_pages(engine) > 0
    closed(engine)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next", "bamba"])
@pytest.mark.few(1)
def test_drafts_of_long_requests_are_verified(family: str) -> None:
    model, size = model_of(family), LENGTHS.get(family, 180)
    repeated = drawn("drafts", 12)[0] * (size // 12)
    prompts = [repeated, drawn("beside", size)[0], repeated[:24]]
    wanted = expected(model, prompts, 30)
    engine = small_engine(model, size + 30, more=2, speculate="ngram", draft_tokens=4)
    requests = [engine.add(prompt, greedy(30)) for prompt in prompts]
    run(engine)
    assert [request.tokens for request in requests] == wanted
    assert cold_pages(engine) > 0
    closed(engine)


@pytest.mark.parametrize("block_tokens", [32, 64])
def test_larger_blocks_can_be_cold(block_tokens: int) -> None:
    model = model_of("llama")
    prompts = drawn(block_tokens, 500, 500)
    wanted = expected(model, prompts, NEW)
    engine = small_engine(model, 516, more=2, block_tokens=block_tokens)
    requests = [engine.add(prompt, greedy()) for prompt in prompts]
    run(engine)
    assert [request.tokens for request in requests] == wanted
    assert cold_pages(engine) > 0
    closed(engine)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.few(1)
def test_samples_and_beams_of_a_long_request_share_its_cold_pages(family: str) -> None:
    model = model_of(family)
    (prompt,) = drawn("samples", LENGTHS.get(family, 180))
    for params in (
        SamplingParams(max_tokens=NEW, temperature=1.0, seed=5, n=3),
        SamplingParams(max_tokens=NEW, temperature=0, beam_width=3),
    ):
        whole = make_engine(model, 1 << 24)
        wanted = whole.add(prompt, params)
        run(whole)
        engine = small_engine(model, len(prompt) + NEW, more=6 if family == "llama" else 1)
        request = engine.add(prompt, params)
        run(engine)
        assert request.is_long
        assert [one.output for one in request.returned_samples] == [
            one.output for one in wanted.returned_samples
        ]
        assert cold_pages(engine) > 0
        closed(engine)


def test_repeated_long_prompt_starts_behind_its_cold_pages() -> None:
    model = model_of("llama")
    (prompt,) = drawn("again", 300)
    wanted = expected(model, [prompt, [*prompt, 5, 6]], NEW)
    engine = small_engine(model, 320, more=2)
    first = engine.add(prompt, greedy())
    run(engine)
    again, longer = engine.add(prompt, greedy()), engine.add([*prompt, 5, 6], greedy())
    run(engine)
    assert [first.tokens, again.tokens, longer.tokens] == [wanted[0], *wanted]
    assert first.cached_tokens == 0
    assert again.cached_tokens == longer.cached_tokens == 288
    assert again.hits == {"host": again.cached_tokens}
    short = engine.add(prompt[:50], greedy())  # loads pages that the long request left in host memory
    run(engine)
    assert short.cached_tokens == 48
    closed(engine)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "llama4_text", "qwen3_next", "bamba"])
@pytest.mark.few(2)
def test_next_turn_resumes_windows_and_states_from_host_memory(family: str) -> None:
    model, size = model_of(family), LENGTHS.get(family, 180)
    (prompt,) = drawn("turn", size)
    first = expected(model, [prompt], 9)[0]
    second = expected(model, [[*first, 5, 6, 7]], 9)[0]
    engine = small_engine(model, len(second), more=1)
    for tokens, wanted, cached in ((prompt, first, 0), ([*first, 5, 6, 7], second, len(first) - 1)):
        request = engine.add(tokens, greedy(9))
        run(engine)
        assert request.tokens == wanted
        assert request.cached_tokens == cached
    closed(engine)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next"])
def test_preempted_long_request_resumes_where_it_was(family: str) -> None:
    model, size = model_of(family), LENGTHS.get(family, 180)
    (prompt,) = drawn("resumes", size)
    wanted = expected(model, [prompt], NEW)[0]
    engine = small_engine(model, size + NEW, more=1)
    request = engine.add(prompt, greedy())
    while request.output_count < 5:
        engine.step()
    before = request.computed
    engine.scheduler._preempt(request)
    engine.cache.check()
    assert leased_pages(engine) == 0
    engine.step()
    assert request.sequence is not None
    assert before - 16 < request.sequence.resumed <= before
    run(engine)
    assert request.tokens == wanted
    closed(engine)


def test_long_request_starts_on_cached_pages() -> None:
    model = model_of("llama")
    (prompt,) = drawn("prefix", 300)
    wanted = expected(model, [prompt[:40], prompt], NEW)
    engine = small_engine(model, 316, more=2)
    short, long = engine.add(prompt[:40], greedy()), engine.add(prompt, greedy())
    run(engine)
    assert [short.tokens, long.tokens] == wanted
    assert long.cached_tokens
    closed(engine)


@pytest.mark.parametrize(
    "control", [CacheControl(store=False), CacheControl(read=False), CacheControl(read=False, store=False)]
)
def test_pages_of_a_request_that_stores_nothing_leave_host_memory(control: CacheControl) -> None:
    model = model_of("llama")
    (prompt,) = drawn("private", 300)
    wanted = expected(model, [prompt], NEW)[0]
    engine = small_engine(model, 316, more=2)
    for _ in range(2):
        request = engine.add(prompt, greedy(), control)
        run(engine)
        assert request.tokens == wanted
    assert request.cached_tokens == 0
    assert engine.offload is not None
    assert engine.offload.host.is_empty == (not control.store)
    closed(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.few(1)
def test_preempted_and_cancelled_requests_lose_nothing(family: str) -> None:
    model, size = model_of(family), LENGTHS.get(family, 180)
    prompts = drawn("preempt", size, size, 30)
    wanted = expected(model, prompts, NEW)
    rng = random.Random(family)
    engine = small_engine(model, size + NEW, more=3)
    requests = [engine.add(prompt, greedy()) for prompt in prompts]
    cancelled = engine.add(prompts[0][::-1], greedy())
    preempted = steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        running = [one for one in engine.scheduler.running if one.finish_reason is None]
        if running and preempted < 6 and rng.random() < 0.2:
            engine.scheduler._preempt(rng.choice(running))
            preempted += 1
        if steps == 12:
            engine.cancel(cancelled)
        engine.cache.check()
        assert steps < 3000
    assert preempted
    assert cancelled.finish_reason == "cancelled"
    assert [request.tokens for request in requests] == wanted
    closed(engine)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_failed_copy_to_host_memory_is_recomputed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, size = model_of(family), LENGTHS.get(family, 180)
    prompts = drawn("faults", size, 20)
    wanted = expected(model, prompts, NEW)
    engine = small_engine(model, size + NEW, more=3)
    copy, failed = HostPages.offload, 0

    def breaks(pages: HostPages, *arguments: Any) -> Any:
        nonlocal failed
        if failed < 2:
            failed += 1
            raise RuntimeError("the copy failed")
        return copy(pages, *arguments)

    monkeypatch.setattr(HostPages, "offload", breaks)
    requests = [engine.add(prompt, greedy()) for prompt in prompts]
    raised = 0
    while engine.busy:
        try:
            engine.step()
        except RuntimeError:
            raised += 1
        engine.cache.check()
    assert failed
    assert raised
    assert [request.tokens for request in requests] == wanted
    closed(engine)


def test_host_memory_that_fills_up_ends_the_request_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    prompts = drawn("full", 300, 20)
    wanted = expected(model, prompts, NEW)
    engine = small_engine(model, 316, more=4)
    assert engine.offload is not None
    index = engine.offload.host.index
    allocate, allowed = index._allocate, 8
    monkeypatch.setattr(index, "_allocate", lambda size, account, n: allocate(size, account, min(n, allowed)))
    long, short = (engine.add(prompt, greedy()) for prompt in prompts)
    for _ in range(4):
        engine.step()
        allowed = 0
    run(engine)
    assert long.finish_reason == "no_room"
    assert short.tokens == wanted[1]
    allowed = 1 << 20
    again = engine.add(prompts[0], greedy())
    run(engine)
    assert again.tokens == wanted[0]
    closed(engine)


def test_refusals_state_what_makes_the_request_possible() -> None:
    model = model_of("llama")
    (prompt,) = drawn("refused", 300)
    with pytest.raises(ValueError, match=r"but the pool has [\d,]+: .* --tier host:SIZE with [\d,]+ bytes"):
        small_engine(model, 316, tiers=[]).add(prompt, greedy())
    tight = small_engine(model, 316, tiers=["host:128KiB"])
    with pytest.raises(ValueError, match=r"raise --tier host:SIZE: .* need [\d,]+ bytes .* may use [\d,]+"):
        tight.add(prompt, greedy())
    windows = model_of("mistral")
    big = make_engine(windows, 1 << 22)
    least = 2 * big.layout.slab_bytes
    with pytest.raises(ValueError, match=r"lower max_tokens$"):
        make_engine(windows, least, tiers=["host:8MiB"]).add(prompt, greedy())


def test_quota_smaller_than_the_request_makes_it_long() -> None:
    model = model_of("llama")
    prompts = drawn("quota", 300, 100)
    wanted = expected(model, prompts, NEW)
    slab = make_engine(model, 1 << 22).layout.slab_bytes
    tenants = [Tenant("small", quota=6 * slab), Tenant("other")]
    engine = make_engine(model, 40 * slab, tenants=tenants, tiers=["host:8MiB"])
    long = engine.add(prompts[0], greedy(), CacheControl(tenant="small"))
    other = engine.add(prompts[1], greedy(), CacheControl(tenant="other"))
    run(engine)
    assert long.is_long
    assert not other.is_long
    assert [long.tokens, other.tokens] == wanted
    closed(engine)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.few(1)
def test_random_traffic_on_random_pools_has_the_same_tokens(seed: int) -> None:
    rng = random.Random(f"traffic {seed}")
    family = rng.choice(["llama", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text", "qwen3_next"])
    model = model_of(family)
    shared = drawn(seed, 90)[0]
    sizes = [rng.randrange(2, 40) if rng.random() < 0.4 else rng.randrange(150, 420) for _ in range(7)]
    prompts = [[*shared[: rng.choice((0, 16, 50, 90))], *rest] for rest in drawn(f"rest {seed}", *sizes)]
    counts = [rng.randrange(1, 24) for _ in prompts]
    wanted = [expected(model, [prompt], n)[0] for prompt, n in zip(prompts, counts, strict=True)]
    longest = max(len(tokens) for tokens in wanted)
    big = make_engine(model, 1 << 22)
    more = rng.randrange(slabs_for(big, longest) - slabs_for(big, longest, 2))
    engine = small_engine(
        model, longest, more, token_budget=rng.choice((24, 100, 2048)), ahead=rng.random() < 0.5
    )
    requests: list[Request] = []
    steps = 0
    while engine.busy or len(requests) < len(prompts):
        if len(requests) < len(prompts) and (not engine.busy or rng.random() < 0.3):
            requests.append(engine.add(prompts[len(requests)], greedy(counts[len(requests)])))
        engine.step()
        engine.cache.check()
        steps += 1
        assert steps < 4000
    assert [request.tokens for request in requests] == wanted
    assert any(request.is_long for request in requests)
    closed(engine)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_long_prompt_with_images_resumes_behind_its_cold_pages(family: str) -> None:
    model, images = image_prompts.vision_model(family), [image_prompts.image_of(family, i) for i in (1, 2)]
    words = [image_prompts.words(seed, 55) for seed in (1, 2, 3)]
    prompt = image_prompts.prompt_of(family, words[0], images[0], words[1], images[1], words[2])
    wanted = image_prompts.expected(family, model, prompt, images, NEW)
    big = make_engine(model, 8 << 20)
    least = Feasibility(big.cache, 1)._slabs_of(big.add(prompt, greedy(), images=images), 2)
    engine = make_engine(model, (least + 2) * big.layout.slab_bytes, tiers=["host:8MiB"])
    for cached in (0, (len(prompt) - 1) // 16 * 16):
        request = engine.add(prompt, greedy(), images=images)
        run(engine)
        assert request.is_long
        assert request.output == list(wanted)[-NEW:]
        assert request.cached_tokens == cached
    closed(engine)

"""Tiers under the engine: what was computed once is found again, below the pool and after a restart, and nothing that goes
wrong in a tier changes a token."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvloom.core import CacheControl, Loading, LoadPlan, Match, PageGroup, Tenant, allocator as room
from kvloom.engine import Engine, OffloadConfig, OffloadManager, Request, SamplingParams, opened_tiers
from kvloom.engine.execution import InflightStep
from kvloom.engine.offload import HostPages, manager as offload_manager
from kvloom.tiers import DiskConfig, DiskTier, Objects, OpenTier
from kvloom.tiers.testing import Faults, FaultyTier
from kvloom.tiers.transfers import (
    CircuitBreakerConfig,
    TierQueueConfig,
    TransferConfig,
    unavailable_tier as away,
)
from tests.engines import PATIENT, make_engine
from tests.models.zoo import expected, tiny

POOL = 1 << 22
KINDS = ["llama", "gemma3_text", "qwen3_next", "bamba", "mamba", "deepseek_v3", "llama4_text"]
QUICK = OffloadConfig(
    load="always",
    deadline_seconds=(0.2, 0.2),
    transfers=TransferConfig(
        lookup_seconds=0.2,
        queue=TierQueueConfig(
            breaker=CircuitBreakerConfig(first_pause=0.05, max_pause=0.1, probe_seconds=0.3)
        ),
    ),
)


def greedy(new: int) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0)


def drawn(seed: object, *sizes: int) -> list[list[int]]:
    rng = random.Random(str(seed))
    return [[rng.randrange(3, 64) for _ in range(size)] for size in sizes]


def served(engine: Engine, prompts: list[list[int]], new: int = 8) -> list[Request]:
    requests = [engine.add(prompt, greedy(new)) for prompt in prompts]
    engine.run()
    return requests


def offload_of(engine: Engine) -> OffloadManager:
    assert engine.offload is not None
    return engine.offload


def closed(engine: Engine) -> None:
    """Check that no page is lost or in use, and close the tiers."""
    engine.offload.poll() if engine.offload is not None else None
    engine.cache.take_copies()
    engine.cache.check()
    assert engine.cache.stats()["in_use_pages"] == 0
    engine.close()


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.few(4)
def test_restart_loads_pages_from_disk(family: str, tmp_path: Path) -> None:
    prompts = drawn(family, 70, 50, 33, 90)
    for first, prompt in enumerate(prompts, 3):
        prompt[0] = first  # two prompts that begin with the same token would share it
    wanted = expected(tiny(family), prompts, 8)
    turns = [[*tokens, 5, 6, 7] for tokens in wanted]
    again = expected(tiny(family), turns, 8)
    found = []
    for round_ in range(2):
        engine = make_engine(
            tiny(family), POOL, tiers=["host:8MiB", f"disk:{tmp_path}:64MiB"], offload=PATIENT
        )
        requests = served(engine, turns if round_ else prompts)
        assert [request.tokens for request in requests] == (again if round_ else wanted)
        found.append([request.cached_tokens for request in requests])
        closed(engine)
    states = bool(engine.layout.of("state"))
    for first, cached, tokens in zip(found[0], found[1], wanted, strict=True):
        computed = len(tokens) - 1  # the last one was never computed
        assert first == 0
        assert cached == (computed if states else computed // 16 * 16)


@pytest.mark.parametrize("family", KINDS)
def test_repeated_prompt_is_loaded_after_a_restart(family: str, tmp_path: Path) -> None:
    prompts = drawn(family, 70, 50)
    wanted = expected(tiny(family), prompts, 1)
    for round_ in range(2):
        engine = make_engine(tiny(family), POOL, tiers=[f"disk:{tmp_path}:64MiB"], offload=PATIENT)
        requests = served(engine, prompts, 1)
        assert [request.tokens for request in requests] == wanted
        found = [69, 49] if engine.layout.of("state") else [64, 48]
        assert [r.cached_tokens for r in requests] == (found if round_ else [0, 0])
        closed(engine)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_pages_load_with_their_scales(kv_dtype: Any, tmp_path: Path) -> None:
    prompts = drawn(kv_dtype, 70, 50)
    plain = served(make_engine(tiny("llama"), POOL, kv_dtype=kv_dtype), prompts)
    turns = [[*request.tokens, 5, 6] for request in plain]
    wanted = [
        request.tokens for request in served(make_engine(tiny("llama"), POOL, kv_dtype=kv_dtype), turns)
    ]
    for round_ in range(2):
        engine = make_engine(tiny("llama"), POOL, kv_dtype, tiers=[f"disk:{tmp_path}:64MiB"], offload=PATIENT)
        requests = served(engine, turns if round_ else prompts)
        closed(engine)
    assert [request.cached_tokens for request in requests] == [64, 48]
    assert [request.tokens for request in requests] == wanted


def test_other_weights_tenants_and_dtypes_share_no_pages_on_disk(tmp_path: Path) -> None:
    prompt = drawn("meet", 80)

    def cached(model: Any, control: CacheControl | None = None, **options: Any) -> int:
        engine = make_engine(model, POOL, tiers=[f"disk:{tmp_path}:64MiB"], offload=PATIENT, **options)
        request = engine.add(prompt[0], greedy(1), control)
        engine.run()
        closed(engine)
        assert request.cached_tokens is not None
        return request.cached_tokens

    def changed() -> Any:
        model = tiny("llama")
        model.model.layers[2].mlp.down_proj.weight.data[3, 5] += 0  # the same
        model.model.layers[2].input_layernorm.weight.data[0] += 0.5
        return model

    assert cached(tiny("llama")) == 0
    assert cached(tiny("llama")) == 64 + 15
    assert cached(changed()) == 0
    assert cached(tiny("llama"), CacheControl(tenant="other")) == 0
    assert cached(tiny("llama"), kv_dtype="int8") == 0
    assert cached(tiny("llama"), block_tokens=32) == 64, "pages of another block size are shared"
    assert cached(tiny("llama", rope_theta=5000.0)) == 0
    assert cached(tiny("llama")) == 64 + 15


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.few(1)
def test_host_memory_keeps_the_hits_of_a_small_pool(family: str, write: str) -> None:
    """Conversations of a few turns, in a pool for about a tenth of their pages."""
    model = tiny(family, max_position_embeddings=512)
    layout = make_engine(model, POOL).layout
    talks, turns, more = 8, 3, 24
    prompts = drawn(family, *[48] * talks)
    later = [drawn((family, turn), *[more] * talks) for turn in range(turns - 1)]
    whole = 48 + turns * 8 + (turns - 1) * more
    small = int(1.6 * layout.slab_bytes_for(whole)) + 4 * layout.slab_bytes
    hits, said = [], []
    for pool, tiers in ((POOL * 4, []), (small, [f"host:32MiB?write={write}"])):
        engine = make_engine(tiny(family, max_position_embeddings=512), pool, tiers=tiers, offload=PATIENT)
        talk = [list(prompt) for prompt in prompts]
        for turn in range(turns):
            for i in range(talks):
                request = engine.add(talk[i], greedy(8))
                engine.run()
                talk[i] = [*request.tokens, *(later[turn][i] if turn < turns - 1 else [])]
        hits.append(int(engine.cache.stats()["hit_tokens"]))  # type: ignore[call-overload]
        said.append(talk)
        closed(engine)
    assert said[0] == said[1]
    assert hits[1] >= 0.9 * hits[0] > 0


def test_pool_and_exclusive_host_memory_have_different_pages() -> None:
    """Ten prompts need more pages than the pool or host memory has, but fewer than both have together."""
    slab = make_engine(tiny("llama"), POOL).layout.slab_bytes
    hits = []
    for exclusive in (0, 1):
        engine = make_engine(
            tiny("llama"), 25 * slab, tiers=[f"host:{28 * slab}?exclusive={exclusive}"],
            offload=PATIENT, eviction_policy="lru",
        )  # fmt: skip
        for prompt in drawn("exclusive", *[64] * 10) * 3:
            engine.add(prompt, greedy(1))
            engine.run()
        hits.append(int(engine.cache.stats()["hit_tokens"]))  # type: ignore[call-overload]
        closed(engine)
    assert hits[0] < 0.8 * hits[1]
    assert hits[1] >= 2 * 10 * 48


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_concurrent_conversations_in_a_tenth_of_their_pages_hit(family: str) -> None:
    """Pages loaded for a request stay until it starts: it is admitted only if it can also compute its next block."""
    model = tiny(family, max_position_embeddings=512)
    layout = make_engine(model, POOL).layout
    talks, turns, more, new = 20, 3, 28, 4
    prompts = drawn(family, *[64] * talks)
    longest = 64 + turns * new + (turns - 1) * more
    pool = talks * layout.slab_bytes_for(longest) // 10
    engine = make_engine(
        tiny(family, max_position_embeddings=512), pool, tiers=["host:32MiB"], offload=PATIENT
    )
    running = {engine.add(prompt, greedy(new)): 0 for prompt in prompts}
    found = said = 0
    while running:
        engine.step()
        for request in [request for request in running if request.finish_reason is not None]:
            turn = running.pop(request)
            if turn:
                before = len(request.prompt) - more - 1
                found += request.cached_tokens or 0
                said += before if layout.of("state") else before // 16 * 16
            if turn < turns - 1:
                running[
                    engine.add([*request.tokens, *drawn((turn, request.order), more)[0]], greedy(new))
                ] = turn + 1
    assert found >= 0.99 * said > 0
    closed(engine)


@pytest.mark.parametrize(
    ("family", "why"), [("qwen3_next", "snapshot missing"), ("gemma3_text", "window page missing")]
)
def test_miss_reason_of_pages_in_tiers(family: str, why: str, tmp_path: Path) -> None:
    """After a restart the pool has no tokens. The disk has their pages, but not what a resume needs."""
    prompt = drawn(why, 100)[0]
    wanted = expected(tiny(family), [prompt], 4)[0]
    tiers = ["host:8MiB", f"disk:{tmp_path}:64MiB"]
    engine = make_engine(tiny(family), POOL, tiers=tiers, offload=PATIENT)
    first = served(engine, [prompt], 4)[0]
    assert (first.pool_miss.reason, first.tokens) == ("never seen", wanted)  # type: ignore[union-attr]
    stored(engine)
    offload = offload_of(engine)
    match = engine.cache.match(np.array([*wanted, 5], np.int32))
    prospect = engine.cache.loading.plan(match)
    names = [prospect.hash_at(position) for position in range(1, len(wanted) + 1)]
    for group in engine.layout.groups:
        if group.spec.unit == "state" or group.spec.visibility.windowed:
            for form in offload.forms[group.index]:
                offload.transfers.queues[0].tier.drop(Objects(names, group.index, form))
    closed(engine)
    engine = make_engine(tiny(family), POOL, tiers=tiers, offload=PATIENT)
    again = served(engine, [[*wanted, 5]], 4)[0]
    assert again.cached_tokens == 0
    assert again.pool_miss is not None
    assert (again.pool_miss.reason, again.pool_miss.position) == (why, 0)
    nothing = served(engine, drawn("new", 40), 4)[0]
    assert nothing.pool_miss is not None
    assert nothing.pool_miss.reason == "never seen"
    closed(engine)


def faulty(tmp_path: Path, faults: Faults) -> tuple[OpenTier, FaultyTier]:
    tier = FaultyTier(DiskTier(DiskConfig(tmp_path, 64 << 20, segment_bytes=1 << 20)), faults)
    return OpenTier(tier), tier


def spoil(tier: FaultyTier, path: Path) -> None:
    """Change a byte in the middle of every page on the disk."""
    for segment in path.glob("*.seg"):
        data = bytearray(segment.read_bytes())
        for at in range(4096 + 64, len(data), 4096):
            data[at] ^= 4
        segment.write_bytes(data)


def go_wrong(wrong: str, faults: Faults, tier: FaultyTier, path: Path) -> None:
    if wrong == "flipped":
        spoil(tier, path)
    elif wrong == "lying":
        faults.tamper = lambda objects: tier.inner.drop(objects) and None  # it says yes, and has nothing
    else:
        setattr(faults, wrong, 0.3 if wrong == "slow" else True)


def stored(engine: Engine) -> None:
    """Wait until all stores have finished."""
    ends = time.monotonic() + 5
    while (
        any(lane.pending_store_bytes for lane in offload_of(engine).transfers.queues)
        and time.monotonic() < ends
    ):
        time.sleep(0.01)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("wrong", ["failing", "hung", "full", "slow", "lying", "flipped"])
@pytest.mark.few(3)
def test_faulty_tier_changes_no_token_and_recovers(family: str, wrong: str, tmp_path: Path) -> None:
    prompts = drawn((family, wrong), 70, 50, 33)
    wanted = expected(tiny(family), prompts, 8)
    turns = [[*tokens, 5, 6, 7] for tokens in wanted]
    again = expected(tiny(family), turns, 8)
    engine = make_engine(
        tiny(family), POOL, tiers=[OpenTier(DiskTier(DiskConfig(tmp_path, 64 << 20)))], offload=QUICK
    )
    served(engine, prompts)
    closed(engine)

    faults = Faults()
    place, tier = faulty(tmp_path, faults)
    engine = make_engine(tiny(family), POOL, tiers=[place], offload=QUICK)
    offload = offload_of(engine)
    go_wrong(wrong, faults, tier, tmp_path)
    first = served(engine, turns)
    assert [request.tokens for request in first] == again
    if wrong != "hung":
        stored(engine)
    assert wrong == "slow" or offload.transfers.fault_log.counts

    faults.release()
    faults.failing = faults.full = False
    faults.slow, faults.tamper = 0.0, None
    fresh = drawn((family, wrong, "after"), 60, 40)
    after = expected(tiny(family), fresh, 4)
    ends = time.monotonic() + 5
    while not offload.transfers.queues[0].breaker.is_closed and time.monotonic() < ends:
        time.sleep(0.05)
        assert [r.tokens for r in served(engine, drawn(ends + time.monotonic(), 20))]
    assert [request.tokens for request in served(engine, fresh, 4)] == after
    assert offload.transfers.queues[0].breaker.is_closed
    closed(engine)
    engine = make_engine(tiny(family), POOL, tiers=[f"disk:{tmp_path}:64MiB"], offload=PATIENT)
    requests = served(engine, fresh, 4)  # what was stored after the fault is there
    assert [request.tokens for request in requests] == after
    assert all(request.cached_tokens for request in requests) or bool(engine.layout.of("state"))
    closed(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba"])
@pytest.mark.few(1)
def test_many_requests_in_a_small_pool_with_a_faulty_disk(family: str, tmp_path: Path) -> None:
    rng = random.Random(family)
    roots = drawn((family, "roots"), 40, 33, 20)
    prompts = [
        [*rng.choice(roots)[: rng.randrange(10, 40)], *tail]
        for tail in drawn((family, "tails"), *range(1, 31))
    ]
    wanted = expected(tiny(family), prompts, 6)
    slab = make_engine(tiny(family), POOL).layout.slab_bytes
    faults = Faults()
    place, _ = faulty(tmp_path, faults)
    engine = make_engine(
        tiny(family), 24 * slab, token_budget=24, max_running=6, tiers=["host:1MiB", place], offload=QUICK
    )
    requests = [engine.add(prompt, greedy(6)) for prompt in prompts]
    extra = [engine.add(prompt, greedy(6)) for prompt in prompts[::5]]
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        assert steps < 5000
        if rng.random() < 0.1:
            faults.failing = rng.random() < 0.3
            faults.slow = rng.choice([0, 0, 0.01, 0.3])
        if steps % 40 == 5:
            engine.cancel(rng.choice(extra))
        if steps % 7 == 0:
            engine.cache.check()
    assert [request.tokens for request in requests] == wanted
    faults.failing, faults.slow = False, 0.0
    closed(engine)


def test_quotas_hold_for_loaded_pages(tmp_path: Path) -> None:
    model = tiny("llama", max_position_embeddings=512)
    layout = make_engine(model, POOL).layout
    tenant = Tenant("small", quota=layout.slab_bytes_for(120))
    prompts = drawn("quota", 100, 100, 100)
    engine = make_engine(
        tiny("llama", max_position_embeddings=512), POOL, tenants=(tenant,), tiers=["host:16MiB"],
        offload=PATIENT,
    )  # fmt: skip
    control = CacheControl(tenant="small")
    for _ in range(2):
        for prompt in prompts:
            request = engine.add(prompt, greedy(4), control)
            engine.run()
            engine.cache.check()  # no account is over its quota
    assert request.cached_tokens == 96
    closed(engine)


def test_prompt_takes_a_checkpoint_where_pages_in_a_tier_end(tmp_path: Path) -> None:
    """The tier has pages of 64 shared tokens, but a snapshot only at the end of the prompt that stored them."""
    shared, *rests = drawn("tier branch", 70, 20, 20, 20)
    prompts = [[*shared, *rest] for rest in rests]
    wanted = expected(tiny("qwen3_next"), prompts, 8)
    found = []
    for part in ([0], [1], [2]):
        engine = make_engine(
            tiny("qwen3_next"), POOL, tiers=["host:8MiB", f"disk:{tmp_path}:64MiB"], offload=PATIENT
        )
        (request,) = served(engine, [prompts[part[0]]])
        assert request.tokens == wanted[part[0]]
        found.append(request.cached_tokens)
        closed(engine)
    assert found == [0, 0, 64]


def test_reload_after_preemption_is_not_a_hit() -> None:
    """Two requests do not fit together, and a third with a higher rank is added: they are preempted and load their pages
    again."""
    model = tiny("llama", max_position_embeddings=512)
    layout = make_engine(model, POOL).layout
    prompts = drawn("back", 90, 90, 90)
    wanted = expected(tiny("llama", max_position_embeddings=512), prompts, 24)
    engine = make_engine(
        tiny("llama", max_position_embeddings=512), layout.slab_bytes_for(130) + 2 * layout.slab_bytes,
        tiers=["host:16MiB?write=back"], offload=PATIENT,
    )  # fmt: skip
    engine.scheduler.admission = None  # admit every request for which pages are free, so that pages run out
    requests = [engine.add(prompt, greedy(24)) for prompt in prompts[:2]]
    while requests[0].output_count < 4:
        engine.step()
    requests.append(engine.add(prompts[2], greedy(24), priority=1))
    engine.run()
    assert [request.tokens for request in requests] == wanted
    assert any(request.preemptions and request.loads for request in requests)
    for request in requests:
        assert sum(request.hits.values()) == request.cached_tokens == 0
    closed(engine)


def test_loading_request_does_not_block_others(tmp_path: Path) -> None:
    prompts = drawn("aside", 60, 30)
    engine = make_engine(tiny("llama"), POOL, tiers=[f"disk:{tmp_path}:64MiB"], offload=QUICK)
    wanted = [request.tokens for request in served(engine, prompts)]
    closed(engine)
    faults = Faults(slow=0.15)
    place, _ = faulty(tmp_path, faults)
    engine = make_engine(tiny("llama"), POOL, tiers=[place], offload=PATIENT)
    slow = engine.add(prompts[0], greedy(8))
    quick = engine.add(prompts[1][:14], greedy(2))  # nothing of it can be below
    while quick.finish_reason is None:
        engine.step()
    assert slow.output_count == 0
    engine.run()
    assert slow.tokens == wanted[0]
    assert slow.cached_tokens == 48
    closed(engine)


def test_cancel_while_loading_leaves_no_page(tmp_path: Path) -> None:
    prompts = drawn("cancel", 60)
    engine = make_engine(tiny("llama"), POOL, tiers=[f"disk:{tmp_path}:64MiB"], offload=QUICK)
    served(engine, prompts)
    closed(engine)
    faults = Faults(hung=True)
    place, _ = faulty(tmp_path, faults)
    engine = make_engine(tiny("llama"), POOL, tiers=[place], offload=QUICK)
    request = engine.add(prompts[0], greedy(8))
    for _ in range(5):
        engine.step()
    assert request.output_count == 0
    engine.cancel(request)
    engine.run()
    assert request.finish_reason == "cancelled"
    faults.release()
    closed(engine)


def test_invalid_tiers_are_refused_and_leave_nothing_open(tmp_path: Path) -> None:
    for tiers in (["host:1MiB", "host:2MiB"], [f"disk:{tmp_path}:64MiB", "tape:1"], ["host:16"]):
        with pytest.raises(ValueError, match=r"host tiers were given|no known scheme|too small"):
            make_engine(tiny("llama"), POOL, tiers=tiers)
    engine = make_engine(tiny("llama"), POOL, tiers=[f"disk:{tmp_path}:64MiB"])  # its lock is free
    assert np.isfinite(served(engine, drawn("x", 5))[0].tokens).all()
    closed(engine)


class LateCopy:
    """A copy that ends after a few polls, or when a caller waits for it: like a copy on a GPU stream."""

    def __init__(self, copy: Callable[[], object], polls: int) -> None:
        self._copy, self._polls = copy, polls

    def query(self) -> bool:
        self._polls -= 1
        if self._polls == 0:
            self._copy()
        return self._polls <= 0

    def synchronize(self) -> None:
        while not self.query():
            pass

    wait = synchronize


def leave_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like on a GPU that computes while the engine waits: pages are offloaded early, in small pools too."""
    rng = random.Random(1)
    monkeypatch.setattr(room, "AHEAD", 2)
    monkeypatch.setattr(InflightStep, "is_ready", property(lambda flight: rng.random() < 0.3))


class LatePages(HostPages):
    """Host pages whose copies end late. Each instance draws the same delays, so that no test depends on another."""

    polls = 1, 9

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rng = random.Random(0)

    def wait(self, event: Any) -> None:
        event.synchronize()

    def offload(self, group: PageGroup, pages: Any, offsets: Any, age: int = 0) -> Any:
        return LateCopy(
            lambda: HostPages.offload(self, group, pages, offsets), self.rng.randrange(*self.polls)
        )

    def load(self, group: PageGroup, pages: Any, offsets: Any) -> Any:
        return LateCopy(lambda: HostPages.load(self, group, pages, offsets), self.rng.randrange(*self.polls))


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba", "qwen3_next"])
@pytest.mark.few(1)
def test_slow_copies_neither_overwrite_nor_read_other_pages(
    family: str, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_manager, "HostPages", LatePages)
    leave_early(monkeypatch)
    rng = random.Random(family)
    roots = drawn((family, "late roots"), 40, 33, 20)
    tails = drawn((family, "late"), *range(1, 25))
    prompts = [[*rng.choice(roots)[: rng.randrange(10, 40)], *tail] for tail in tails]
    wanted = expected(tiny(family), prompts, 6)
    slab = make_engine(tiny(family), POOL).layout.slab_bytes
    engine = make_engine(
        tiny(family), 24 * slab, token_budget=24, max_running=5, tiers=[f"host:4MiB?write={write}"],
        offload=PATIENT,
    )  # fmt: skip
    for _ in range(2):
        requests = [engine.add(prompt, greedy(6)) for prompt in prompts]
        steps = 0
        while engine.busy:
            engine.step()
            steps += 1
            assert steps < 20000
            if steps % 7 == 0:
                engine.cache.check()
        assert [request.tokens for request in requests] == wanted
    assert offload_of(engine).stats.loaded_tokens or engine.layout.of("state")
    while offload_of(engine).is_retaining_pages:
        offload_of(engine).poll()
    closed(engine)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("slabs", [20, 24, 28, 32])
@pytest.mark.few(2)
def test_returning_conversations_keep_their_loaded_pages(
    slabs: int, ahead: bool, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded pages would evict those of the next waiting request, scheduled in the same step; later, of one that waits for pages."""
    check_returning_conversations(slabs, ahead, LatePages if late else HostPages, monkeypatch)


def test_request_waits_while_other_loads_hold_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """With these delays no request runs while copies of other requests hold the pool. The request was recomputed."""

    class Drawn(LatePages):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.rng = random.Random(1)

    for slabs, ahead in ((20, False), (32, True)):
        check_returning_conversations(slabs, ahead, Drawn, monkeypatch)


def check_returning_conversations(
    slabs: int, ahead: bool, pages: type[HostPages], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_manager, "HostPages", pages)
    slab = make_engine(tiny("llama"), POOL).layout.slab_bytes
    engine = make_engine(
        tiny("llama"), slabs * slab, token_budget=256, max_running=16, ahead=ahead, tiers=["host:4MiB"], offload=PATIENT
    )  # fmt: skip
    first = [served(engine, [prompt], 4)[0] for prompt in drawn("turns", *[60] * 8)]
    prompts = [[*request.tokens, 5, 6, 7] for request in first]
    wanted = expected(tiny("llama"), prompts, 4)
    requests, steps = [engine.add(prompt, greedy(4)) for prompt in prompts], 0
    while engine.busy:
        engine.step()
        steps += 1
        assert steps < 2000
    assert [request.tokens for request in requests] == wanted
    assert min(request.cached_tokens or 0 for request in requests) >= 48
    while offload_of(engine).is_retaining_pages:
        offload_of(engine).poll()
    closed(engine)


def test_a_step_sleeps_while_copies_retain_the_pages_of_waiting_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(tiny("llama"), POOL, tiers=["host:4MiB"], offload=PATIENT)
    waits: list[float] = []
    (prompt,) = drawn("waits", 40)
    request = engine.add(prompt, greedy(4))
    with monkeypatch.context() as patch:
        patch.setattr(offload_of(engine), "wait", waits.append)
        patch.setattr(engine.scheduler, "schedule", lambda *_: [])  # as if the request lacked pages
        for _ in range(3):
            assert engine.step() == []
    assert len(waits) == 3
    assert all(wait > 0 for wait in waits)
    engine.run()
    assert request.tokens == expected(tiny("llama"), [prompt], 4)[0]
    closed(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba"])
@pytest.mark.slow
def test_pages_stay_in_full_host_memory_while_they_load(family: str) -> None:
    """The pool evicts pages into a full host memory, where the pages to be loaded are the oldest."""
    prompts = drawn((family, "in turns"), *[70] * 6)
    wanted = expected(tiny(family), prompts, 4)
    slab = make_engine(tiny(family), POOL).layout.slab_bytes
    landed = evicted = 0
    for places in (12, 16, 20, 24):
        engine = make_engine(
            tiny(family), 16 * slab, token_budget=64, max_running=2, tiers=[f"host:{places * slab}"], offload=PATIENT
        )  # fmt: skip
        for _ in range(3):
            assert [served(engine, [prompt], 4)[0].tokens for prompt in prompts] == wanted
        assert offload_of(engine).stats.failed_pages == 0
        evicted += offload_of(engine).host.stats().evicted
        landed += offload_of(engine).stats.loaded_tokens
        closed(engine)
    assert landed
    assert evicted


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.few(1)
def test_shared_pages_are_loaded_once(cancelled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_manager, "HostPages", LatePages)
    monkeypatch.setattr(LatePages, "polls", (20, 30))
    roots = drawn("roots of many", 64, 48)
    prompts = [[*roots[i % 2], *tail] for i, tail in enumerate(drawn("many", *[5] * 80))]
    wanted = expected(tiny("llama"), prompts, 4)
    engine = make_engine(tiny("llama"), POOL, max_running=80, tiers=["host:8MiB"], offload=PATIENT)
    served(engine, roots)
    engine.cache.grow(engine.cache.shrink(engine.cache.state.pool.slabs - 2).tolist())
    requests = [engine.add(prompt, greedy(4)) for prompt in prompts]
    engine.step()
    assert engine.scheduler.loading_count == engine.scheduler.waiting == len(prompts), (
        "no request computes pages that are being loaded"
    )
    if cancelled:  # those that load: others do then
        for request in requests[:2]:
            engine.cancel(request)
    engine.run()
    left = requests[2:] if cancelled else requests
    assert [request.tokens for request in left] == wanted[len(requests) - len(left) :]
    assert [request.cached_tokens for request in left] == [64, 48] * (len(left) // 2)
    assert offload_of(engine).stats.load_jobs == (4 if cancelled else 2)
    while offload_of(engine).is_retaining_pages:  # what came for those that were cancelled
        offload_of(engine).poll()
    closed(engine)


def test_request_scheduled_before_the_loading_one_hits_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_manager, "HostPages", LatePages)
    monkeypatch.setattr(LatePages, "polls", (20, 30))
    root = drawn("root of few", 64)[0]
    prompts = [[*root, *tail] for tail in drawn("few", *[5] * 7)]
    engine = make_engine(tiny("llama"), POOL, tiers=["host:8MiB"], offload=PATIENT)
    served(engine, [root])
    engine.cache.grow(engine.cache.shrink(engine.cache.state.pool.slabs - 2).tolist())
    requests = [engine.add(prompts[0], greedy(4))]
    engine.step()
    requests += [engine.add(prompt, greedy(4), priority=1) for prompt in prompts[1:]]
    engine.run()
    assert [request.tokens for request in requests] == expected(tiny("llama"), prompts, 4)
    assert [request.cached_tokens for request in requests] == [64] * 7
    assert offload_of(engine).stats.load_jobs == 1
    closed(engine)


@pytest.mark.parametrize("sooner", [False, True])
def test_loaded_pages_of_queued_requests_do_not_block_earlier_ones(
    sooner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request needs the pages reserved for loading requests after it, because it grew or ranks higher."""
    monkeypatch.setattr(offload_manager, "HostPages", LatePages)
    monkeypatch.setattr(LatePages, "polls", (50, 51))
    first, *others = drawn("in each other's way", 62, 40, 40, 40)
    model = tiny("llama", max_position_embeddings=512)
    wanted = [*expected(model, [first], 60), *expected(model, others, 4)]
    slab = make_engine(model, POOL).layout.slab_bytes
    engine = make_engine(
        model, (9 if sooner else 11) * slab, token_budget=64, tiers=["host:8MiB"], offload=PATIENT
    )
    served(engine, others, 4)
    engine.cache.grow(engine.cache.shrink(engine.cache.state.pool.slabs - 2).tolist())
    requests = [] if sooner else [engine.add(first, greedy(60))]
    engine.step()
    requests += [engine.add(prompt, greedy(4)) for prompt in others]
    if sooner:
        engine.step()
        requests.insert(0, engine.add(first, greedy(60), priority=1))
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        assert steps < 1000
    assert [request.tokens for request in requests] == wanted
    assert offload_of(engine).stats.loaded_tokens
    closed(engine)


def test_a_tier_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    tiers = [f"disk:{tmp_path}:64MiB"]
    first = make_engine(tiny("llama"), POOL, tiers=tiers)
    with pytest.raises(ValueError, match=r"disk:.* cannot be used: .*; correct it, or add optional=1"):
        make_engine(tiny("llama"), POOL, tiers=tiers)  # two on one directory
    with pytest.raises(ValueError, match="cannot be used"), opened_tiers(tiers):
        pass
    closed(first)
    with pytest.raises(RuntimeError), opened_tiers(tiers):
        raise RuntimeError  # loading failed: the tier is closed again
    with opened_tiers(["host:8MiB", *tiers, "redis://127.0.0.1:1?capacity=1MiB&optional=1"]) as found:
        assert [isinstance(one, str) for one in found] == [True, False, True]
    second = make_engine(tiny("llama"), POOL, tiers=found[:2])
    closed(second)


def test_unavailable_tier_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = [f"disk:{tmp_path}:64MiB?optional=1"]
    first = make_engine(tiny("llama"), POOL, tiers=tiers)
    second = make_engine(tiny("llama"), POOL, tiers=tiers)  # two on one directory
    assert "is left out, serving goes on without it" in caplog.text
    prompts = drawn("two", 40)
    assert [r.tokens for r in served(first, prompts)] == [r.tokens for r in served(second, prompts)]
    closed(first)
    closed(second)


def test_unavailable_tier_is_used_once_it_opens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(away, "FIRST_PAUSE", 0.05)
    tiers = [f"disk:{tmp_path}:64MiB?optional=1"]
    first = make_engine(tiny("llama"), POOL, tiers=tiers)
    second = make_engine(tiny("llama"), POOL, tiers=tiers)
    (lane,) = offload_of(second).transfers.queues
    prompts = drawn("away", 40)
    served(second, prompts)  # fails to keep them, and says so
    assert not lane.tier.stats().objects
    closed(first)
    deadline = time.monotonic() + 20
    while "is available now" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert lane.tier.capacity
    others = drawn("away again", 50)
    while not lane.tier.stats().objects:  # once its breaker tries it again
        assert time.monotonic() < deadline
        served(second, others)
        second.cache.grow(second.cache.shrink(second.cache.state.pool.slabs - 2).tolist())
        others = [[*others[0], len(others[0])]]
        time.sleep(0.1)
    closed(second)
    third = make_engine(tiny("llama"), POOL, tiers=tiers)  # its lock was let go
    assert not offload_of(third).unavailable
    closed(third)


def test_unavailable_tier_closes_with_its_engine(tmp_path: Path) -> None:
    first = make_engine(tiny("llama"), POOL, tiers=[f"disk:{tmp_path}:64MiB"])
    second = make_engine(tiny("llama"), POOL, tiers=[f"disk:{tmp_path}:64MiB?optional=1"])
    closed(second)
    closed(first)
    third = make_engine(tiny("llama"), POOL, tiers=[f"disk:{tmp_path}:64MiB"])
    assert not offload_of(third).unavailable
    closed(third)


def test_miss_in_host_memory_costs_one_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    plan = Loading.plan

    def counted(loading: Loading, match: Match) -> LoadPlan:
        made.append(match.resume)
        return plan(loading, match)

    monkeypatch.setattr(Loading, "plan", counted)
    prompts = drawn("one look", 70, 50, 90)
    wanted = expected(tiny("llama"), prompts, 8)
    engine = make_engine(tiny("llama"), POOL, tiers=["host:8MiB?write=through"], offload=PATIENT)
    assert [request.tokens for request in served(engine, prompts)] == wanted
    again = served(
        engine, [[*prompts[0][:40], 5, 6, 7], *prompts[1:]]
    )  # the pool has more of them than host memory
    assert offload_of(engine).stats.offloaded_pages
    assert not made
    assert all(request.looked_in_tiers is not None for request in again)
    engine.cache.grow(engine.cache.shrink(engine.cache.state.pool.slabs - 2).tolist())
    found = served(engine, prompts)
    assert [request.tokens for request in found] == wanted
    assert [request.cached_tokens for request in found] == [64, 48, 80]
    assert len(made) == 3
    closed(engine)


@pytest.mark.parametrize("length", [50, 57, 64, 65, 90])
@pytest.mark.few(3)
def test_an_identical_prompt_resumes_from_host_memory_with_windows(length: int) -> None:
    prompt, *others = drawn(length, length, 60, 60, 60, 60, 60, 60)
    model = tiny("gemma3_text")
    pool = 3 * make_engine(model, 1 << 22).layout.slab_bytes_for(96)
    engine = make_engine(model, pool, tiers=["host:8MiB"], offload=PATIENT)
    [first] = served(engine, [prompt])
    for other in others:
        served(engine, [other])
    assert engine.cache.match(np.array(prompt, np.int32)).resume == 0, "the pages were evicted"
    [again] = served(engine, [prompt])
    assert again.tokens == first.tokens
    assert again.cached_tokens is not None
    assert again.cached_tokens >= (length - 1) // 16 * 16
    closed(engine)

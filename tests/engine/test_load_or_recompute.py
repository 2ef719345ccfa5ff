"""An engine computes the start of a prompt while a tier loads its end. The test controls the tier and the clock. Checked
are the computed tokens, the waits, and that every token is right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvloom.core import CacheControl
from kvloom.engine import OffloadConfig, Request, SamplingParams
from kvloom.engine.offload import manager, pool_loader, saved_state
from kvloom.tiers import DiskConfig, DiskTier, Objects, OpenTier
from kvloom.tiers.testing import Faults, FaultyTier
from kvloom.tiers.transfers import TierQueueConfig, TransferConfig
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

LENGTH = 400
EACH = 0.001
"""Simulated seconds to compute a token."""
PARAMS = SamplingParams(max_tokens=4, temperature=0)


def model(family: str) -> Any:
    return tiny(family, max_position_embeddings=512)


def prompt() -> list[int]:
    return [3 + (7 * i * i + i) % 60 for i in range(LENGTH)]


class Rig:
    """An engine with a disk that has a prompt's pages, and delivers one chunk for each `let`."""

    def __init__(self, family: str, path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.prompt = prompt()
        self.expected = expected(model(family), [self.prompt], 4)[0]
        first = make_engine(model(family), 1 << 22, tiers=[f"disk:{path}:64MiB"])
        first.add(self.prompt, PARAMS)
        first.run()
        first.close()
        (path / saved_state.SPEEDS).unlink()  # the tests set the speeds
        self.gate, self.now, self.waited = threading.Semaphore(0), 100.0, 0.0
        self.computed: list[int] = []
        faults = Faults(tamper=lambda objects: self.gate.acquire() and None)
        self.tier = tier = FaultyTier(DiskTier(DiskConfig(path, 64 << 20)), faults)
        lane = TierQueueConfig(max_inflight_bytes=1)  # one read at a time, so that they come in their order
        offload = OffloadConfig(
            deadline_seconds=(60.0, 60.0), transfers=TransferConfig(lookup_seconds=60.0, queue=lane)
        )
        tiers: list[str | OpenTier] = ["host:16MiB", OpenTier(tier)]
        self.engine = make_engine(model(family), 1 << 22, tiers=tiers, offload=offload, **options)
        assert self.engine.offload is not None
        self.offload, run = self.engine.offload, self.engine.runner.run
        for _ in range(4):
            self.offload.observe_prefill(64, 64 * EACH)
        monkeypatch.setattr(self.offload, "observe_prefill", lambda tokens, seconds: None)
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=time.perf_counter, sleep=time.sleep)
        for module in (manager, pool_loader):
            monkeypatch.setattr(module, "time", clock)

        def counted(works: Sequence[Any], *rest: Any) -> Any:
            self.computed += [len(work.tokens) for work in works]
            return run(works, *rest)

        monkeypatch.setattr(self.engine.runner, "run", counted)

    def believe(self, ratio: float) -> None:
        """Set the engine's estimate: the disk delivers tokens `ratio` times as fast as they are computed."""
        full = sum(g.unit_bytes for g in self.engine.layout.of("token") if not g.spec.visibility.windowed)
        lane = self.offload.transfers.queues[0]
        lane.throughput.bytes_per_second, lane.lookup_latency = ratio * full / EACH, 0.0
        lane.throughput.record = lambda size, began, now: None  # type: ignore[method-assign]

    def add(self, control: CacheControl | None = None) -> Request:
        """Add a request, and wait until its pages are found."""
        request = self.engine.add(self.prompt, PARAMS, control)
        self.until(lambda: self.offload._jobs[request].lookup.is_complete)
        return request

    def until(self, done: Callable[[], object]) -> None:
        """Wait in real time, for threads; the simulated clock does not advance."""
        ends = time.monotonic() + 60
        while not done():
            self.offload.poll()
            assert time.monotonic() < ends
            time.sleep(0.001)

    def let(self, request: Request, tokens: int) -> None:
        """Deliver pages until `tokens` tokens of the prompt's end are loaded."""
        transfer = self.offload._jobs[request].transfer
        while transfer.loaded_from > LENGTH - tokens:
            before = transfer.loaded_from
            self.gate.release(sum(len(fetch._loads) for fetch in transfer.chunks[0].fetches))
            self.until(lambda before=before: transfer.loaded_from < before)  # type: ignore[misc]

    def step(self) -> None:
        """Run one step, which takes its simulated time; a millisecond without work."""
        before = sum(self.computed)
        self.engine.step()
        took = sum(self.computed) - before
        self.now += took * EACH or 0.001
        self.waited += 0 if took else 0.001

    def ends(self, request: Request) -> None:
        """Check that the request finishes with the right tokens, and that no page or job remains."""
        while request.finish_reason is None:
            self.step()
            assert self.now < 110
        self.engine.run()
        assert request.tokens == self.expected
        self.tier.faults.tamper = None
        self.gate.release(1000)
        self.engine.cache.take_copies()
        self.engine.cache.check()
        assert self.engine.cache.stats()["in_use_pages"] == 0
        self.engine.close()

    @property
    def prefilled(self) -> int:
        return sum(self.computed) - 3  # of the four tokens, the first comes with the prompt


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    return lambda family="llama", **options: Rig(family, tmp_path, monkeypatch, **options)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_loaded_tail_is_not_computed(family: str, rig: Callable[..., Rig]) -> None:
    one = rig(family, token_budget=64)
    one.believe(0.5)
    request = one.add()
    while request.computed < 192:
        one.step()
    one.let(request, LENGTH - 256)
    one.ends(request)
    landed = one.offload.stats.loaded_tokens
    assert landed >= LENGTH - 256 - 16
    assert one.prefilled <= 256 + 1
    assert one.prefilled + landed == LENGTH or one.engine.layout.of(
        "state"
    )  # it had no snapshot to go on from
    assert request.cached_tokens == landed == sum(request.hits.values())
    assert request.pool_miss is not None
    # The lookup ended behind the loaded tail, not where the pool ended at the start.
    assert request.pool_miss.reason in ("complete", "never seen")
    assert max(landed, LENGTH - 17) <= request.pool_miss.position < LENGTH


def test_step_after_the_meeting_point_waits_for_the_tail(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that computes while its host goes on a step is decided while the one before it runs: the last one of the
    head is still being computed then, and the tail should be there when it is over."""
    one = rig(token_budget=128, ahead=True)
    one.believe(0.6)  # they should meet at 256
    land = one.engine.output_processor.process

    def landed(*given: Any) -> Any:
        one.now += 128 * EACH
        return land(*given)

    monkeypatch.setattr(one.engine.output_processor, "process", landed)
    request = one.add()
    for _ in range(2):
        one.engine.step()
    assert one.computed[0] == 128
    met = sum(one.computed)
    assert 208 <= met <= 288, one.computed
    one.let(request, 80)  # the first step is over: half of the tail has come
    one.engine.step()
    assert sum(one.computed) == met, "it computes what it loads"
    one.let(request, LENGTH - met)
    one.ends(request)
    assert one.prefilled + one.offload.stats.loaded_tokens == LENGTH
    assert one.offload.stats.loaded_tokens >= LENGTH - met - 16


@pytest.mark.parametrize("believed", [3.0, 100.0])
def test_stalled_tier_costs_a_bounded_wait(believed: float, rig: Callable[..., Rig]) -> None:
    one = rig(token_budget=512)
    one.believe(believed)
    request = one.add()
    one.ends(request)
    strip = LENGTH / 32 * EACH / believed
    assert one.waited > 0 or believed < 10  # else it computes at once
    assert one.waited <= max(0.04 * LENGTH * EACH, 2 * 2 * strip) + 0.003
    assert one.prefilled == LENGTH
    assert len(one.computed) - 3 <= 6


def test_head_is_copied_from_host_memory_while_the_tail_loads(rig: Callable[..., Rig]) -> None:
    one = rig(token_budget=64)
    cache, host = one.engine.cache, one.offload.host
    one.engine.add(one.prompt[:200], PARAMS)  # a prompt that begins alike, whose pages left the pool since
    one.gate.release(1000)
    one.engine.run()
    slabs = cache.shrink(cache.state.pool.slabs - 2)
    one.engine.apply_copies()
    cache.grow(slabs.tolist())
    names = cache.loading.plan(cache.match(np.array(one.prompt, np.int32))).hashes
    for group in one.engine.layout.groups:
        for form in one.offload.forms[group.index]:
            assert host.lookup(Objects(names[:12], group.index, form)).all()
            host.drop(Objects(names[12:], group.index, form))
    one.gate, one.computed = threading.Semaphore(0), []
    one.believe(0.5)
    request = one.add()
    while not one.computed:
        one.step()
    assert request.cached_tokens == 192, "it computes what lies in host memory"
    one.let(request, 64)
    one.ends(request)
    assert one.prefilled + request.cached_tokens == LENGTH
    assert request.cached_tokens >= 192 + 48


@pytest.mark.parametrize("believed", [0.5, 100.0])
def test_request_without_store_loads_or_computes_everything(believed: float, rig: Callable[..., Rig]) -> None:
    """Pages of its head do not stay cached until the tail is loaded: it loads all, or computes all."""
    one = rig(token_budget=64)
    one.believe(believed)
    request = one.add(CacheControl(store=False))
    one.step()
    assert (request.computed == 0) == (believed > 1)
    if believed > 1:
        one.let(request, LENGTH)
    one.ends(request)
    assert one.prefilled == (1 if believed > 1 else LENGTH)


def test_hung_lookup_costs_a_bounded_wait(rig: Callable[..., Rig]) -> None:
    one = rig(token_budget=512)
    lookup, answered = one.tier.lookup, threading.Event()
    one.tier.lookup = lambda objects: answered.wait(60) and lookup(objects)  # type: ignore[assignment, method-assign, return-value]
    request = one.engine.add(one.prompt, PARAMS)
    while request.finish_reason is None:
        one.step()
    answered.set()
    one.ends(request)
    assert 0 < one.waited <= 0.04 * LENGTH * EACH + 0.003
    assert one.prefilled == LENGTH


def test_load_ends_once_the_prompt_is_computed(rig: Callable[..., Rig]) -> None:
    """The prompt is computed and the request decodes: a slow disk should serve others."""
    one = rig(token_budget=512)
    one.believe(0.2)
    request = one.add()
    while not request.output_count:
        one.step()
    one.step()
    assert not one.offload._jobs
    one.ends(request)

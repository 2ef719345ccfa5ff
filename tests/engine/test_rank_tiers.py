"""Tiers on several ranks: a page in a tier is a page of the whole model, and is complete or not there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvloom.core import LayerSpec, PoolLayout, TensorPart, attention_fields
from kvloom.engine import LLM, Engine, Request, SamplingParams
from kvloom.engine.parallel import RankGroup
from kvloom.engine.parallel.host_copies import HostCopies, RankHost
from kvloom.engine.parallel.messages import CopyHost
from kvloom.models.sharding import RankError
from kvloom.tiers import DiskConfig, DiskTier, OpenTier
from kvloom.tiers.testing import Faults, FaultyTier
from tests.engine.test_hand_over import address_of, finished, step_until
from tests.engine.test_offload import PATIENT, QUICK, drawn, greedy, offload_of, served
from tests.engine.test_tensor_parallel import POOL, made
from tests.engine.thread_ranks import ThreadRanks, parallel_engine
from tests.engines import make_engine
from tests.models.zoo import expected
from tests.tiers.servers import redis_server


def stored(engine: Engine) -> None:
    """Wait until all ranks have made their copies, and the tiers have all pages."""
    ends = time.monotonic() + 60
    manager = offload_of(engine)
    manager.flush()
    while time.monotonic() < ends and (
        manager._store.busy or any(queue.pending_store_bytes for queue in manager.transfers.queues)
    ):
        manager.poll()
        time.sleep(0.002)
    assert not manager._store.busy


def closed(engine: Engine) -> None:
    """Check that no page is lost or in use and no rank has failed, and close the engine."""
    stored(engine)
    engine.cache.take_copies()
    engine.cache.check()
    assert engine.cache.stats()["in_use_pages"] == 0
    assert isinstance(engine.group, ThreadRanks)
    assert not engine.group.errors
    engine.close()


def tokens_of(requests: list[Request]) -> list[list[int]]:
    return [request.tokens for request in requests]


@pytest.mark.server
def test_restart_loads_pages_of_all_ranks_from_redis(tmp_path: Path) -> None:
    prompts = drawn("ranks, redis", 70, 50)
    wanted = tokens_of(served(make_engine(made("llama"), POOL), prompts))
    with redis_server(tmp_path) as (port, _):
        for cached in ([0, 0], [64, 48]):
            engine = parallel_engine(
                made("llama"),
                2,
                pool_bytes=POOL,
                tiers=["host:8MiB", f"redis://127.0.0.1:{port}?capacity=64MiB"],
                offload=PATIENT,
            )
            requests = served(engine, prompts)
            assert tokens_of(requests) == wanted
            assert [request.cached_tokens for request in requests] == cached
            closed(engine)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "count", "settings"),
    [
        ("llama", 2, {}),
        ("llama", 4, {"block_tokens": 32}),
        ("llama", 2, {"kv_dtype": "int8"}),
        ("gemma3_text", 2, {"block_tokens": 64}),
        ("bamba", 2, {}),
        ("bamba", 2, {"block_tokens": 32}),
        ("qwen3_next", 2, {}),
        ("deepseek_v3", 2, {}),
    ],
    ids=str,
)
def test_restart_loads_pages_of_all_ranks_from_disk(
    family: str, count: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    prompts = drawn(family, 70, 50, 90)
    wanted = tokens_of(served(make_engine(made(family), POOL, **settings), prompts))
    block = settings.get("block_tokens", 16)
    for round_ in range(2):
        engine = parallel_engine(
            made(family),
            count,
            pool_bytes=POOL,
            tiers=["host:8MiB", f"disk:{tmp_path}:64MiB"],
            offload=PATIENT,
            **settings,
        )
        requests = served(engine, prompts)
        assert tokens_of(requests) == wanted
        for request in requests:
            found = (len(request.prompt) - 1) // block * block
            assert (request.cached_tokens or 0) >= (found if round_ else 0)
            assert round_ or (request.cached_tokens or 0) < 16
        closed(engine)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "kimi_linear"])
def test_latents_are_stored_once_and_loaded_by_all_ranks(family: str, tmp_path: Path) -> None:
    prompts = drawn(family, 70, 50)
    wanted = expected(made(family), prompts, 8)
    whole = make_engine(made(family), POOL, tiers=["host:8MiB"])
    sizes = {
        group: [form.page_bytes for form in forms]
        for group, forms in offload_of(whole).forms.items()
        if whole.layout.groups[group].spec.unit == "token"
    }
    whole.close()
    for round_ in range(2):
        tiers = ["host:8MiB", f"disk:{tmp_path}:64MiB"]
        engine = parallel_engine(made(family), 2, pool_bytes=POOL, tiers=tiers, offload=PATIENT)
        forms = offload_of(engine).forms
        assert {group: [form.page_bytes for form in forms[group]] for group in sizes} == sizes
        requests = served(engine, prompts)
        assert tokens_of(requests) == wanted
        assert all((request.cached_tokens or 0) >= 32 for request in requests) == bool(round_)
        closed(engine)


@pytest.mark.parametrize("write", ["back", "through"])
@pytest.mark.parametrize(("family", "pool_bytes"), [("llama", 24 * 4096), ("bamba", 10 * 9216)])
@pytest.mark.few(1)
def test_pages_evicted_to_host_memory_are_loaded_on_all_ranks(
    family: str, pool_bytes: int, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of few pages preempts and evicts, while the slow copies of another rank are still running."""
    copy = RankHost._copy

    def slow(host: RankHost, message: CopyHost) -> Any:
        time.sleep(0.002)
        return copy(host, message)

    monkeypatch.setattr(RankHost, "_copy", slow)
    roots = drawn(family, 60, 50, 40)
    prompts = [[*root, *tail] for tail in drawn((family, 1), 3, 9, 20, 31) for root in roots]
    wanted = expected(made(family), prompts, 8)
    engine = parallel_engine(
        made(family),
        2,
        pool_bytes=pool_bytes,
        max_running=3,
        tiers=[f"host:8MiB?write={write}"],
        offload=PATIENT,
        ahead=True,
    )
    for _ in range(2):
        assert tokens_of(served(engine, prompts)) == wanted
    assert offload_of(engine).stats.loaded_tokens
    closed(engine)


def test_a_page_with_a_damaged_part_of_one_rank_is_recomputed_on_all(tmp_path: Path) -> None:
    (prompt,) = drawn("damage", 70)
    wanted = expected(made("llama"), [prompt], 8)
    tiers = [f"disk:{tmp_path}:64MiB"]
    engine = parallel_engine(made("llama"), 2, pool_bytes=POOL, tiers=tiers, offload=PATIENT)
    request = engine.add(prompt, SamplingParams(max_tokens=8, temperature=0))
    while not request.computed:
        engine.step()
    assert request.sequence is not None
    assert isinstance(engine.group, ThreadRanks)
    group, whole = engine.layout.groups[0], engine.layout.whole().groups[0]
    first = TensorPart(1, 2).ranges(group, whole)[0]
    at = int(request.sequence.table(0).ravel()[1]) * group.page_stride + first.own
    part = engine.group.pools[1][at : at + first.size].numpy().tobytes()
    engine.run()
    assert tokens_of([request]) == wanted
    closed(engine)

    files = [path for path in tmp_path.rglob("*") if path.is_file() and part in path.read_bytes()]
    assert len(files) == 1, "the part of rank 1 is not on disk"
    data = bytearray(files[0].read_bytes())
    data[data.index(part) + len(part) // 2] ^= 1
    files[0].write_bytes(data)

    engine = parallel_engine(made("llama"), 2, pool_bytes=POOL, tiers=tiers, offload=PATIENT)
    requests = served(engine, [prompt])
    assert tokens_of(requests) == wanted
    assert requests[0].cached_tokens == 16  # the first block; the damaged page is in the second
    assert offload_of(engine).transfers.fault_log.counts
    closed(engine)


def test_pages_of_a_slow_tier_are_recomputed_after_the_deadline(tmp_path: Path) -> None:
    prompts = drawn("slow", 70, 50)
    wanted = expected(made("llama"), prompts, 8)
    faults = Faults()
    for round_ in range(2):
        tier = FaultyTier(DiskTier(DiskConfig(tmp_path, 64 << 20)), faults)
        engine = parallel_engine(
            made("llama"), 2, pool_bytes=POOL, tiers=[OpenTier(tier, "through")], offload=QUICK
        )
        assert tokens_of(served(engine, prompts)) == wanted
        assert not offload_of(engine).stats.loaded_tokens
        if not round_:
            closed(engine)
            faults.slow = 1.0
    faults.slow = 0.0
    closed(engine)


@pytest.mark.slow
def test_hashes_cover_the_weights_of_all_ranks(tmp_path: Path) -> None:
    """Two models that differ only in the part of rank 1 must not share pages."""
    (prompt,) = drawn("weights", 70)
    for changed in (False, True):
        model = made("llama")
        if changed:
            model.model.layers[0].self_attn.v_proj.weight.data[-1] += 1
        wanted = expected(model, [prompt], 8)
        tiers = [f"disk:{tmp_path}:64MiB"]
        engine = parallel_engine(model, 2, pool_bytes=POOL, tiers=tiers, offload=PATIENT)
        requests = served(engine, [prompt])
        assert tokens_of(requests) == wanted
        assert requests[0].cached_tokens == 0
        closed(engine)


@pytest.mark.slow
@pytest.mark.parametrize("block_tokens", [16, 32])
def test_a_tier_that_re_encodes_pages_works_on_ranks(block_tokens: int, tmp_path: Path) -> None:
    """Values in int8 differ a little, so only the load is checked."""
    from kvloom.core import CacheControl

    (prompt,) = drawn("lossy", 100)
    for round_ in range(2):
        engine = parallel_engine(
            made("llama"),
            2,
            pool_bytes=POOL,
            tiers=[f"int8:disk:{tmp_path}:64MiB"],
            offload=PATIENT,
            block_tokens=block_tokens,
        )
        request = engine.add(prompt, SamplingParams(max_tokens=4, temperature=0), CacheControl(lossy=True))
        engine.run()
        assert request.cached_tokens == (96 if round_ else 0)
        closed(engine)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_a_worker_with_two_ranks_hands_over_pages_to_another(family: str) -> None:
    (prompt,) = drawn(("hand-over", family), 110)
    wanted = expected(made(family), [prompt], 8)
    common: dict[str, Any] = {"pool_bytes": POOL, "offload": PATIENT}
    first = parallel_engine(
        made(family), 2, tiers=["host:16MiB?share=0&checked=1"], token_budget=32, **common
    )
    peer = address_of(first)
    second = parallel_engine(made(family), 2, tiers=[f"peer://{peer}?timeout=30"], **common)
    got = second.add(prompt, greedy(8), awaits_peer=peer)
    step_until(lambda: second.scheduler.loading_count == 1, second)
    given = first.add(prompt, greedy(1), offers_pages=True)

    def is_done() -> bool:
        offload_of(first).poll()  # as a server does while it is idle
        return finished(given, got)()

    step_until(is_done, first, second)
    assert [got.tokens] == wanted
    assert offload_of(second).stats.hand_overs == 1
    assert (got.cached_tokens or 0) >= 96
    closed(second)
    closed(first)


@pytest.mark.slow
def test_no_rank_starts_if_host_memory_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("llama").save_pretrained(tmp_path)
    started = []
    start = RankGroup.__init__
    monkeypatch.setattr(
        RankGroup, "__init__", lambda *given, **named: (started.append(1), start(*given, **named))[1]
    )
    with pytest.raises(ValueError, match="host tier of 4,096 bytes is too small"):
        LLM(
            str(tmp_path),
            tensor_parallel=2,
            device="cpu",
            dtype="float32",
            pool_bytes=POOL,
            tiers=["host:4KiB"],
        )
    assert not started


def test_a_copy_that_a_rank_does_not_finish_in_time_stops_the_group() -> None:
    failures: list[str] = []
    copies = HostCopies(
        3, lambda _: None, failures.append, lambda: failures[0] if failures else None, seconds=0.05
    )
    ids, (group,) = (
        np.zeros(1, np.int64),
        PoolLayout.build({"0": LayerSpec("token", attention_fields(2, 16, "fp32"))}).groups,
    )
    first, second = copies.offload(group, ids, ids), copies.load(group, ids, ids)
    copies.copied(1, 2)
    copies.copied(2, 1)
    assert copies.is_done(first)
    assert not copies.is_done(second)
    time.sleep(0.1)
    with pytest.raises(RankError, match="rank 2 has not copied pages in time"):
        copies.check()
    assert copies.has_failed
    with pytest.raises(RankError):
        copies.offload(group, ids, ids)


def test_a_request_longer_than_the_pool_is_refused_with_a_reason() -> None:
    engine = parallel_engine(made("llama"), 2, pool_bytes=4 * 4096, tiers=["host:8MiB"])
    try:
        with pytest.raises(ValueError, match="ranks have parts of them"):
            engine.add(drawn("long", 100)[0], SamplingParams(max_tokens=4))
    finally:
        engine.close()


@pytest.mark.slow
def test_processes_of_a_new_group_load_what_a_killed_group_stored(tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path / "model")
    prompts = drawn("killed", 70, 50)
    wanted = expected(made("llama"), prompts, 8)
    params = SamplingParams(max_tokens=8, temperature=0)
    for round_ in range(2):
        llm = LLM(
            str(tmp_path / "model"),
            tensor_parallel=2,
            device="cpu",
            dtype="float32",
            pool_bytes=POOL,
            tiers=["host:8MiB", f"disk:{tmp_path / 'tier'}:64MiB"],
            offload=PATIENT,
        )
        try:
            found = llm.generate(prompts, params)
            assert [[*p, *r.outputs[0].token_ids] for p, r in zip(prompts, found, strict=True)] == wanted
            assert [r.num_cached_tokens for r in found] == ([64, 48] if round_ else [0, 0])
            stored(llm.engine)
            assert llm.engine.group is not None
            rank = llm.engine.group.processes[0]
            os.kill(rank.pid, signal.SIGKILL)
            rank.wait(30)
            with pytest.raises(RankError, match=r"has stopped|restart the engine"):
                llm.generate(drawn("other", 60), params)
        finally:
            llm.close()

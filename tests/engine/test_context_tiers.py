"""Tiers with context parallelism: a page in a tier is the page of one rank, and is complete or not there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.core import CacheControl, ContextPart, PoolLayout, TensorPart
from kvloom.engine import LLM, Engine, SamplingParams
from kvloom.engine.offload import HostPages
from kvloom.engine.parallel.host_copies import RankHost
from kvloom.engine.parallel.messages import CopyHost
from kvloom.kernels.memory import layer_views
from kvloom.models.sharding import RankError
from kvloom.models.specs import model_spec
from tests.engine.test_hand_over import address_of, finished, step_until
from tests.engine.test_offload import PATIENT, drawn, greedy, offload_of, served
from tests.engine.test_quantised import calibrated
from tests.engine.test_rank_tiers import closed, stored, tokens_of
from tests.engine.test_tensor_parallel import POOL, made
from tests.engine.thread_ranks import ThreadRanks, context_engine, grid_engine
from tests.engines import make_engine
from tests.models.zoo import expected, tiny
from tests.tiers.servers import redis_server


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "count", "settings"),
    [
        ("llama", 2, {}),
        ("bamba", 2, {}),
        ("llama", 4, {"block_tokens": 32}),
        ("llama", 2, {"kv_dtype": "int8"}),
        ("gemma3_text", 2, {}),
        ("gemma3_text", 4, {"block_tokens": 64}),
        ("qwen3_next", 2, {}),
        ("deepseek_v3", 4, {}),
        ("mamba2", 2, {}),
        ("llama4_text", 2, {"block_tokens": 32}),
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
        engine = context_engine(
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


@pytest.mark.server
def test_restart_loads_pages_of_all_ranks_from_redis(tmp_path: Path) -> None:
    prompts = drawn("context ranks, redis", 70, 50)
    wanted = tokens_of(served(make_engine(made("llama"), POOL), prompts))
    with redis_server(tmp_path) as (port, _):
        for cached in ([0, 0], [64, 48]):
            engine = context_engine(
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


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba", "deepseek_v3"])
def test_pages_in_tiers_have_the_form_of_one_rank(family: str) -> None:
    whole = make_engine(made(family), POOL, tiers=["host:8MiB"])
    engine = context_engine(made(family), 2, pool_bytes=POOL, tiers=["host:8MiB"])
    try:
        assert offload_of(engine).forms == offload_of(whole).forms
    finally:
        engine.close()
        whole.close()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "slabs", "write"),
    [("llama", 24, "back"), ("bamba", 12, "through"), ("gemma3_text", 16, "back")],
)
def test_pages_evicted_to_host_memory_are_loaded_on_all_ranks(
    family: str, slabs: int, write: str, monkeypatch: pytest.MonkeyPatch
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
    probe = context_engine(made(family), 2, pool_bytes=POOL)
    slab = probe.layout.slab_bytes
    probe.close()
    engine = context_engine(
        made(family),
        2,
        pool_bytes=slabs * slab,
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
    engine = context_engine(made("llama"), 2, pool_bytes=POOL, tiers=tiers, offload=PATIENT)
    request = engine.add(prompt, SamplingParams(max_tokens=8, temperature=0))
    while not request.computed:
        engine.step()
    assert request.sequence is not None
    assert isinstance(engine.group, ThreadRanks)
    group, whole = engine.layout.groups[0], engine.layout.whole().groups[0]
    first = TensorPart().ranges(group, whole, ContextPart(1, 2))[0]
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

    engine = context_engine(made("llama"), 2, pool_bytes=POOL, tiers=tiers, offload=PATIENT)
    requests = served(engine, [prompt])
    assert tokens_of(requests) == wanted
    assert requests[0].cached_tokens == 16  # the first block; the damaged page is in the second
    assert offload_of(engine).transfers.fault_log.counts
    closed(engine)


ENGINES = {"one": (1, 1), "context 2": (1, 2), "context 4": (1, 4), "weights 2": (2, 1), "both": (2, 2)}
"""The number of parts of the weights and of the context."""


def engine_of(family: str, parts: tuple[int, int], **settings: Any) -> Engine:
    settings = {"offload": PATIENT, **settings}
    if parts == (1, 1):
        return make_engine(made(family), POOL, **settings)
    return grid_engine(made(family), *parts, pool_bytes=POOL, **settings)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "settings", "engines"),
    [
        ("llama", {}, tuple(ENGINES)),
        ("llama", {"kv_dtype": "int8", "block_tokens": 32}, ("context 4", "one", "both")),
        ("gemma3_text", {}, ("one", "context 2", "both")),
        ("bamba", {}, ("both", "one", "context 2", "weights 2")),
        ("qwen3_next", {"block_tokens": 32}, ("context 2", "one", "weights 2")),
        ("deepseek_v3", {}, ("context 4", "both", "one")),
    ],
    ids=str,
)
def test_engines_with_any_number_of_ranks_share_pages(
    family: str, settings: dict[str, Any], engines: tuple[str, ...], tmp_path: Path
) -> None:
    """Each engine loads a prompt of every earlier engine, and stores its own."""
    prompts: list[list[int]] = []
    wanted: list[list[int]] = []
    block = settings.get("block_tokens", 16)
    for name in engines:
        (own,) = drawn((family, name), 70)
        prompts.append(own)
        wanted += tokens_of(served(make_engine(made(family), POOL, **settings), [own]))
        engine = engine_of(family, ENGINES[name], tiers=[f"disk:{tmp_path}:64MiB"], **settings)
        requests = served(engine, prompts)
        assert tokens_of(requests) == wanted
        *cached, new = (request.cached_tokens or 0 for request in requests)
        assert new < 16
        assert all(tokens >= 69 // block * block for tokens in cached)
        stored(engine)
        engine.close()


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_the_parts_of_all_ranks_are_the_page_of_one_rank(family: str, kv_dtype: str, count: int) -> None:
    layers = model_spec(
        tiny(family).config.to_dict(), kv_dtype=None if kv_dtype == "auto" else kv_dtype
    ).layers
    whole = PoolLayout.build(layers)
    draw = torch.Generator().manual_seed(1)
    page = torch.randint(64, (whole.slab_bytes,), generator=draw, dtype=torch.uint8)  # no bytes of a NaN
    for group in whole.groups:
        found = torch.zeros_like(page)
        for rank in range(count):
            own = PoolLayout.build(layers, part=ContextPart(rank, count))
            assert own.whole() == whole
            part, views = torch.zeros(own.slab_bytes, dtype=torch.uint8), layer_views(page, whole)
            for name, view in layer_views(part, own).items():
                for field, x in view.fields.items() if name in group.layers else ():
                    tokens = x.shape[1]
                    first = rank * tokens if tokens < 16 else 0
                    x[0] = views[name].fields[field][0, first : first + tokens]
            mine, zero = own.groups[group.index], np.zeros(1, np.int64)
            HostPages(own, part, found.numpy()).offload(mine, zero, zero)
            loaded = torch.zeros_like(part)
            HostPages(own, loaded, page.numpy()).load(mine, zero, zero)
            assert torch.equal(loaded[: mine.page_bytes], part[: mine.page_bytes])
        assert torch.equal(found[: group.page_bytes], page[: group.page_bytes])


@pytest.mark.slow
@pytest.mark.parametrize("block_tokens", [16, 32])
def test_a_tier_that_re_encodes_pages_works_on_ranks(block_tokens: int, tmp_path: Path) -> None:
    """Values in int8 differ a little, so only the load is checked."""
    (prompt,) = drawn("lossy", 100)
    for round_ in range(2):
        engine = context_engine(
            made("gemma3_text"),
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
@pytest.mark.parametrize(
    ("family", "giver", "taker"),
    [("llama", "context 2", "context 2"), ("bamba", "context 2", "one"), ("llama", "both", "context 4")],
)
def test_a_worker_hands_over_pages_to_a_worker_with_another_number_of_ranks(
    family: str, giver: str, taker: str
) -> None:
    (prompt,) = drawn(("hand-over", family), 110)
    wanted = expected(made(family), [prompt], 8)
    first = engine_of(family, ENGINES[giver], tiers=["host:16MiB?share=0&checked=1"], token_budget=32)
    peer = address_of(first)
    second = engine_of(family, ENGINES[taker], tiers=[f"peer://{peer}?timeout=30"])
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
    stored(second)
    second.close()
    closed(first)


def test_a_request_longer_than_the_pool_is_refused_with_a_reason() -> None:
    engine = context_engine(made("llama"), 2, pool_bytes=4 * 4096, tiers=["host:8MiB"])
    try:
        with pytest.raises(ValueError, match="whole blocks of host memory, and ranks have parts of them"):
            engine.add(drawn("long", 120)[0], SamplingParams(max_tokens=4))
    finally:
        engine.close()


@pytest.mark.slow
def test_processes_of_a_new_group_load_what_a_killed_group_stored(tmp_path: Path) -> None:
    """The pages are quantised with static scales, which every process reads from a file."""
    made("llama").save_pretrained(tmp_path / "model")
    prompts = drawn("killed", 70, 50)
    pages: dict[str, Any] = {
        "kv_dtype": "int8",
        "kv_scales": Path(calibrated(made("llama"), tmp_path, prompts)),
    }
    wanted = tokens_of(served(make_engine(made("llama"), POOL, **pages), prompts))
    params = SamplingParams(max_tokens=8, temperature=0)
    for round_ in range(2):
        llm = LLM(
            str(tmp_path / "model"),
            context_parallel=2,
            device="cpu",
            dtype="float32",
            pool_bytes=POOL,
            tiers=["host:8MiB", f"disk:{tmp_path / 'tier'}:64MiB"],
            offload=PATIENT,
            **pages,
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

"""Tiers on several ranks: a page in a tier is a page of one rank, and is complete or not there. The ranks divide the
weights, the context, or both."""

from __future__ import annotations

import os
import signal
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.core import CacheControl, ContextPart, LayerSpec, PoolLayout, TensorPart, attention_fields
from kvloom.engine import LLM, Engine, Request, SamplingParams
from kvloom.engine.offload import HostPages
from kvloom.engine.parallel import RankGroup
from kvloom.engine.parallel.host_copies import HostCopies, RankHost
from kvloom.engine.parallel.messages import CopyHost
from kvloom.kernels.memory import layer_views
from kvloom.models.sharding import RankError
from kvloom.models.specs import model_spec
from kvloom.tiers import DiskConfig, DiskTier, OpenTier
from kvloom.tiers.testing import Faults, FaultyTier
from tests.engine.test_offload import PATIENT, QUICK, drawn, offload_of, served
from tests.engine.test_tensor_parallel import POOL, made
from tests.engine.thread_ranks import ThreadRanks, grid_engine
from tests.engines import make_engine
from tests.models.zoo import expected, tiny
from tests.tiers.servers import redis_server

ENGINES = {
    "one": (1, 1),
    "weights 2": (2, 1),
    "weights 4": (4, 1),
    "context 2": (1, 2),
    "context 4": (1, 4),
    "both": (2, 2),
}
"""The number of parts of the weights and of the context."""
SLABS = {
    ("llama", "weights 2"): 4096,
    ("llama", "context 2"): 4096,
    ("bamba", "weights 2"): 9216,
    ("bamba", "context 2"): 18432,
    ("gemma3_text", "context 2"): 24576,
}
"""The size of a slab in bytes, by family and engine."""
CACHED = {1: [0], 2: [64, 0], 3: [64, 48, 0]}
"""The cached tokens of the first prompts of 70, 50 and 70 tokens, if the last one is new."""
TWO_RANKS = pytest.mark.parametrize("name", ["weights 2", "context 2"])


def engine_of(family: str, name: str, model: Any = None, **settings: Any) -> Engine:
    """An engine with the ranks of ENGINES[name]."""
    settings = {"offload": PATIENT, "pool_bytes": POOL, **settings}
    model = made(family) if model is None else model
    if name == "one":
        return make_engine(model, **settings)
    return grid_engine(model, *ENGINES[name], **settings)


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
    if engine.group is not None:
        assert isinstance(engine.group, ThreadRanks)
        assert not engine.group.errors
    engine.close()


def tokens_of(requests: list[Request]) -> list[list[int]]:
    return [request.tokens for request in requests]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "settings", "engines"),
    [
        ("llama", {}, ("weights 2", "context 2", "one", "weights 4", "both", "context 4", "weights 2")),
        ("llama", {"block_tokens": 32}, ("weights 4", "context 4", "one", "weights 4")),
        ("llama", {"kv_dtype": "int8"}, ("one", "weights 2", "context 2", "one")),
        (
            "llama",
            {"kv_dtype": "int8", "block_tokens": 32},
            ("context 4", "one", "both", "weights 4", "context 4"),
        ),
        ("gemma3_text", {}, ("context 2", "one", "both", "context 2")),
        ("gemma3_text", {"block_tokens": 64}, ("weights 2", "one", "context 4", "weights 2")),
        ("bamba", {}, ("both", "one", "context 2", "weights 2", "weights 4", "both")),
        ("bamba", {"block_tokens": 32}, ("weights 2", "weights 2")),
        ("mamba2", {}, ("context 2", "context 2")),
        ("llama4_text", {"block_tokens": 32}, ("context 2", "context 2")),
        ("qwen3_next", {}, ("weights 2", "one", "context 2", "weights 2")),
        ("qwen3_next", {"block_tokens": 32}, ("context 2", "one", "weights 2")),
        ("deepseek_v3", {}, ("context 4", "both", "one", "weights 2", "context 4")),
        ("kimi_linear", {}, ("weights 2", "one", "weights 2")),
    ],
    ids=str,
)
def test_engines_with_any_number_of_ranks_share_a_disk(
    family: str, settings: dict[str, Any], engines: tuple[str, ...], tmp_path: Path
) -> None:
    """Each engine loads a prompt of every earlier engine, and stores its own. Every second engine has host memory."""
    sizes = cycle((70, 50, 90))
    prompts = [drawn((family, place), next(sizes))[0] for place in range(len(engines))]
    wanted = tokens_of(served(make_engine(made(family), POOL, **settings), prompts))
    block = settings.get("block_tokens", 16)
    for place, name in enumerate(engines):
        tiers = [*["host:8MiB"][: 1 - place % 2], f"disk:{tmp_path}:64MiB"]
        engine = engine_of(family, name, tiers=tiers, **settings)
        requests = served(engine, prompts[: place + 1])
        assert tokens_of(requests) == wanted[: place + 1]
        for request in requests[:-1]:
            assert (request.cached_tokens or 0) >= (len(request.prompt) - 1) // block * block
        assert (requests[-1].cached_tokens or 0) < 16
        closed(engine)


@pytest.mark.server
def test_engines_with_ranks_share_a_redis_server(tmp_path: Path) -> None:
    prompts = drawn("ranks, redis", 70, 50, 70)
    wanted = tokens_of(served(make_engine(made("llama"), POOL), prompts))
    with redis_server(tmp_path) as (port, _):
        tiers = ["host:8MiB", f"redis://127.0.0.1:{port}?capacity=64MiB"]
        for count, name in enumerate(("weights 2", "context 2", "weights 2"), 1):
            engine = engine_of("llama", name, tiers=tiers)
            requests = served(engine, prompts[:count])
            assert tokens_of(requests) == wanted[:count]
            assert [request.cached_tokens for request in requests] == CACHED[count]
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
        engine = engine_of(family, "weights 2", tiers=tiers)
        forms = offload_of(engine).forms
        assert {group: [form.page_bytes for form in forms[group]] for group in sizes} == sizes
        requests = served(engine, prompts)
        assert tokens_of(requests) == wanted
        assert all((request.cached_tokens or 0) >= 32 for request in requests) == bool(round_)
        closed(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba", "deepseek_v3"])
def test_pages_in_tiers_have_the_form_of_one_rank(family: str) -> None:
    whole = make_engine(made(family), POOL, tiers=["host:8MiB"])
    engine = engine_of(family, "context 2", tiers=["host:8MiB"])
    try:
        assert offload_of(engine).forms == offload_of(whole).forms
    finally:
        engine.close()
        whole.close()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "name", "slabs", "write"),
    [
        ("bamba", "weights 2", 10, "back"),
        ("llama", "weights 2", 24, "back"),
        ("bamba", "context 2", 12, "through"),
        ("llama", "context 2", 24, "through"),
        ("gemma3_text", "context 2", 16, "back"),
    ],
)
def test_pages_evicted_to_host_memory_are_loaded_on_all_ranks(
    family: str, name: str, slabs: int, write: str, monkeypatch: pytest.MonkeyPatch
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
    engine = engine_of(
        family,
        name,
        pool_bytes=slabs * SLABS[family, name],
        max_running=3,
        tiers=[f"host:8MiB?write={write}"],
        ahead=True,
    )
    assert engine.layout.slab_bytes == SLABS[family, name]
    for _ in range(2):
        assert tokens_of(served(engine, prompts)) == wanted
    assert offload_of(engine).stats.loaded_tokens
    closed(engine)


@TWO_RANKS
def test_a_page_with_a_damaged_part_of_one_rank_is_recomputed_on_all(name: str, tmp_path: Path) -> None:
    (prompt,) = drawn("damage", 70)
    wanted = expected(made("llama"), [prompt], 8)
    tiers = [f"disk:{tmp_path}:64MiB"]
    engine = engine_of("llama", name, tiers=tiers)
    request = engine.add(prompt, SamplingParams(max_tokens=8, temperature=0))
    while not request.computed:
        engine.step()
    assert request.sequence is not None
    assert isinstance(engine.group, ThreadRanks)
    group, whole = engine.layout.groups[0], engine.layout.whole().groups[0]
    if name == "weights 2":
        first = TensorPart(1, 2).ranges(group, whole)[0]
    else:
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

    engine = engine_of("llama", name, tiers=tiers)
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
        engine = engine_of("llama", "weights 2", tiers=[OpenTier(tier, "through")], offload=QUICK)
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
        engine = engine_of("llama", "weights 2", model, tiers=tiers)
        requests = served(engine, [prompt])
        assert tokens_of(requests) == wanted
        assert requests[0].cached_tokens == 0
        closed(engine)


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
@pytest.mark.parametrize(
    ("family", "block_tokens", "engines"),
    [("llama", 16, ("weights 2", "context 2")), ("gemma3_text", 32, ("context 2", "weights 2"))],
)
def test_a_tier_that_re_encodes_pages_works_on_ranks(
    family: str, block_tokens: int, engines: tuple[str, str], tmp_path: Path
) -> None:
    """Values in int8 differ a little, so only the load is checked."""
    (prompt,) = drawn("lossy", 100)
    for round_, name in enumerate(engines):
        tiers = [f"int8:disk:{tmp_path}:64MiB"]
        engine = engine_of(family, name, tiers=tiers, block_tokens=block_tokens)
        request = engine.add(prompt, SamplingParams(max_tokens=4, temperature=0), CacheControl(lossy=True))
        engine.run()
        assert request.cached_tokens == (96 if round_ else 0)
        closed(engine)


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


@TWO_RANKS
def test_a_request_longer_than_the_pool_is_refused_with_a_reason(name: str) -> None:
    reason = "whole blocks of host memory, and ranks" if name == "context 2" else "ranks"
    engine = engine_of("llama", name, pool_bytes=4 * 4096, tiers=["host:8MiB"])
    try:
        with pytest.raises(ValueError, match=f"{reason} have parts of them"):
            engine.add(drawn("long", 120)[0], SamplingParams(max_tokens=4))
    finally:
        engine.close()


@pytest.mark.slow
def test_processes_of_a_new_group_load_what_a_killed_group_stored(tmp_path: Path) -> None:
    """The ranks of the groups divide the weights, the context, and the weights again."""
    made("llama").save_pretrained(tmp_path / "model")
    prompts = drawn("killed", 70, 50, 70)
    wanted = expected(made("llama"), prompts, 8)
    params = SamplingParams(max_tokens=8, temperature=0)
    for count, setting in enumerate(("tensor_parallel", "context_parallel", "tensor_parallel"), 1):
        ranks: dict[str, Any] = {setting: 2}
        llm = LLM(
            str(tmp_path / "model"),
            device="cpu",
            dtype="float32",
            pool_bytes=POOL,
            tiers=["host:8MiB", f"disk:{tmp_path / 'tier'}:64MiB"],
            offload=PATIENT,
            **ranks,
        )
        try:
            found = llm.generate(prompts[:count], params)
            tokens = [[*p, *r.outputs[0].token_ids] for p, r in zip(prompts[:count], found, strict=True)]
            assert tokens == wanted[:count]
            assert [r.num_cached_tokens for r in found] == CACHED[count]
            stored(llm.engine)
            assert llm.engine.group is not None
            rank = llm.engine.group.processes[0]
            os.kill(rank.pid, signal.SIGKILL)
            rank.wait(30)
            with pytest.raises(RankError, match=r"has stopped|restart the engine"):
                llm.generate(drawn("other", 60), params)
        finally:
            llm.close()

"""A tier that re-encodes pages serves requests that accept lossy pages; no other request ever reads its pages."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from kvloom.core import CacheControl
from kvloom.engine import Engine, Request, calibrate
from kvloom.tiers import DiskTier, open_tier
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

from .test_offload import PATIENT, POOL, closed, drawn, greedy, offload_of, stored

NEAR = CacheControl(lossy=True)


def opened(*tiers: str) -> Engine:
    return make_engine(tiny("llama"), POOL, tiers=tiers, offload=PATIENT)


def said(engine: Engine, prompts: list[list[int]], control: CacheControl | None = None) -> list[Request]:
    requests = [engine.add(prompt, greedy(4), control) for prompt in prompts]
    engine.run()
    offload_of(engine).poll()
    stored(engine)
    return requests


@pytest.mark.parametrize("coding", ["int8", "fp8"])
@pytest.mark.parametrize("below", ["disk", "host"])
def test_lossy_pages_serve_only_requests_that_accept_them(coding: str, below: str, tmp_path: Path) -> None:
    prompts = drawn(coding, 70, 50)
    wanted = expected(tiny("llama"), prompts, 4)
    text = f"{coding}:disk:{tmp_path}:64MiB" if below == "disk" else f"{coding}:host:16MiB"
    engine = opened("host:8MiB", text)
    first, plain = said(engine, prompts, NEAR), said(engine, prompts)
    assert (
        [one.tokens for one in first] == [one.tokens for one in plain] == wanted
    )  # nothing was loaded from a tier yet
    assert [one.cached_tokens for one in plain] == [0, 0]
    lane = offload_of(engine).transfers.queues[0]
    kept = lane.tier.stats()
    assert kept.objects == 5 + 4, "only pages of requests that accept lossy pages"
    if below == "disk":
        closed(engine)
        engine = opened("host:8MiB", text)
    else:
        empty(engine)
    near, exact = said(engine, prompts, NEAR), said(engine, prompts)
    assert [one.cached_tokens for one in near] == [64, 48]
    assert {load[0] for one in near for load in one.loads} == {coding}
    assert not any(one.loads for one in exact)
    assert [one.tokens for one in exact] == wanted
    closed(engine)


def empty(engine: Engine) -> None:
    """Evict all cached pages from the pool and from host memory."""
    engine.cache.grow(engine.cache.shrink(engine.cache.state.pool.slabs - 2).tolist())
    engine.apply_copies()
    host = offload_of(engine).host
    residents = host.index
    for key, slot in list(residents.entries.items()):
        residents.remove(key, slot)


def test_loaded_lossy_pages_are_close_to_computed_ones(tmp_path: Path) -> None:
    (prompt,) = drawn("near", 64)
    engine = opened("host:8MiB", f"int8:disk:{tmp_path}:64MiB")
    said(engine, [[*prompt, 5]], NEAR)
    group = engine.layout.groups[0]

    def pages() -> np.ndarray:
        match = engine.cache.match([*prompt, 5], NEAR)
        assert match.resume == 64
        bytes_ = engine.buffer.numpy().reshape(-1)
        size = group.page_stride
        found = np.concatenate([bytes_[p * size : (p + 1) * size] for p in match.rows[:, 0].tolist()])
        return found.view(np.float32).copy()

    before = pages()
    empty(engine)
    assert engine.cache.match([*prompt, 5], NEAR).resume < 64
    said(engine, [[*prompt, 5]], NEAR)
    after = pages()
    assert not np.array_equal(before, after)
    assert np.abs(before - after).max() <= np.abs(before).max() / 127
    closed(engine)


def test_lossy_without_a_lossy_tier_changes_nothing(tmp_path: Path) -> None:
    engine = opened("host:8MiB")
    prompts = drawn("same", 70)
    said(engine, prompts, NEAR)
    assert said(engine, [[*prompts[0], 5]])[0].cached_tokens == 70
    closed(engine)


def test_pages_without_their_scales_are_not_re_encoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, scales = tiny("llama"), tmp_path / "scales.safetensors"
    calibrate(model, drawn("scales", 9)).save(scales)
    text = f"fp8:disk:{tmp_path}:64MiB"
    with caplog.at_level(logging.WARNING, "kvloom.tiers"):
        engine = make_engine(model, POOL, "fp8", kv_scales=scales, tiers=[f"{text}?optional=1"])
    assert "left out" in caplog.text
    assert "field 'k' has dtype fp8 without scales in its page" in caplog.text
    assert not offload_of(engine).transfers.queues
    closed(engine)
    with pytest.raises(ValueError, match="cannot re-encode pages"):
        make_engine(model, POOL, "fp8", kv_scales=scales, tiers=[text])


KINDS = ["llama", "deepseek_v3", "gemma3_text", "bamba"]


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.few(2)
def test_servers_with_other_kv_dtypes_share_lossy_pages(family: str, tmp_path: Path) -> None:
    """Each engine loads what the first one stored, whatever the KV dtype and block size. Exact requests do not."""
    prompts = drawn(family, 70, 50)
    wanted = expected(tiny(family), prompts, 4)
    text = f"int8:disk:{tmp_path}:64MiB"
    dtypes: list[tuple[str | None, int]] = [("int8", 16), (None, 16), ("fp8", 16), ("bf16", 32)]
    for number, (kv_dtype, block_tokens) in enumerate(dtypes):
        engine = make_engine(
            tiny(family), POOL, kv_dtype, tiers=[text], offload=PATIENT, block_tokens=block_tokens
        )
        near, exact = said(engine, prompts, NEAR), said(engine, prompts)
        has_states = bool(engine.layout.of("state"))
        found = [69, 49] if has_states else [64, 48 // block_tokens * block_tokens]
        assert [one.cached_tokens for one in near] == (found if number else [0, 0])
        assert not any(one.loads for one in exact)
        if kv_dtype is None:
            assert [one.tokens for one in exact] == wanted
        closed(engine)


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_pages_of_another_kv_dtype_are_close_to_computed_ones(stored: str, tmp_path: Path) -> None:
    (prompt,) = drawn("near", 65)
    text = f"int8:disk:{tmp_path}:64MiB"

    def pages(engine: Engine) -> np.ndarray:
        group = engine.layout.groups[0]
        match = engine.cache.match([*prompt], NEAR)
        assert match.resume == 64
        bytes_, size = engine.buffer.numpy().reshape(-1), group.page_stride
        found = [bytes_[p * size : (p + 1) * size] for p in match.rows[:, 0].tolist()]
        return np.concatenate(found).view(np.float32).copy()

    first = make_engine(tiny("llama"), POOL, stored, tiers=[text], offload=PATIENT)
    said(first, [prompt], NEAR)
    closed(first)
    plain = opened(text)
    (request,) = said(plain, [prompt], NEAR)
    assert request.cached_tokens == 64
    after = pages(plain)
    closed(plain)
    alone = opened("int8:host:16MiB")
    said(alone, [prompt], NEAR)
    before = pages(alone)
    closed(alone)
    assert not np.array_equal(before, after)
    most = np.abs(before).max() * (1 / 16 if stored == "int8" else 1 / 4)  # later layers read quantised pages
    assert np.abs(before - after).max() <= most


@pytest.mark.parametrize("family", ["bamba", "qwen3_next", "mamba"])
def test_states_of_hybrids_are_stored_unchanged(family: str, tmp_path: Path) -> None:
    prompts = drawn(family, 70, 50)
    wanted = expected(tiny(family), prompts, 4)
    text = f"int8:disk:{tmp_path}:64MiB"
    for round_ in range(2):
        engine = make_engine(tiny(family), POOL, tiers=[text], offload=PATIENT)
        requests = said(engine, prompts, NEAR)
        assert [one.cached_tokens for one in requests] == ([69, 49] if round_ else [0, 0])
        if not round_ or not engine.layout.of("token"):  # all pages are exact
            assert [one.tokens for one in requests] == wanted
        exact = said(engine, prompts)
        assert [one.tokens for one in exact] == wanted
        assert not any(one.loads for one in exact)
        closed(engine)
        tier = open_tier(f"disk:{tmp_path}:64MiB")
        assert isinstance(tier, DiskTier)
        states = {group.index for group in engine.layout.of("state")}
        sizes = {
            (int.from_bytes(key[16:20], "little"), record.head.run_bytes * record.head.runs)
            for key, record in tier._store.index.items()
        }
        for group in engine.layout.groups:
            stored = {size for index, size in sizes if index == group.index}
            assert stored == ({group.page_stride} if group.index in states else stored - {group.page_stride})
        tier.close()


def test_pages_are_re_encoded_once() -> None:
    with pytest.raises(ValueError, match="re-encodes pages twice"):
        opened("int8:fp8:host:16MiB")

"""Hand-over: a decode engine pulls the pages of a prompt while another engine computes it, and loses no token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvloom.core import HASH_BYTES, hash_chain, token_bytes
from kvloom.engine import Engine, OffloadConfig, Request
from kvloom.engine.offload.host_pages import unit_forms
from kvloom.tiers.encoding import split_units
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

from .test_offload import PATIENT, POOL, closed, drawn, greedy, offload_of

KINDS = ["llama", "gemma3_text", "qwen3_next", "bamba", "deepseek_v3", "llama4_text"]
LIMIT_SECONDS = 60.0


def prefill_engine(family: str, **settings: Any) -> Engine:
    return make_engine(
        tiny(family),
        POOL,
        tiers=["host:16MiB?share=0&checked=1"],
        offload=PATIENT,
        token_budget=32,
        **settings,
    )


def address_of(engine: Engine) -> str:
    server = offload_of(engine).host_server
    assert server is not None
    return "{}:{}".format(*server.address)


def decode_engine(family: str, *peers: Engine, offload: OffloadConfig = PATIENT, **settings: Any) -> Engine:
    tiers = [f"peer://{address_of(peer)}?timeout=30" for peer in peers]
    return make_engine(tiny(family), POOL, tiers=tiers, offload=offload, **settings)


def step_until(done: Callable[[], bool], *engines: Engine) -> None:
    limit = time.monotonic() + LIMIT_SECONDS
    while not done():
        assert time.monotonic() < limit, "the engines made no progress"
        for engine in engines:
            if engine.busy:
                engine.step()


def finished(*requests: Request) -> Callable[[], bool]:
    return lambda: all(request.finish_reason is not None for request in requests)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.few(4)
def test_pages_arrive_while_the_prompt_is_computed(family: str, kv_dtype: Any) -> None:
    (prompt,) = drawn(("hand-over", family), 110)
    first, second = prefill_engine(family, kv_dtype=kv_dtype), None
    try:
        alone = make_engine(tiny(family), POOL, kv_dtype=kv_dtype)
        reference = alone.add(prompt, greedy(8))
        alone.run()
        wanted = reference.tokens
        alone.close()
        if kv_dtype is None:
            assert wanted == expected(tiny(family), [prompt], 8)[0]
    except ValueError as refused:
        first.close()
        pytest.skip(str(refused))
    second = decode_engine(family, first, kv_dtype=kv_dtype)
    got = second.add(prompt, greedy(8), awaits_peer=address_of(first))
    step_until(lambda: second.scheduler.loading_count == 1, second)
    given = first.add(prompt, greedy(1), offers_pages=True)
    host, early = offload_of(second).host, 0
    while given.finish_reason is None:
        first.step()
        limit = time.monotonic() + 0.2
        while time.monotonic() < limit and given.finish_reason is None:
            second.step()
            if host.stats().objects > early:
                early = host.stats().objects
                break
    assert early, "pages arrived before the prompt was computed"
    step_until(finished(got), second)
    assert got.tokens == wanted
    stats = offload_of(second).stats
    assert (stats.hand_overs, stats.cut_hand_overs) == (1, 0)
    has_states = bool(second.layout.of("state"))
    assert got.cached_tokens == (109 if has_states else 96)
    closed(second)
    closed(first)


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (64, 32), (16, 64), (32, 32)])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next"])
@pytest.mark.few(8)
def test_workers_have_different_block_sizes(family: str, sizes: tuple[int, int]) -> None:
    """Pages of another block size are divided and joined. No byte changes."""
    (prompt,) = drawn(("block sizes", family), 118)
    first = prefill_engine(family, block_tokens=sizes[0])
    second = decode_engine(family, first, block_tokens=sizes[1])
    got = second.add(prompt, greedy(8), awaits_peer=address_of(first))
    step_until(lambda: second.scheduler.loading_count == 1, second)
    given = first.add(prompt, greedy(1), offers_pages=True)
    step_until(finished(given, got), first, second)
    assert got.tokens == expected(tiny(family), [prompt], 8)[0]
    stats = offload_of(second).stats
    assert (stats.hand_overs, stats.cut_hand_overs) == (1, 0)
    has_states = bool(second.layout.of("state"))
    assert got.cached_tokens == (117 if has_states else 117 // sizes[1] * sizes[1])
    assert same_units(first, second, prompt) >= 117 // sizes[1] * sizes[1] // 16
    for engine in (second, first):
        closed(engine)


def same_units(first: Engine, second: Engine, prompt: list[int]) -> int:
    """Compare the pages of whole blocks in two host memories byte by byte, in units of 16 tokens. Return their number."""
    sources, pulled = host_pages(first), host_pages(second)
    (root,) = second.cache.roots
    chain = hash_chain(root, token_bytes(prompt))
    count = 0
    for form, unit in unit_forms(second.layout).items():
        units = second.layout.block_tokens // 16
        for key, page in pulled.items():
            if (
                key[HASH_BYTES + 4 :] != form.fingerprint
                or key[:HASH_BYTES] not in chain
                or not unit.unit.tokens
            ):
                continue
            last = chain.index(key[:HASH_BYTES]) + 1
            parts = [memoryview(bytearray(unit.form.page_bytes)) for _ in range(units)]
            split_units(memoryview(page), unit.page, parts, unit.unit)
            for name, part in zip(chain[last - units : last], parts, strict=True):
                source = sources.get(name + key[HASH_BYTES : HASH_BYTES + 4] + unit.form.fingerprint)
                if source is not None:
                    assert part == source
                    count += 1
    if second.layout.block_tokens == 16:
        same = [key for key in pulled if key in sources and key[:HASH_BYTES] in chain]
        assert all(pulled[key] == sources[key] for key in same)
        count = len(same)
    return count


def host_pages(engine: Engine) -> dict[bytes, bytes]:
    """The pages in an engine's host memory, by key."""
    offload_of(engine).flush()
    host = offload_of(engine).host
    slots, table = host.index.entries, host._slots
    return {
        key: host.arena[at : at + size].tobytes()
        for key, slot in slots.items()
        for at, size in [(int(table.offset[slot]), int(table.size[slot]))]
        if table.ready[slot]
    }


def test_window_pages_outside_the_window_are_not_pulled() -> None:
    (prompt,) = drawn("windows", 118)
    first = prefill_engine("gemma3_text")
    second = decode_engine("gemma3_text", first)
    given = first.add(prompt, greedy(1), offers_pages=True)
    step_until(finished(given), first)
    got = second.add(prompt, greedy(4), awaits_peer=address_of(first))
    step_until(finished(got), second)
    assert got.tokens == expected(tiny("gemma3_text"), [prompt], 4)[0]
    assert got.cached_tokens == 112
    groups = second.layout.of("token")
    window = next(group for group in groups if group.spec.visibility.windowed)
    visible = len(window.spec.visibility.visible_blocks(112, 16)) - 1
    pages = sum(group.runs * (visible if group.spec.visibility.windowed else 7) for group in groups)
    assert visible < 7
    assert offload_of(second).stats.handed_over_pages == pages
    closed(second)
    closed(first)


def test_decode_worker_asks_only_for_what_it_lacks() -> None:
    (prompt,) = drawn("lacks", 110)
    first = prefill_engine("llama")
    second = decode_engine("llama", first)
    step_until(finished(second.add(prompt[:70], greedy(1))), second)
    given = first.add(prompt, greedy(1), offers_pages=True)
    step_until(finished(given), first)
    got = second.add(prompt, greedy(8), awaits_peer=address_of(first))
    step_until(finished(got), second)
    assert got.tokens == expected(tiny("llama"), [prompt], 8)[0]
    runs = sum(group.runs for group in second.layout.groups)
    assert offload_of(second).stats.handed_over_pages == runs * (96 - 64) // 16
    assert got.hits.get("device") == 70
    closed(second)
    closed(first)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_requests_that_pull_the_same_pages_wait_for_them(family: str) -> None:
    """One request pulls the common pages. The others wait until these pages have arrived, and lose no hand-over."""
    (prefix,) = drawn(("same pages", family), 100)
    prompts = [[*prefix, end, 9, 11] for end in range(5, 9)]
    first = prefill_engine(family)
    second = decode_engine(family, first)
    given = [first.add(prompt, greedy(1), offers_pages=True) for prompt in prompts]
    step_until(finished(*given), first)
    got = [second.add(prompt, greedy(4), awaits_peer=address_of(first)) for prompt in prompts]
    step_until(finished(*got), second)
    assert [request.tokens for request in got] == expected(tiny(family), prompts, 4)
    stats = offload_of(second).stats
    assert (stats.hand_overs, stats.cut_hand_overs) == (4, 0)
    assert all(request.cached_tokens == (102 if second.layout.of("state") else 96) for request in got)
    closed(second)
    closed(first)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_lost_prefill_engine(family: str) -> None:
    """The prefill engine closes in the middle: the pulled pages are used, the rest is computed."""
    (prompt,) = drawn(("lost", family), 118)
    first = prefill_engine(family)
    second = decode_engine(family, first)
    got = second.add(prompt, greedy(8), awaits_peer=address_of(first))
    given = first.add(prompt, greedy(1), offers_pages=True)
    first.step()
    first.step()
    step_until(lambda: offload_of(second).host.stats().objects > 0, second)
    assert given.finish_reason is None
    first.close()
    step_until(finished(got), second)
    assert got.tokens == expected(tiny(family), [prompt], 8)[0]
    assert offload_of(second).stats.cut_hand_overs == 1
    if family == "llama":
        assert got.cached_tokens
    closed(second)


def test_another_peer_stands_in() -> None:
    """The named prefill engine is lost, another one has computed the prompt."""
    (prompt,) = drawn("stands in", 110)
    first, third = prefill_engine("llama"), prefill_engine("llama")
    second = decode_engine("llama", first, third)
    address = address_of(first)
    first.close()
    step_until(finished(third.add(prompt, greedy(1), offers_pages=True)), third)
    got = second.add(prompt, greedy(8), awaits_peer=address)
    step_until(finished(got), second)
    assert got.tokens == expected(tiny("llama"), [prompt], 8)[0]
    assert got.cached_tokens == 96
    closed(second)
    closed(third)


def test_damaged_page_comes_from_another_peer() -> None:
    (prompt,) = drawn("damaged", 110)
    first, third = prefill_engine("llama"), prefill_engine("llama")
    for engine in (first, third):
        step_until(finished(engine.add(prompt, greedy(1), offers_pages=True)), engine)
    arena = offload_of(first).host.arena
    second = decode_engine("llama", first, third)
    address = address_of(first)
    with_bytes = np.flatnonzero(arena)
    arena[with_bytes[:: max(1, len(with_bytes) // 2000)]] ^= 255
    got = second.add(prompt, greedy(8), awaits_peer=address)
    step_until(finished(got), second)
    assert got.tokens == expected(tiny("llama"), [prompt], 8)[0]
    assert got.cached_tokens == 96
    closed(second)
    first.close()
    closed(third)


def test_prefill_worker_that_never_starts_and_unknown_peer() -> None:
    """Without a page for `hand_over_seconds`, or from an unknown peer, the prompt is computed."""
    (prompt,) = drawn("never", 80)
    first = prefill_engine("llama")
    second = decode_engine("llama", first, offload=replace(PATIENT, hand_over_seconds=0.2))
    late = second.add(prompt, greedy(4), awaits_peer=address_of(first))
    step_until(finished(late), second)
    assert offload_of(second).stats.cut_hand_overs == 1
    unknown = second.add(prompt[:60], greedy(4), awaits_peer="127.0.0.1:1")
    step_until(finished(unknown), second)
    assert [late.tokens, unknown.tokens] == expected(tiny("llama"), [prompt, prompt[:60]], 4)
    cancelled = second.add(drawn("cancelled", 90)[0], greedy(4), awaits_peer=address_of(first))
    second.step()
    second.cancel(cancelled)
    step_until(lambda: not second.busy, second)
    closed(second)
    closed(first)

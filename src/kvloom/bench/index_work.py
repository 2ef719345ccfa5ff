"""kvloom's part of `kvloom bench index`. It makes the same calls to the cache as a scheduler, on a CPU, without a model
and without page bytes.

Figures are microseconds by phase. Each figure is the lower decile (the value that a tenth of the repeats do not
exceed).
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvloom.core import DEFAULT_POLICY, KVCache, LayerSpec, PoolLayout, attention_fields
from kvloom.models.specs import load_spec

__all__ = ["LAYOUTS", "decode_step", "layout_of", "life", "pool_scale", "tree"]

LAYOUTS = ("full", "gemma3", "qwen3next")
VOCABULARY = 128_000
WARM_UP = 3
Figures = dict[str, float]
Tokens = npt.NDArray[np.int32]


def layout_of(name: str) -> PoolLayout:
    """Return the layout with this name. There are three: an 8B Llama with one full group, Gemma-3-12B, and
    Qwen3-Next-80B."""
    if name == "full":
        return PoolLayout.build(
            {f"{i}": LayerSpec("token", attention_fields(8, 128, "bf16")) for i in range(32)}
        )
    return PoolLayout.build(load_spec({"gemma3": "gemma-3-12b", "qwen3next": "qwen3-next-80b"}[name]).layers)


def life(
    layout: str = "full",
    tokens: int = 8192,
    cached: int = 4096,
    evicting: bool = False,
    names: bool = False,
    repeats: int = 40,
    policy: str = DEFAULT_POLICY,
) -> Figures:
    """Return the microseconds of each phase of a request: match, allocate, publish and release. `total` is their sum.

    The first `cached` tokens of each request are cached. With `evicting`, no token is cached, and the pool is full of
    pages of other requests. With `names`, the cache has a listener for events, so it hashes every new block.
    """
    shape = layout_of(layout)
    slabs = _slabs(shape, tokens, 6 if evicting else 2 * repeats)
    cache = KVCache(shape, slabs, max_sequences=4, policy=policy)
    if names:
        cache.events.subscribe(lambda event: None)
    draw = _drawer()
    prefix = draw(cached)
    _live(cache, prefix)
    if evicting:
        for _ in range(8):
            _live(cache, draw(tokens))
    prompts = [
        draw(tokens) if evicting else np.concatenate([prefix, draw(tokens - cached)]) for _ in range(repeats)
    ]
    return _typical([_live(cache, prompt) for prompt in prompts])


def _live(cache: KVCache, prompt: Tokens) -> Figures:
    with _no_gc():
        t0 = time.perf_counter()
        seq = cache.open(cache.match(prompt))
        t1 = time.perf_counter()
        missing = seq.extend(len(prompt) - seq.length)
        t2 = time.perf_counter()
        cache.take_copies()
        seq.commit(prompt[seq.length :])
        t3 = time.perf_counter()
        hit = seq.resumed
        seq.close()
        t4 = time.perf_counter()
    if missing:
        raise RuntimeError(f"{missing} pages missing: the benchmark's pool is too small")
    times = {"match": t1 - t0, "allocate": t2 - t1, "publish": t3 - t2, "release": t4 - t3, "total": t4 - t0}
    return {phase: seconds * 1e6 for phase, seconds in times.items()} | {"hit": hit}


def decode_step(
    layout: str = "full", batch: int = 256, context: int = 1024, crossing: int = 16, steps: int = 64
) -> Figures:
    """Return the microseconds of one decode step of `batch` sequences with about `context` tokens each. The step
    reserves a slot and commits a token for each sequence. In most steps about 1 / `crossing` of the sequences fill a
    block.
    """
    shape = layout_of(layout)
    cache = KVCache(shape, _slabs(shape, context + 256, 2 * batch), max_sequences=batch)
    draw = _drawer()
    rows = []
    for i in range(batch):
        prompt = draw(context + (i % 16 if i % crossing < 16 else 0))
        seq = cache.open(cache.match(prompt))
        if seq.extend(len(prompt)):
            raise RuntimeError("the benchmark's pool is too small")
        cache.take_copies()
        seq.commit(prompt)
        rows.append(seq.row)
    at = np.array(rows)
    figures = []
    for _ in range(steps):
        ids = draw(batch)
        with _no_gc():
            t0 = time.perf_counter()
            missing = cache.extend_many(at)
            t1 = time.perf_counter()
            cache.commit_many(at, ids)
            t2 = time.perf_counter()
        assert not missing
        figures.append({"allocate": (t1 - t0) * 1e6, "append": (t2 - t1) * 1e6, "total": (t2 - t0) * 1e6})
    return _typical(figures)


def tree(tokens: int = 8192, shared: int = 4096, repeats: int = 60) -> Figures:
    """Return the microseconds to match a prompt, to insert its new blocks, and to evict the same number of blocks.

    The cache has 256 other prompts with 8 different prefixes."""
    shape = layout_of("full")
    block = shape.block_tokens
    # The cache is exactly full, so each prompt evicts the blocks of another prompt, as in the peers' measurement.
    cache = KVCache(shape, (256 * (tokens - shared) + 8 * shared) // block + 1, max_sequences=4)
    draw = _drawer()
    prefixes = [draw(shared) for _ in range(8)]
    for i in range(256):
        _live(cache, np.concatenate([prefixes[i % 8], draw(tokens - shared)]))
    figures = []
    for i in range(repeats):
        prompt = np.concatenate([prefixes[i % 8], draw(tokens - shared)])
        with _no_gc():
            t0 = time.perf_counter()
            match = cache.match(prompt)
            t1 = time.perf_counter()
            cache.free_pages(tokens - shared)
            t2 = time.perf_counter()
            seq = cache.open(match)
            seq.extend(tokens - seq.length)
            t3 = time.perf_counter()
            seq.commit(prompt[seq.length :])
            t4 = time.perf_counter()
        if seq.resumed != shared:
            raise RuntimeError(f"resumed at {seq.resumed}, not {shared}")
        seq.close()
        figures.append({"match": (t1 - t0) * 1e6, "insert": (t4 - t3) * 1e6, "evict": (t2 - t1) * 1e6})
    return _typical(figures)


def pool_scale(blocks: int, tokens: int = 8192, repeats: int = 40) -> Figures:
    """Return the microseconds of each phase of a request that evicts blocks from a full cache of `blocks` blocks. Also
    return the bytes of bookkeeping per cached block.
    """
    shape = layout_of("full")
    draw = _drawer()
    prompts = (draw(tokens) for _ in range(blocks // (tokens // shape.block_tokens) + 2))
    first = next(prompts)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    cache = KVCache(shape, blocks + 1, max_sequences=4)
    _live(cache, first)
    for prompt in prompts:
        _live(cache, prompt)
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    figures = _typical([_live(cache, draw(tokens)) for _ in range(repeats)])
    return figures | {"bytes_per_block": size / blocks, "blocks": float(blocks)}


def _slabs(shape: PoolLayout, tokens: int, requests: int) -> int:
    """Return the number of slabs that have enough pages for `requests` requests of `tokens` tokens, with two snapshots
    each.
    """
    per_request = sum(
        -(-(tokens // shape.block_tokens + 2 if g.spec.unit == "token" else 3) * g.runs // g.pages_per_slab)
        + 1
        for g in shape.groups
    )
    return per_request * requests + 8


def _drawer() -> Callable[[int], Tokens]:
    rng = np.random.default_rng(0)
    return lambda n: rng.integers(0, VOCABULARY, n, dtype=np.int32)


def _typical(figures: Sequence[Figures]) -> Figures:
    """Return the lower decile of each figure, which is stable on a machine with occasional disturbances."""
    rows = figures[WARM_UP:]
    return {key: sorted(f[key] for f in rows)[len(rows) // 10] for key in figures[0]}


@contextmanager
def _no_gc() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

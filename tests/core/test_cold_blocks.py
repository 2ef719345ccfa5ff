"""Cold blocks: random sequences of operations keep every page counted, and release every cold run once."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvloom.core import (
    CacheControl,
    ColdRun,
    KVCache,
    LayerSpec,
    PoolLayout,
    Sequence,
    Visibility,
    attention_fields,
)

FULL = LayerSpec("token", attention_fields(2, 8, "fp32"))
SLIDING = LayerSpec("token", attention_fields(2, 8, "fp32"), visibility=Visibility("sliding", 24))
LAYOUTS = {"full": {"a": FULL}, "sliding and full": {"a": SLIDING, "b": FULL, "c": SLIDING}}


class Runs:
    """Counts the cold runs that are not released."""

    def __init__(self) -> None:
        self.open = 0

    def new(self, blocks: int, width: int) -> ColdRun:
        self.open += 1
        return ColdRun(np.ones((blocks, width), np.int32), b"", self._release)

    def _release(self) -> None:
        self.open -= 1
        assert self.open >= 0, "a run was released twice"


def make_cache(name: str, slabs: int) -> KVCache:
    layout = PoolLayout.build(LAYOUTS[name])
    return KVCache(layout, slabs, max_sequences=8, max_tokens=4096)


def opened(cache: KVCache, tokens: list[int], **control: Any) -> Sequence:
    return cache.open(cache.match(np.array(tokens, np.int32), CacheControl(**control)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_cold_blocks_free_their_pages_and_leave_the_tree(name: str) -> None:
    cache, runs = make_cache(name, 64), Runs()
    tokens = list(range(3, 203))
    seq = opened(cache, tokens)
    assert not seq.extend(200)
    seq.commit(tokens)
    before = cache.stats()["in_use_pages"]
    assert isinstance(before, int)
    rows = cache.cold.next_pages(seq, 5)
    assert len(rows) == 5
    assert (rows[:, cache.cold.columns] > 0).all()
    cache.cold.add_run(seq, runs.new(5, rows.shape[1]))
    cache.check()
    assert cache.stats()["in_use_pages"] == before - 5 * len(cache.cold.columns)
    assert seq.cold_blocks == 5
    with pytest.raises(ValueError, match="only 7 are full and computed"):
        cache.cold.add_run(seq, runs.new(8, rows.shape[1]))
    runs.open -= 1
    twin = seq.fork()
    assert twin is not None
    cache.check()
    assert seq.rollback(1) == 199
    cache.check()
    assert seq.rollback(150) == 0  # these tokens are in host memory: it starts again
    assert seq.cold_blocks == 0
    cache.check()
    assert runs.open == 1
    twin.close()
    assert runs.open == 0
    seq.close()
    cache.check()
    assert cache.stats()["in_use_pages"] == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_sequence_starts_behind_cold_blocks(name: str) -> None:
    cache, runs = make_cache(name, 16), Runs()
    tokens = list(range(3, 203))
    seq = opened(cache, tokens, read=False, store=False)
    width = cache.page_tables.shape[0]
    assert cache.cold.open(seq, runs.new(11, width), 180, np.array(tokens[176:180], np.int32))
    cache.check()
    assert (seq.length, seq.cold_blocks, seq.resumed) == (180, 11, 180)
    assert not seq.extend(20)
    seq.commit(tokens[180:])
    cache.check()
    small = opened(cache, tokens, read=False, store=False)
    with pytest.raises(ValueError, match="cannot start at 180"):
        cache.cold.open(small, runs.new(3, width), 180, np.array(tokens[176:180], np.int32))
    runs.open -= 1
    seq.close()
    small.close()
    assert runs.open == 0
    assert cache.stats()["in_use_pages"] == 0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.few(3)
def test_random_operations_conserve_pages(name: str, seed: int) -> None:
    rng, runs = random.Random(f"{name} {seed}"), Runs()
    cache = make_cache(name, rng.randrange(12, 40))
    width, open_ = cache.page_tables.shape[0], list[tuple[Sequence, list[int]]]()
    for _ in range(250):
        action = rng.random()
        if (action < 0.15 or not open_) and len(open_) < 6:
            tokens = [rng.randrange(3, 6) for _ in range(rng.randrange(1, 300))]
            open_.append((opened(cache, tokens, store=rng.random() < 0.7), tokens))
            continue
        seq, tokens = rng.choice(open_)
        if action < 0.5:
            n = min(rng.randrange(1, 60), 400 - seq.length)
            while n > 0 and seq.extend(n):
                more = len(cache.cold.next_pages(seq, rng.randrange(1, 9)))
                if not more:
                    break
                cache.cold.add_run(seq, runs.new(more, width))
            else:
                end = seq.length + n
                tokens += [rng.randrange(3, 6) for _ in range(end - len(tokens))]
                seq.commit(tokens[seq.length : end])
        elif action < 0.65:
            more = len(cache.cold.next_pages(seq, rng.randrange(1, 6)))
            if more:
                cache.cold.add_run(seq, runs.new(more, width))
        elif action < 0.75 and len(open_) < 6:
            twin = seq.fork()
            assert twin is not None
            open_.append((twin, list(tokens)))
        elif action < 0.85:
            length = seq.rollback(rng.randrange(seq.length + 1))
            assert length >= seq.cold_blocks * 16
        else:
            seq.close()
            open_.remove((seq, tokens))
        cache.check()
    for seq, _ in open_:
        seq.close()
    cache.take_copies()
    cache.check()
    assert runs.open == 0
    assert cache.stats()["in_use_pages"] == 0

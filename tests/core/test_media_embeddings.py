"""Media runs of embeddings: in use until an image's tokens are computed, hit by content."""

from __future__ import annotations

import numpy as np

from kvloom.core import PROMPT, Field, KVCache, LayerSpec, Media, PoolLayout, Visibility, attention_fields

KEYS = LayerSpec("token", attention_fields(1, 64, "bf16"))
SEEN = LayerSpec("token", (Field("embedding", (256,), "int8"),), Visibility("full"), "media", PROMPT)
DIGEST = bytes(range(32))


def cache_of(slabs: int) -> KVCache:
    return KVCache(PoolLayout.build({"layers.0.k": KEYS, "embeddings": SEEN}), slabs=slabs)


def shown(cache: KVCache, tokens: np.ndarray, media: list[Media], chunks: list[int]) -> int:
    """Compute a prompt in chunks; return how many of its tokens were cached."""
    found = cache.match(tokens, None, media)
    sequence = cache.open(found)
    for count in chunks:
        start = sequence.length
        count = min(count, len(tokens) - start)
        assert not sequence.extend(count)
        for item in media:
            if item.start < start + count and item.stop > start:
                assert len(sequence.media_rows(item.digest)) == 2
        sequence.commit(tokens[start : start + count])
        cache.check()
    sequence.close()
    return found.resume


def test_a_media_run_is_in_use_while_its_tokens_are_computed_and_hit_by_content() -> None:
    cache = cache_of(20)
    tokens = np.arange(48, dtype=np.int32)
    media = [Media(8, 24, DIGEST, 32)]
    sequence = cache.open(cache.match(tokens, None, media))
    for start, stop, held in ((0, 6, 0), (6, 20, 1), (20, 24, 0), (24, 48, 0)):
        assert not sequence.extend(stop - start)
        sequence.commit(tokens[start:stop])
        cache.check()
        assert len(sequence.media_runs) == held
    assert [run.users for run in cache.state.media_cache.runs()] == [0]
    sequence.close()
    other = np.concatenate((np.arange(100, 110, dtype=np.int32), tokens[8:24]))
    sequence = cache.open(cache.match(other, None, [Media(10, 26, DIGEST, 32)]))
    assert not sequence.extend(26)
    assert sequence.media_is_cached(DIGEST)  # other text before it, the same pages
    sequence.commit(other)
    sequence.close()
    cache.check()


def test_text_behind_an_image_is_found_without_its_run() -> None:
    cache = cache_of(12)
    tokens = np.arange(64, dtype=np.int32)
    media = [Media(8, 24, DIGEST, 32)]
    assert shown(cache, tokens, media, [10, 30, 24]) == 0
    assert cache.state.media_cache
    filler = cache.open(cache.match(np.arange(1000, 1008, dtype=np.int32)))
    while cache.state.media_cache:  # the run was let go before the text, and leaves first
        assert not filler.extend(16)
        filler.commit(np.arange(16, dtype=np.int32) + 1000 + filler.length)
    assert cache.match(tokens, None, media).resume == 63
    filler.close()
    assert shown(cache, tokens, media, [1]) == 63


def test_resuming_inside_an_image_allocates_a_new_run() -> None:
    cache = cache_of(12)
    tokens = np.arange(24, dtype=np.int32)
    media = [Media(4, 24, DIGEST, 32)]
    assert shown(cache, tokens[:16], [Media(4, 16, DIGEST, 32)], [16]) == 0
    cache_before = len(cache.state.media_cache)
    assert shown(cache, tokens, media, [24]) == 16
    assert cache_before == len(cache.state.media_cache) == 1

"""Waste of pages in use, for sequences whose waste is known."""

from __future__ import annotations

import numpy as np

from kvloom.bench.pool_usage import PeakUsage, waste
from kvloom.core import Field, KVCache, LayerSpec, PoolLayout, Visibility


def test_the_peak_reports_waste_of_pages_in_use_and_of_the_pool() -> None:
    layout = PoolLayout.build({"a": LayerSpec("token", (Field("k", (2, 16), "fp32"),), Visibility("full"))})
    cache = KVCache(layout, 65, max_sequences=4, max_tokens=512)
    peak = PeakUsage(cache)
    sequences = []
    for start, tokens in ((0, 20), (1000, 40)):  # 12 and 8 places of 32 and 48 are empty
        prompt = np.arange(start, start + tokens, dtype=np.int32)
        sequences.append(cache.open(cache.match(prompt)))
        cache.extend(sequences[-1], tokens)
        cache.commit(sequences[-1], prompt)
    page = layout.groups[0].page_stride
    assert waste(cache) == (5 * page, 20 / 80)
    peak.sample()
    for sequence in sequences:
        cache.close(sequence)
    found = peak.figures()
    assert found["peak_running"] == 2
    assert found["peak_bytes"] == 5 * page
    assert found["waste"] == 20 / 80
    assert found["pool_waste"] == 5 * page * (20 / 80) / (cache.state.pool.slabs * layout.slab_bytes)

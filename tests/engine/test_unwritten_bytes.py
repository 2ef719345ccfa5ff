"""Offloaded pages contain only bytes that their owner wrote.

A page of the pool has bytes that its owner never writes: padding, and the rest of a partial block. These bytes are from
earlier owners, which may be other tenants. The tests fill pool and host memory with one value before the first request,
and then look for this value in all pages of the host tier. Other tiers and peers copy their pages from there.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.core import Field, LayerSpec, PageGroup, PoolLayout
from kvloom.engine import Engine
from kvloom.engine.offload import HostPages, form_of
from kvloom.tiers import HostTier, Objects
from tests.engine.test_long_requests import model_of, small_engine
from tests.engine.test_offload import closed, drawn, offload_of, served
from tests.engine.test_rank_tiers import closed as ranks_closed, stored
from tests.engine.thread_ranks import context_engine, parallel_engine
from tests.engines import PATIENT, make_engine
from tests.models.zoo import tiny

OLD = 0xA5
POOL = 1 << 22


def fill_memory(engine: Engine) -> HostTier:
    """Fill the pool of rank 0 and host memory with the bytes of an earlier owner."""
    manager = offload_of(engine)
    manager._pages.buffer.fill_(OLD)
    manager.transfers.host.arena[:] = OLD
    return manager.transfers.host


def old_bytes(host: HostTier) -> tuple[int, int]:
    """Return the number of pages in host memory, and how many of their bytes are those of an earlier owner."""
    pages = found = 0
    for slot in host.index.entries.values():
        if host._slots.ready[slot]:
            start, size = int(host._slots.offset[slot]), int(host._slots.size[slot])
            runs = re.findall(bytes([OLD]) + b"{8,}", host.arena[start : start + size].tobytes())
            pages, found = pages + 1, found + sum(map(len, runs))
    return pages, found


@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"block_tokens": 32}),
        ("llama", {}, {"kv_dtype": "int8"}),
        ("gemma3_text", {}, {}),
        ("bamba", {}, {}),
        ("deepseek_v3", {}, {"block_tokens": 64}),
        ("falcon_h1", {"num_hidden_layers": 7}, {}),
    ],
)
@pytest.mark.few(3)
def test_pages_in_tiers_have_no_bytes_of_earlier_owners(
    family: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    tiers = ["host:16MiB", f"disk:{tmp_path}:64MiB"]
    engine = make_engine(tiny(family, **changes), POOL, tiers=tiers, offload=PATIENT, **settings)
    host = fill_memory(engine)
    first = served(engine, drawn(family, 70, 50, 33))
    served(engine, [[*request.tokens, 5, 6, 7] for request in first])
    stored(engine)
    pages, found = old_bytes(host)
    assert pages > 5
    assert found == 0
    closed(engine)


@pytest.mark.parametrize("start", [parallel_engine, context_engine])
def test_pages_of_several_ranks_have_no_bytes_of_earlier_owners(start: Any, tmp_path: Path) -> None:
    tiers = ["host:16MiB", f"disk:{tmp_path}:64MiB"]
    engine = start(tiny("llama"), 2, pool_bytes=POOL, tiers=tiers, offload=PATIENT)
    host = fill_memory(engine)
    served(engine, drawn("ranks", 60, 50, 33))
    stored(engine)
    pages, found = old_bytes(host)
    assert pages > 5
    assert found == 0
    ranks_closed(engine)


def test_the_last_page_of_a_long_request_has_no_bytes_of_earlier_owners() -> None:
    engine = small_engine(model_of("gemma3_text"), 300)
    manager = offload_of(engine)
    (request,) = served(engine, drawn("long", 300), 4)
    assert manager.stats.cold_pages > 0
    length = len(request.tokens) - 1  # the last token was never computed
    last = engine.cache.block_hashes(request.ids(length), request.control, end=length)[-1]
    for group in engine.layout.groups:
        fields = manager._pages._fields[group.index][0]
        lease = manager.transfers.host.acquire(Objects([last], group.index, form_of(group, 0)))
        start = int(lease.offsets[0])
        assert start >= 0
        for view in fields.views(manager.transfers.host.arena[start : start + fields.page_bytes]):
            assert view[:, : length % 16].any()
            assert not view[:, length % 16 :].any()
        lease.release()
    closed(engine)


def test_layers_that_the_last_page_of_a_block_lacks_are_cleared() -> None:
    spec = LayerSpec(
        "token", (Field("k", (2, 8), "fp32", shard_axis=0), Field("v", (2, 8), "fp32", shard_axis=0))
    )
    layout = PoolLayout.build({f"layer {number}": spec for number in range(5)})
    whole = layout.groups[0]
    size = 3 * whole.layer_bytes + 64
    group: PageGroup = replace(whole, runs=2, page_stride=size, pages_per_slab=1)
    layout = replace(layout, groups=(group,), slab_bytes=size)
    pool, arena = torch.full((4 * size,), OLD, dtype=torch.uint8), np.full(4 * size, OLD, np.uint8)
    pages = HostPages(layout, pool, arena)
    ids, offsets = np.array([1, 2]), np.array([0, 2 * size])
    pages.offload(group, ids, offsets).synchronize()
    pages.clear_unwritten(group, 1, offsets, np.array([16, 4]))
    full, partial = arena[:size], arena[2 * size : 3 * size]
    used = 2 * whole.layer_bytes
    assert (full[:used] == OLD).all()
    assert not full[used:].any()
    assert not partial[used:].any()
    assert int((partial == OLD).sum()) == used // 16 * 4
    assert (arena[size : 2 * size] == OLD).all(), "other pages are unchanged"

"""A tenant's quota and weight hold in tiers, too: in host memory and on disk, under a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvloom.core import CacheControl, Tenant
from kvloom.engine import Engine, Request
from kvloom.tiers import DiskTier, HostTier
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

from .test_offload import PATIENT, closed, drawn, greedy, offload_of, stored


def said(engine: Engine, tenant: str, prompts: list[list[int]]) -> list[Request]:
    requests = [engine.add(prompt, greedy(2), CacheControl(tenant=tenant)) for prompt in prompts]
    engine.run()
    offload_of(engine).poll()
    stored(engine)
    return requests


@pytest.mark.parametrize(
    ("family", "below", "rule"),
    [
        ("llama", "host", "quota"),
        ("llama", "host", "weight"),
        ("llama", "disk", "quota"),
        ("llama", "disk", "weight"),
        ("qwen3_next", "host", "quota"),
    ],
)
def test_one_tenant_does_not_evict_another_within_its_share(
    family: str, below: str, rule: str, tmp_path: Path
) -> None:
    def model() -> Any:
        return tiny(family, max_position_embeddings=512)

    layout = make_engine(model(), 1 << 24).layout
    talk = max(layout.slab_bytes, layout.slab_bytes_for(80))
    flooding = Tenant("flood", quota=2 * talk) if rule == "quota" else Tenant("flood", weight=1)
    tenants = (flooding, Tenant("calm", weight=0 if rule == "quota" else 1))
    calm, flood = drawn(family, 70, 60), drawn((family, "flood"), *[64] * 20)
    text = (
        f"host:{8 * talk}?write=through"
        if below == "host"
        else f"disk:{tmp_path}:{12 * talk}?durable=process"
    )

    def opened() -> Engine:
        return make_engine(model(), 6 * talk, tenants=tenants, tiers=[text], offload=PATIENT)

    engine = opened()
    first = said(engine, "calm", calm)
    offload = offload_of(engine)
    tier = offload.host if below == "host" else offload.transfers.queues[0].tier
    assert isinstance(tier, HostTier | DiskTier)
    kept = tier.used_by("calm")
    flooded = [said(engine, "flood", flood[at : at + 4]) for at in range(0, 20, 4)]
    assert tier.used_by("calm") == kept > 0
    pool = (engine.cache.state.pool.slabs - 1) * layout.slab_bytes
    assert 0 < tier.used_by("flood") <= tier.capacity * (2 * talk / pool if rule == "quota" else 1)
    assert tier.stats().evicted, "the flood has lost pages of its own"
    if below == "disk":
        closed(engine)
        engine = opened()
    else:  # whatever is cached leaves the pool
        engine.cache.grow(engine.cache.shrink(engine.cache.state.pool.slabs - 2).tolist())
    landed = offload_of(engine).stats.loaded_tokens  # of the flood, which loses pages while it waits
    back = said(engine, "calm", [[*one.tokens, 5] for one in first])
    for one, turn in zip(first, back, strict=True):
        computed = len(one.tokens) - 1
        assert turn.cached_tokens == (computed if engine.layout.of("state") else computed // 16 * 16)
    landed = offload_of(engine).stats.loaded_tokens - landed
    assert sum(turn.cached_tokens or 0 for turn in back) == landed
    closed(engine)
    wanted = expected(model(), [*calm, *flood[-4:]], 2)
    assert [one.tokens for one in [*first, *flooded[-1]]] == wanted

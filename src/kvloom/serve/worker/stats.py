"""An engine's counters as one message. They are plain numbers, counted where things happen, and read off here: now and then,
never in a step's way. Knows no metric names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from kvloom.core.histogram import Histogram
from kvloom.engine import Engine, OffloadManager
from kvloom.tiers import TierStats

from .messages import Counts, Stats, TenantUse, TierUse

__all__ = ["engine_stats", "lower_tiers", "tier_use"]


def engine_stats(
    engine: Engine,
    steps: int,
    output_tokens: int,
    preemptions: int,
    gated: Mapping[str, int],
    inside: Iterable[tuple[str, bool]],
) -> Stats:
    """Everything that is told of an engine. `gated` are requests that wait for their tenant's quota, `inside` the others: whose,
    and whether they have begun. O(requests + tenants + groups)."""
    cache, scheduler, pool = engine.cache, engine.scheduler, engine.cache.pool
    sizes = [engine.layout.slab_bytes // c.per_slab for c in pool.classes]
    begun = Counter((tenant, began) for tenant, began in inside)
    tenants = {}
    for name, account in cache.accounts.accounts.items():
        tenants[name] = TenantUse(
            account.used,
            account.in_use,
            account.looked_up_tokens,
            account.hit_tokens,
            account.evictions,
            begun[name, True],
            begun[name, False] + gated.get(name, 0),
        )
    return Stats(
        running=len(scheduler.running),
        waiting=scheduler.waiting + sum(gated.values()),
        preemptions=preemptions,
        slabs=pool.slabs - 1,
        free_slabs=pool.free_slabs,
        held_pages=sum(c.in_use_pages for c in pool.classes),
        cached_pages=sum(c.cached_pages for c in pool.classes),
        held_bytes=sum(c.in_use_pages * size for c, size in zip(pool.classes, sizes, strict=True)),
        cached_bytes=sum(c.cached_pages * size for c, size in zip(pool.classes, sizes, strict=True)),
        looked_up_tokens=cache.looked_up_tokens,
        hit_tokens=cache.hit_tokens,
        evictions=cache.allocator.evictions,
        evicted_bytes=cache.allocator.evicted_bytes,
        moved_pages=cache.allocator.moved_pages,
        nodes=cache.tree.nodes,
        fragmented_bytes=sum(c.free_pages * size for c, size in zip(pool.classes, sizes, strict=True)),
        unused_tokens=cache.unused_tokens(),
        steps=steps,
        output_tokens=output_tokens,
        stops=dict(cache.misses),
        evicted=dict(cache.allocator.evicted),
        hit_pages=cache.hit_pages(),
        idle=_counts(cache.allocator.idle_seconds),
        reused=_counts(cache.reused),
        tenants=tenants,
        **({} if engine.offload is None else _below(engine.offload)),
    )


def _below(lower: OffloadManager) -> dict[str, Any]:
    """What is told of the tiers below the pool."""
    lanes, names = lower.transfers.lanes, lower.tier_names
    called = dict(zip((lane.tier.name for lane in lanes), names[1:], strict=True))
    faults = dict(lower.transfers.faults.counts)  # lanes' threads go on counting
    return {
        "tiers": lower_tiers(lower),
        "lower": asdict(lower.stats),
        "faults": [(called.get(tier, tier), verb, why, count) for (tier, verb, why), count in faults.items()],
    }


def lower_tiers(lower: OffloadManager) -> list[TierUse]:
    """The tiers below the pool, the nearest first."""
    host, *names = lower.tier_names
    # What moves between pool and host passes by no tier's verbs: it is counted where it is decided.
    passed = {"bytes_read": lower.stats.loaded_bytes, "bytes_written": lower.stats.offloaded_bytes}
    return [
        msgspec.structs.replace(tier_use(host, lower.host.stats()), **passed),
        *(
            tier_use(name, lane.stats(), lane.breaker.state)
            for name, lane in zip(names, lower.transfers.lanes, strict=True)
        ),
    ]


def tier_use(name: str, told: TierStats, breaker: str = "closed") -> TierUse:
    """What a tier told of itself, what it is called, and the state of the breaker before it."""
    return TierUse(
        name,
        told.objects,
        told.bytes,
        told.capacity,
        told.reads,
        told.writes,
        told.bytes_read,
        told.bytes_written,
        told.evicted,
        breaker,
    )


def _counts(spread: Histogram) -> Counts:
    return list(spread.counts), spread.total

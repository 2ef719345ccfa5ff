"""Collects the counters of the engine, its cache and its tiers in one EngineStats message. This module does not
depend on metric names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from kvloom.core import Histogram, SloAdmission
from kvloom.engine import Engine, OffloadManager, measured_settings
from kvloom.engine.speculation import Speculation
from kvloom.tiers import TierStats

from .adapter_loads import adapter_infos
from .messages import EngineStats, HistogramCounts, SettingInfo, TenantUsage, TierUsage

__all__ = ["engine_stats", "tier_usage", "tier_usages"]


def engine_stats(
    engine: Engine,
    steps: int,
    output_tokens: int,
    preemptions: int,
    waiting_for_quota: Mapping[str, int],
    open_requests: Iterable[tuple[str, bool]],
) -> EngineStats:
    """Return the engine's counters. O(requests + tenants + groups).

    `waiting_for_quota` is the number of requests of each tenant that wait for the tenant's quota.
    `open_requests` contains all other requests, as pairs: the tenant, and whether the request has started.
    """
    cache, scheduler, inspect = engine.cache, engine.scheduler, engine.cache.inspect
    classes = inspect.size_classes
    sizes = [engine.layout.slab_bytes // c.per_slab for c in classes]
    started = Counter((tenant, began) for tenant, began in open_requests)
    tier_bytes = {} if engine.offload is None else _tenant_tier_bytes(engine.offload)
    tenants = {}
    for name, account in inspect.accounts.items():
        tenants[name] = TenantUsage(
            account.used,
            account.in_use,
            account.looked_up_tokens,
            account.hit_tokens,
            account.evictions,
            started[name, True],
            started[name, False] + waiting_for_quota.get(name, 0),
            tier_bytes.get(name, {}),
        )
    return EngineStats(
        running=len(scheduler.running),
        waiting=scheduler.waiting + sum(waiting_for_quota.values()),
        preemptions=preemptions,
        slabs=cache.usable_slabs,
        free_slabs=cache.free_slabs,
        in_use_pages=sum(c.in_use_pages for c in classes),
        cached_pages=sum(c.cached_pages for c in classes),
        in_use_bytes=sum(c.in_use_pages * size for c, size in zip(classes, sizes, strict=True)),
        cached_bytes=sum(c.cached_pages * size for c, size in zip(classes, sizes, strict=True)),
        looked_up_tokens=inspect.looked_up_tokens,
        hit_tokens=inspect.hit_tokens,
        evictions=inspect.evicted.total(),
        evicted_bytes=inspect.evicted_bytes,
        moved_pages=inspect.moved_pages,
        nodes=inspect.nodes,
        fragmented_bytes=sum(c.free_pages * size for c, size in zip(classes, sizes, strict=True)),
        unused_tokens=inspect.unused_tokens(),
        steps=steps,
        output_tokens=output_tokens,
        miss_reasons=dict(inspect.misses),
        evicted=dict(inspect.evicted),
        policy=inspect.policy,
        hit_pages=inspect.hit_pages(),
        eviction_age=_counts(inspect.idle_seconds),
        reuse_age=_counts(inspect.reuse_seconds),
        tenants=tenants,
        **({} if engine.speculation is None else _speculation_stats(engine.speculation)),
        role=engine.role,
        settings=[SettingInfo(**asdict(one)) for one in measured_settings(engine)],
        adapters=adapter_infos(engine),
        encoding={} if engine.encoders is None else asdict(engine.encoders.stats),
        **_slo_stats(engine.scheduler.slo.admission),
        **({} if engine.offload is None else _offload_stats(engine.offload)),
    )


def _slo_stats(admission: SloAdmission) -> dict[str, Any]:
    """Return the stats of requests with an objective: the numbers of admitted, deferred and refused requests, and
    histograms of actual times divided by predicted times. Also return the coefficients of step times.
    """
    return {
        "slo": {verdict.value: count for verdict, count in admission.counts.items()},
        "slo_ttft_ratio": _counts(admission.ttft_ratio),
        "slo_tbt_ratio": _counts(admission.tbt_ratio),
        "step_times": list(admission.times.coefficients) if admission.times.is_known else [],
    }


def _speculation_stats(speculation: Speculation) -> dict[str, Any]:
    """Return the counts of drafts and the decisions about proposers."""
    stats, controller = speculation.stats, speculation.controller
    return {
        "drafts": stats.rows,
        "proposed_tokens": list(stats.proposed),
        "accepted_tokens": list(stats.accepted),
        "draft_seconds_saved": stats.seconds_saved,
        "speculation": {} if controller is None else dict(controller.reasons),
    }


def _offload_stats(offload: OffloadManager) -> dict[str, Any]:
    """Return the stats of tiers and of the offload manager."""
    lanes, names = offload.transfers.queues, offload.tier_names
    called = dict(zip((lane.tier.name for lane in lanes), names[1:], strict=True))
    faults = dict(offload.transfers.fault_log.counts)  # a copy: tier threads keep counting
    return {
        "tiers": tier_usages(offload),
        "offload": asdict(offload.stats),
        "tier_faults": [
            (called.get(tier, tier), verb, why, count) for (tier, verb, why), count in faults.items()
        ],
    }


def _tenant_tier_bytes(offload: OffloadManager) -> dict[str, dict[str, int]]:
    """Return the bytes of each tenant in each tier that counts bytes by tenant: tenant → tier → bytes."""
    stats = [offload.host.stats(), *(lane.stats() for lane in offload.transfers.queues)]
    found: dict[str, dict[str, int]] = {}
    for tier, one in zip(offload.tier_names, stats, strict=True):
        for tenant, used in one.tenants.items():
            found.setdefault(tenant, {})[tier] = used
    return found


def tier_usages(offload: OffloadManager) -> list[TierUsage]:
    """Return the usage of every tier, fastest first."""
    host, *names = offload.tier_names
    # The offload manager copies between pool and host memory itself, so it counts these bytes.
    copied = {"bytes_read": offload.stats.loaded_bytes, "bytes_written": offload.stats.offloaded_bytes}
    return [
        msgspec.structs.replace(tier_usage(host, offload.host.stats()), **copied),
        *(
            tier_usage(name, lane.stats(), lane.breaker.state)
            for name, lane in zip(names, offload.transfers.queues, strict=True)
        ),
    ]


def tier_usage(name: str, stats: TierStats, breaker: str = "closed") -> TierUsage:
    """Return a tier's stats under its display name, with the state of its circuit breaker."""
    return TierUsage(
        name,
        stats.objects,
        stats.bytes,
        stats.capacity,
        stats.reads,
        stats.writes,
        stats.bytes_read,
        stats.bytes_written,
        stats.evicted,
        breaker,
    )


def _counts(spread: Histogram) -> HistogramCounts:
    return list(spread.counts), spread.total

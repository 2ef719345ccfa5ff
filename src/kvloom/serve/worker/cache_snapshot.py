"""A snapshot of the engine's cache as JSON, for the dashboard. The module runs in the engine process and
does not depend on HTTP.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict

from .adapter_loads import adapter_infos
from .messages import TierUsage
from .stats import tier_usages

if TYPE_CHECKING:
    from kvloom.engine import Engine

__all__ = ["CacheSnapshot"]

_encode = msgspec.json.Encoder().encode


class CacheSnapshot:
    """Takes snapshots of one engine's cache. Allocates nothing before the first snapshot."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool_map = engine.cache.inspect.pool_map()

    def json(self) -> bytes:
        """Return a snapshot as JSON. Takes milliseconds at any pool size."""
        scheduler = self._engine.scheduler
        snapshot: dict[str, Any] = self._pool_map.look()
        snapshot["running"], snapshot["waiting"] = len(scheduler.running), scheduler.waiting
        snapshot["tiers"] = self._tiers()
        snapshot["adapters"] = self._adapters(snapshot["tree"].pop("adapter_bytes"))
        return _encode(snapshot)

    def _adapters(self, cached: dict[str, int]) -> list[dict[str, Any]]:
        """Return the cached bytes of the base model, whose name is "", and of each LoRA adapter. The list is empty if
        the engine has no adapters. All blocks of an activated LoRA count as blocks of the base model.

        The keys of `cached` are values of `CacheControl.adapter`, and its values are bytes. The key of a LoRA adapter
        ends with the digest of the adapter."""
        infos = adapter_infos(self._engine)
        if not infos:
            return []
        by_digest: Counter[str] = Counter()
        for adapter, size in cached.items():
            by_digest[adapter.rpartition(" ")[2]] += size
        base = {"name": "", "rank": 0, "requests": None, "resident": True}
        base["bytes"] = sum(by_digest.values()) - sum(by_digest[one.digest] for one in infos)
        return [base] + [
            {
                "name": one.name,
                "rank": one.rank,
                "requests": one.requests,
                "resident": one.is_resident,
                "bytes": by_digest[one.digest],
            }
            for one in infos
        ]

    def _tiers(self) -> list[dict[str, Any]]:
        """Return the tiers, fastest first."""
        offload = self._engine.offload
        if offload is None:
            return []
        host, *others = ({**asdict(use), "faults": _faults(use)} for use in tier_usages(offload))
        return [{**host, "loaded_tokens": offload.stats.loaded_tokens}, *others]


def _faults(use: TierUsage) -> dict[str, int]:
    """Return the failed reads and writes of a tier, by outcome."""
    counts = Counter(use.reads) + Counter(use.writes)
    return {outcome: count for outcome, count in counts.items() if outcome not in ("ok", "missing")}

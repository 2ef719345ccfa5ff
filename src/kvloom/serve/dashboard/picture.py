"""The engine's side of the dashboard: one look at an engine, as JSON. Numbers and names; knows no HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvloom.core.survey import Survey

if TYPE_CHECKING:
    from kvloom.engine.engine import Engine
    from kvloom.tiers import Tier

__all__ = ["Picture"]

_encode = msgspec.json.Encoder().encode


class Picture:
    """Pictures of one engine. Costs nothing until the first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._survey = Survey(engine.cache)

    def json(self) -> bytes:
        """What a viewer is shown; milliseconds, however large the pool."""
        scheduler = self._engine.scheduler
        seen: dict[str, Any] = self._survey.look()
        seen["running"], seen["waiting"] = len(scheduler.running), scheduler.waiting
        seen["tiers"] = self._tiers()
        return _encode(seen)

    def _tiers(self) -> list[dict[str, Any]]:
        """Tiers from the nearest down. What moves between pool and host passes by no tier's verbs: it is counted where it is
        decided."""
        lower = self._engine.lower
        if lower is None:
            return []
        counts = lower.counts
        host = {
            **_tier(lower.host),
            "bytes_read": counts["landed_bytes"],
            "bytes_written": lower.kept_bytes,
            "tokens_back": counts["landed_tokens"],
        }
        return [host, *({**_tier(lane.tier), "open": not lane.breaker.closed} for lane in lower.mover.lanes)]


def _tier(tier: Tier) -> dict[str, Any]:
    stats = tier.stats()
    return {
        "name": tier.name,
        "objects": stats.objects,
        "bytes": stats.bytes,
        "capacity": stats.capacity,
        "reads": stats.reads,
        "writes": stats.writes,
        "bytes_read": stats.bytes_read,
        "bytes_written": stats.bytes_written,
        "evicted": stats.evicted,
    }

"""The engine's side of the dashboard: one look at an engine, as JSON. Numbers and names; knows no HTTP."""

from __future__ import annotations

from collections.abc import Iterable
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
        seen["tiers"] = [_tier(tier) for tier in self._tiers()]
        return _encode(seen)

    def _tiers(self) -> Iterable[Tier]:
        lower = getattr(self._engine, "lower", None)
        if lower is not None:
            return [lower.mover.host, *(lane.tier for lane in lower.mover.lanes)]
        return getattr(self._engine, "tiers", None) or ()


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

"""The engine's side of the dashboard: one look at an engine, as JSON. Numbers and names; knows no HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict

from kvloom.core.inspect.pool_map import PoolMap
from kvloom.serve.worker.stats import lower_tiers

if TYPE_CHECKING:
    from kvloom.engine import Engine

__all__ = ["Picture"]

_encode = msgspec.json.Encoder().encode


class Picture:
    """Pictures of one engine. Costs nothing until the first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._survey = PoolMap(engine.cache)

    def json(self) -> bytes:
        """What a viewer is shown; milliseconds, however large the pool."""
        scheduler = self._engine.scheduler
        seen: dict[str, Any] = self._survey.look()
        seen["running"], seen["waiting"] = len(scheduler.running), scheduler.waiting
        seen["tiers"] = self._tiers()
        return _encode(seen)

    def _tiers(self) -> list[dict[str, Any]]:
        """Tiers from the nearest down."""
        lower = self._engine.offload
        if lower is None:
            return []
        host, *below = map(asdict, lower_tiers(lower))
        return [{**host, "tokens_back": lower.stats.loaded_tokens}, *below]

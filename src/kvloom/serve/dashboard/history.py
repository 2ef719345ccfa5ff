"""Samples of a server's counters over the past minutes, as rates between consecutive samples."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvloom.serve.api import ServerContext

__all__ = ["History"]

SERIES = (
    "running",
    "waiting",
    "output_rate",
    "prompt_rate",
    "hit_rate",
    "ttft",
    "used",
    "in_use",
    "evicted_rate",
)


class History:
    """The last samples, taken about every `seconds`. Rates are per second; null means that nothing was measured."""

    def __init__(self, context: ServerContext, samples: deque[list[float | None]], seconds: float) -> None:
        self._context, self._samples, self._seconds = context, samples, seconds
        self._before: tuple[float, dict[str, float]] | None = None
        self._last = 0.0

    def sample(self, now: float) -> None:
        """Take a sample. Takes microseconds."""
        stats, link = self._context.engine.stats, self._context.engine
        first = self._context.metrics.ttft
        counters = {
            "output": stats.output_tokens,
            "prompt": stats.looked_up_tokens,
            "hits": stats.hit_tokens,
            "evictions": stats.evictions,
            "firsts": first.count,
            "waited": first.total,
            "restarts": link.restarts,
        }
        before, self._before = self._before, (now, counters)
        self._last = now
        if before is None:
            return
        seconds = max(1e-3, now - before[0])
        again = counters["restarts"] != before[1]["restarts"]  # the engine's counters restarted
        more = {
            name: value - (0 if again and name not in ("firsts", "waited") else before[1][name])
            for name, value in counters.items()
        }
        slabs = max(1, stats.slabs)
        pages = stats.in_use_pages + stats.cached_pages
        used = 1 - stats.free_slabs / slabs if stats.slabs else 0.0
        row: list[float | None] = [
            stats.running,
            stats.waiting,
            more["output"] / seconds,
            more["prompt"] / seconds,
            more["hits"] / more["prompt"] if more["prompt"] > 0 else None,
            more["waited"] / more["firsts"] if more["firsts"] > 0 else None,
            used,
            used * stats.in_use_pages / pages if pages else 0.0,
            more["evictions"] / seconds,
        ]
        self._samples.append([None if value is None else round(max(0.0, value), 4) for value in row])

    def to_dict(self) -> dict[str, Any]:
        """Return one list per series, oldest first; the last value belongs to `until`."""
        rows = list(self._samples)
        series = {name: [row[i] for row in rows] for i, name in enumerate(SERIES)}
        return {"seconds": self._seconds, "until": self._last or None, "series": series}

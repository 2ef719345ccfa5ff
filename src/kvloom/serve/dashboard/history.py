"""The past minutes of one server, as a bounded row of samples: what its counters did between one and the next."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvloom.serve.api.server_context import Service

__all__ = ["History"]

SERIES = (
    "running",
    "waiting",
    "output_rate",
    "prompt_rate",
    "hit_rate",
    "ttft",
    "used",
    "held",
    "evicted_rate",
)


class History:
    """`samples` keeps the last of them, taken about every `seconds`. A rate is told for a second; what nobody did is null."""

    def __init__(self, service: Service, samples: deque[list[float | None]], seconds: float) -> None:
        self._service, self._samples, self._seconds = service, samples, seconds
        self._before: tuple[float, dict[str, float]] | None = None
        self._last = 0.0

    def sample(self, now: float) -> None:
        """Take one; microseconds."""
        stats, link = self._service.link.stats, self._service.link
        first = self._service.metrics.first_token
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
        again = counters["restarts"] != before[1]["restarts"]  # its counters began anew
        more = {
            name: value - (0 if again and name not in ("firsts", "waited") else before[1][name])
            for name, value in counters.items()
        }
        slabs = max(1, stats.slabs)
        pages = stats.held_pages + stats.cached_pages
        used = 1 - stats.free_slabs / slabs if stats.slabs else 0.0
        row: list[float | None] = [
            stats.running,
            stats.waiting,
            more["output"] / seconds,
            more["prompt"] / seconds,
            more["hits"] / more["prompt"] if more["prompt"] > 0 else None,
            more["waited"] / more["firsts"] if more["firsts"] > 0 else None,
            used,
            used * stats.held_pages / pages if pages else 0.0,
            more["evictions"] / seconds,
        ]
        self._samples.append([None if value is None else round(max(0.0, value), 4) for value in row])

    def told(self) -> dict[str, Any]:
        """One list a series, oldest first; the last is of `until`."""
        rows = list(self._samples)
        series = {name: [row[i] for row in rows] for i, name in enumerate(SERIES)}
        return {"seconds": self._seconds, "until": self._last or None, "series": series}

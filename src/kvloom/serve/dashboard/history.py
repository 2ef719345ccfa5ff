"""Samples of a server's counters over the last minutes, as rates between consecutive samples."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvloom.serve.api import ServedModel

__all__ = ["History"]

SERIES = (
    "running",
    "waiting",
    "output_rate",
    "prompt_rate",
    "hit_rate",
    "ttft_p50",
    "ttft_p95",
    "ttft_p99",
    "itl_p50",
    "itl_p95",
    "itl_p99",
    "used",
    "in_use",
    "evicted_rate",
)


QUANTILES = (0.5, 0.95, 0.99)
WINDOW = 30
"""Samples over which quantiles of time to first token (ttft) and time between tokens (itl) are taken: one minute."""


class History:
    """The last samples, about `seconds` apart. Rates are per second. None means that nothing was measured."""

    def __init__(self, served: ServedModel, samples: deque[list[float | None]], seconds: float) -> None:
        self._served, self._samples, self._seconds = served, samples, seconds
        self._before: tuple[float, dict[str, float]] | None = None
        self._last = 0.0
        metrics = served.metrics
        self._histograms = metrics.ttft, metrics.inter_token
        self._counts: deque[list[list[int]]] = deque([self._histogram_counts()], WINDOW + 1)

    def sample(self, now: float) -> None:
        """Take a sample. Takes microseconds."""
        stats, link = self._served.engine.stats, self._served.engine
        counters: dict[str, float] = {
            "output": stats.output_tokens,
            "prompt": stats.looked_up_tokens,
            "hits": stats.hit_tokens,
            "evictions": stats.evictions,
            "restarts": link.restarts,
        }
        before, self._before = self._before, (now, counters)
        self._last = now
        quantiles = self._quantiles()
        if before is None:
            return
        seconds = max(1e-3, now - before[0])
        again = counters["restarts"] != before[1]["restarts"]  # the engine's counters restarted
        more = {name: value - (0 if again else before[1][name]) for name, value in counters.items()}
        slabs = max(1, stats.slabs)
        pages = stats.in_use_pages + stats.cached_pages
        used = 1 - stats.free_slabs / slabs if stats.slabs else 0.0
        row: list[float | None] = [
            stats.running,
            stats.waiting,
            more["output"] / seconds,
            more["prompt"] / seconds,
            more["hits"] / more["prompt"] if more["prompt"] > 0 else None,
            *quantiles,
            used,
            used * stats.in_use_pages / pages if pages else 0.0,
            more["evictions"] / seconds,
        ]
        self._samples.append([None if value is None else round(max(0.0, value), 6) for value in row])

    def _histogram_counts(self) -> list[list[int]]:
        return [list(histogram.counts) for histogram in self._histograms]

    def _quantiles(self) -> list[float | None]:
        """Return the quantiles of TTFT and ITL over the last WINDOW samples. Takes microseconds."""
        self._counts.append(self._histogram_counts())
        recent = [one.since(counts) for one, counts in zip(self._histograms, self._counts[0], strict=True)]
        return [one.quantile(q) for one in recent for q in QUANTILES]

    def to_dict(self) -> dict[str, Any]:
        """Return one list per series, oldest first. The last value belongs to the time `until`."""
        rows = list(self._samples)
        series = {name: [row[i] for row in rows] for i, name in enumerate(SERIES)}
        return {"seconds": self._seconds, "until": self._last or None, "series": series}

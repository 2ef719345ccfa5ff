"""Samples of counters over the last hour, as rates between consecutive samples."""

from __future__ import annotations

import bisect
import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kvloom.core import Histogram
from kvloom.serve.api import ServedModel

__all__ = ["QUANTILES", "History", "Samples"]

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
    "accept_rate",
    "draft_tokens",
)
QUANTILES = (0.5, 0.95, 0.99)
WINDOW = 30
"""Number of samples (one minute) over which quantiles of time to first token (ttft) and time between tokens (itl) are
computed."""
MAX_SAMPLES = 1800
"""Number of samples that are kept: one hour at a sample every 2 s. About 0.2 KB per sample."""
SHOWN_SAMPLES = 300
"""Largest number of samples in a document: ten minutes."""
OVERVIEW = 120
"""Largest number of points of the curve over all samples."""


class Samples:
    """The last samples of several series, taken about every `seconds` seconds. Rates are per second. A value is None if
    nothing was measured. Quantiles of `histograms` cover the last WINDOW samples.
    """

    def __init__(self, names: Sequence[str], histograms: Sequence[Histogram], seconds: float) -> None:
        self._names, self._histograms, self._seconds = names, histograms, seconds
        self._rows: deque[array[float]] = deque(
            maxlen=MAX_SAMPLES
        )  # time, then values; NaN: nothing measured
        self._before: tuple[float, Mapping[str, float]] | None = None
        self._last = 0.0
        self._counts: deque[list[list[int]]] = deque([self._histogram_counts()], WINDOW + 1)

    def increments(self, now: float, counters: Mapping[str, float]) -> tuple[float, dict[str, float]] | None:
        """Return the seconds since the previous call, and the increase of each counter since then. Return None on the
        first call.
        """
        before, self._before, self._last = self._before, (now, counters), now
        if before is None:
            return None
        return max(1e-3, now - before[0]), {name: n - before[1][name] for name, n in counters.items()}

    def quantiles(self) -> list[float | None]:
        """Return the quantiles of each histogram over the last WINDOW samples. Call this method once per sample,
        because each call stores the counts of the histograms as a sample. Takes microseconds.
        """
        self._counts.append(self._histogram_counts())
        recent = [one.since(counts) for one, counts in zip(self._histograms, self._counts[0], strict=True)]
        return [one.quantile(q) for one in recent for q in QUANTILES]

    def add(self, row: Sequence[float | None]) -> None:
        """Add a sample, which has one value per series. Call `increments` first, because it sets the time of the
        sample."""
        values = (math.nan if value is None else round(max(0.0, value), 6) for value in row)
        self._rows.append(array("d", (self._last, *values)))

    def _histogram_counts(self) -> list[list[int]]:
        return [list(histogram.counts) for histogram in self._histograms]

    def to_dict(self, until: float | None = None) -> dict[str, Any]:
        """Return, for each series, a list of the last SHOWN_SAMPLES values up to the time `until` (None means now),
        oldest first. The key `until` of the result is the time of the last value."""
        end = len(self._rows)
        if until is not None:
            end = bisect.bisect_right(self._rows, until, key=lambda row: row[0])
        rows = [self._rows[i] for i in range(max(0, end - SHOWN_SAMPLES), end)]
        last = rows[-1][0] if until is not None and rows else self._last
        series = {name: [_measured(row[i]) for row in rows] for i, name in enumerate(self._names, 1)}
        return {"seconds": self._seconds, "until": last or None, "series": series}

    def overview(self, name: str, start: float, end: float) -> list[float | None]:
        """Divide the time from `start` to `end` into equal parts, and return the mean of one series in each part. There
        are at most OVERVIEW parts, and each is as long as at least two samples. The mean of a part without samples is
        None."""
        at = self._names.index(name) + 1
        parts = max(1, min(OVERVIEW, int((end - start) / (2 * self._seconds))))
        sums, counts = [0.0] * parts, [0] * parts
        scale = parts / max(1e-3, end - start)
        for row in self._rows:
            part = int((row[0] - start) * scale)
            if 0 <= part <= parts and not math.isnan(row[at]):
                sums[min(part, parts - 1)] += row[at]
                counts[min(part, parts - 1)] += 1
        return [round(total / n, 3) if n else None for total, n in zip(sums, counts, strict=True)]


def _measured(value: float) -> float | None:
    return None if math.isnan(value) else value


class History:
    """Takes samples of the metrics of one served model at fixed intervals, for the curves of the dashboard."""

    def __init__(self, served: ServedModel, seconds: float) -> None:
        self._served = served
        metrics = served.metrics
        self._samples = Samples(SERIES, (metrics.ttft, metrics.inter_token), seconds)

    def sample(self, now: float) -> None:
        """Take a sample. Takes microseconds."""
        stats, link = self._served.engine.stats, self._served.engine
        counters: dict[str, float] = {
            "output": stats.output_tokens,
            "prompt": stats.looked_up_tokens,
            "hits": stats.hit_tokens,
            "evictions": stats.evictions,
            "restarts": link.restarts,
            "drafts": stats.drafts,
            "proposed": sum(stats.proposed_tokens),
            "accepted": sum(stats.accepted_tokens),
        }
        found = self._samples.increments(now, counters)
        quantiles = self._samples.quantiles()
        if found is None:
            return
        seconds, more = found
        if more["restarts"]:  # the engine's counters restarted
            more = counters
        slabs = max(1, stats.slabs)
        pages = stats.in_use_pages + stats.cached_pages
        used = 1 - stats.free_slabs / slabs if stats.slabs else 0.0
        self._samples.add([
            stats.running,
            stats.waiting,
            more["output"] / seconds,
            more["prompt"] / seconds,
            more["hits"] / more["prompt"] if more["prompt"] > 0 else None,
            *quantiles,
            used,
            used * stats.in_use_pages / pages if pages else 0.0,
            more["evictions"] / seconds,
            more["accepted"] / more["proposed"] if more["proposed"] > 0 else None,
            1 + more["accepted"] / more["drafts"] if more["drafts"] > 0 else None,
        ])  # fmt: skip

    def to_dict(self, until: float | None = None) -> dict[str, Any]:
        """Return the samples up to the time `until` (None means now) as plain data for JSON."""
        return self._samples.to_dict(until)

    def overview(self, start: float, end: float) -> list[float | None]:
        """Divide the time from `start` to `end` into equal parts, and return the mean number of output tokens per
        second in each part."""
        return self._samples.overview("output_rate", start, end)

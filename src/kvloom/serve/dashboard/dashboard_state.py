"""The data of the dashboard: a history, and a cache snapshot. All viewers share one snapshot per REFRESH_SECONDS.

    viewers ──▶ state_json() ──▶ the latest snapshot, or one SnapshotRequest that all viewers wait for
    every 2 s   a sample of counters, with or without viewers
    every 15 s  a frame: snapshot and totals, for `past_json(at)`

While the engine is loading, dead or in a long step, viewers see the last snapshot with its age. This module is
independent of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

import msgspec

from kvloom.core import SECONDS, Histogram
from kvloom.serve.api import ServedModel, ServerContext
from kvloom.serve.errors import ApiError
from kvloom.serve.metrics import age_histogram
from kvloom.serve.words import MISS_REASONS, OUTCOMES

from .history import QUANTILES, History
from .past import FRAME_SECONDS, Past

__all__ = ["DashboardState", "Dashboards"]

REFRESH_SECONDS = 1.0
WAIT_SECONDS = 2.0
"""Longest time in seconds that viewers wait for a new snapshot. After that they get the previous snapshot."""
SAMPLE_SECONDS = 2.0
PAST_REFRESH_SECONDS = 5.0
"""Seconds after which a page that shows the past asks again, to extend its time axis."""
WORDS = {"miss_reasons": MISS_REASONS, "outcomes": OUTCOMES}
_encode = msgspec.json.Encoder().encode


class Dashboards:
    """The dashboard data of all served models: one `DashboardState` for each model. Takes samples of all models for the
    history."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._states: dict[ServedModel, DashboardState] = {}

    def of(self, served: ServedModel) -> DashboardState:
        """Return the `DashboardState` of a served model."""
        if served not in self._states:
            self._states[served] = DashboardState(self._context, served)
        return self._states[served]

    async def sample_history(self) -> None:
        """Take samples of all models until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            models = list(self._context.models.values())
            for served in models:
                self.of(served).sample(time.time())
                if served.metrics.is_enabled:
                    self.of(served).keep(time.time())
            self._states = {served: state for served, state in self._states.items() if served in models}


class DashboardState:
    """Produces the data of one model for its dashboard pages. All viewers of the model share one object."""

    def __init__(self, context: ServerContext, served: ServedModel) -> None:
        self._context, self._served = context, served
        self._history = History(served, SAMPLE_SECONDS)
        self._snapshot: bytes | None = None
        self._snapshot_at = 0.0
        self._cached_json: tuple[float, bytes] = (0.0, b"")
        self._refreshing: asyncio.Task[None] | None = None
        self._past = Past()
        self._keeping: asyncio.Task[None] | None = None
        self._kept_steps = [-1, -1]  # the engine's steps at the last two frames
        self._kept_tiers: tuple[float, dict[str, tuple[int, int]]] = (0.0, {})

    def sample(self, now: float) -> None:
        """Take a sample for the history."""
        self._history.sample(now)

    def keep(self, now: float) -> None:
        """If the last frame is FRAME_SECONDS old, store a new frame: the present state, which `past_json` can return
        later. A frame needs a snapshot of the engine, which a background task requests. While the engine runs no
        steps, the last frame is repeated instead.
        """
        busy = self._keeping is not None and not self._keeping.done()
        if (
            busy
            or now - self._past.last < FRAME_SECONDS - SAMPLE_SECONDS / 2
            or not self._served.engine.is_ready
        ):
            return
        steps = self._served.engine.stats.steps
        if self._kept_steps == [steps, steps]:
            self._past.repeat(now)
            return
        self._kept_steps = [self._kept_steps[1], steps]
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        if time.time() - self._snapshot_at > SAMPLE_SECONDS:
            await self._refresh()
        if self._snapshot is not None:
            document = {**self._now(), "tier_rates": self._tier_rates(time.time())}
            self._past.add(time.time(), _encode(document))

    def _tier_rates(self, now: float) -> list[dict[str, int]]:
        """Return the bytes per second that each tier has written (`down`) and read (`up`) since the last frame."""
        (before, bytes_before), tiers = self._kept_tiers, self._served.engine.stats.tiers
        self._kept_tiers = now, {tier.name: (tier.bytes_written, tier.bytes_read) for tier in tiers}
        rates = []
        for name, (written, read) in self._kept_tiers[1].items():
            past = bytes_before.get(name, (written, read))
            seconds = max(1e-3, now - before)
            down, up = max(0, written - past[0]) / seconds, max(0, read - past[1]) / seconds
            rates.append({"down": round(down), "up": round(up)})
        return rates

    def past_json(self, at: float) -> bytes | None:
        """Return the state at the Unix time `at` as JSON. The JSON contains the last frame (stored state) before `at`,
        and the samples up to `at`. If there is no earlier frame, the oldest frame is used. Return None if there are no
        frames. Does not ask the engine.
        """
        found = self._past.find(at)
        if found is None:
            return None
        time_, document = found
        parts: dict[str, Any] = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
        return _encode({
            **parts, "now": time_, "engine_at": time_, "interval": PAST_REFRESH_SECONDS,
            "history": self._history.to_dict(max(at, time_)), "past": self._past_range(), "words": WORDS,
        })  # fmt: skip

    def _past_range(self) -> dict[str, Any]:
        """Return the times of the oldest and the newest frame (stored state), and the load between these times."""
        found = self._past.to_dict()
        start, end = found["from"], found["until"]
        return {**found, "load": [] if start is None else self._history.overview(start, end)}

    async def state_json(self) -> bytes:
        """Return the whole state as JSON. Requests at most one snapshot per REFRESH_SECONDS."""
        now = time.monotonic()
        if now - self._cached_json[0] < REFRESH_SECONDS and self._cached_json[1]:
            return self._cached_json[1]
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())
        await asyncio.wait({self._refreshing}, timeout=WAIT_SECONDS)
        if time.monotonic() - self._cached_json[0] >= REFRESH_SECONDS or not self._cached_json[1]:
            self._cached_json = time.monotonic(), _encode(self._state())
        return self._cached_json[1]

    async def _refresh(self) -> None:
        try:
            self._snapshot = await self._served.engine.snapshot(60.0)
            self._snapshot_at = time.time()
        except (ApiError, TimeoutError):  # no engine: the state shows it
            pass
        self._cached_json = time.monotonic(), _encode(self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "now": time.time(),
            "interval": REFRESH_SECONDS,
            "engine_at": self._snapshot_at or None,
            **self._now(),
            "history": self._history.to_dict(),
            "past": self._past_range(),
            "words": WORDS,
        }

    def _now(self) -> dict[str, Any]:
        """Return the current state, without the history. A frame (stored state) contains these fields, and the transfer
        rates of tiers."""
        context, served = self._context, self._served
        link = served.engine
        facts = link.info
        status = "draining" if context.limiter.is_draining else "ok" if link.is_ready else "loading"
        return {
            "server": {
                "status": status,
                "model": served.name,
                "models": list(context.models),
                "since": served.created,
                "restarts": link.restarts,
                "open_requests": context.limiter.requests,
                "device": None if facts is None else facts.device,
                "dtype": None if facts is None else facts.dtype,
                "pool_bytes": None if facts is None else facts.pool_bytes,
                "bytes_per_token": None if facts is None else facts.bytes_per_token,
            },
            "models": [_model(one) for one in context.models.values()],
            "engine": None if self._snapshot is None else msgspec.Raw(self._snapshot),
            "totals": self._totals(),
        }

    def _totals(self) -> dict[str, Any]:
        """Return counters since the start of the server. The counters of drafts and the histograms of entry ages start
        again when the engine restarts.
        """
        metrics, stats = self._served.metrics, self._served.engine.stats
        evicted, reused = age_histogram(stats.eviction_age), age_histogram(stats.reuse_age)
        latency = {"ttft": metrics.ttft, "itl": metrics.inter_token, "request": metrics.request_time}
        return {
            "prompt_tokens": metrics.prompt_tokens,
            "cached_tokens": metrics.cached_tokens,
            "output_tokens": metrics.output_tokens,
            "saved_seconds": round(metrics.saved_time.seconds, 3),
            "hit_tokens": dict(metrics.hit_tokens),
            "tenants": {name: asdict(use) for name, use in metrics.tenant_tokens.items()},
            "adapters": {name: asdict(use) for name, use in metrics.adapter_tokens.items()},
            "latency": {name: _quantiles(histogram) for name, histogram in latency.items()},
            "policy": stats.policy,
            "settings": [msgspec.structs.asdict(one) for one in stats.settings],
            "drafts": {
                "count": stats.drafts,
                "proposed": stats.proposed_tokens,
                "accepted": stats.accepted_tokens,
                "saved_seconds": round(stats.draft_seconds_saved, 3),
                "decisions": stats.speculation,
            },
            "ages": {
                "bounds": SECONDS,
                "evicted": evicted.counts,
                "evicted_p50": evicted.quantile(0.5),
                "reused": reused.counts,
                "reused_p50": reused.quantile(0.5),
            },
        }


def _model(served: ServedModel) -> dict[str, Any]:
    """Return one row of the dashboard's list of all models: the status, pool, load and hits of one model."""
    stats, facts, metrics = served.engine.stats, served.engine.info, served.metrics
    return {
        "name": served.name,
        "status": served.status,
        "pool_bytes": None if facts is None else facts.pool_bytes,
        "in_use_bytes": stats.in_use_bytes,
        "cached_bytes": stats.cached_bytes,
        "running": stats.running,
        "waiting": stats.waiting,
        "adapters": len(stats.adapters),
        "prompt_tokens": metrics.prompt_tokens,
        "cached_tokens": metrics.cached_tokens,
    }


def _quantiles(histogram: Histogram) -> dict[str, float | None]:
    found = {f"p{round(100 * q)}": histogram.quantile(q) for q in QUANTILES}
    return {"count": histogram.count, **found}

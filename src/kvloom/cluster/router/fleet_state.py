"""The data of the fleet page and of `kvloom top --url ROUTER`: the router, its workers, hand-overs between workers,
totals, and samples of the past ten minutes.

All viewers get the same JSON document. The router builds it from its own counters and the workers' latest load reports,
and sends no extra request to workers.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kvloom.serve.dashboard import QUANTILES, Samples

from .fleet import Fleet, Worker, now
from .proxy import Proxy

__all__ = ["FleetState"]

REFRESH_SECONDS = 1.0
SAMPLE_SECONDS = 2.0
SERIES = (
    "running",
    "waiting",
    "request_rate",
    "prompt_rate",
    "hit_rate",
    "hand_over_rate",
    "failover_rate",
    *(f"{name}_p{round(100 * q)}" for name in ("ttft", "overhead") for q in QUANTILES),
)


class FleetState:
    """Produces the data of the router's dashboard: figures of the router and of each worker. `run` takes samples for
    the curves until it is cancelled."""

    def __init__(self, fleet: Fleet, proxy: Proxy) -> None:
        self._fleet, self._proxy = fleet, proxy
        self._since = time.time()
        self._samples = Samples(SERIES, (proxy.counts.ttft, proxy.counts.overhead), SAMPLE_SECONDS)

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.sample(time.time())
            await asyncio.sleep(SAMPLE_SECONDS)

    def sample(self, at: float) -> None:
        """Store a sample of the router's counters and queue. `at` is the Unix time of the sample. Takes microseconds."""
        counts, queue = self._proxy.counts, self._proxy.queue
        counters = {
            "requests": float(_answered(counts.requests)),
            "prompt": float(counts.prompt_tokens),
            "hits": float(counts.expected_hit_tokens),
            "hand_overs": float(counts.hand_overs),
            "failovers": float(counts.failovers),
        }
        found = self._samples.increments(at, counters)
        quantiles = self._samples.quantiles()
        if found is None:
            return
        seconds, more = found
        hit_rate = more["hits"] / more["prompt"] if more["prompt"] > 0 else None
        self._samples.add([
            queue.running, queue.waiting, more["requests"] / seconds, more["prompt"] / seconds, hit_rate,
            more["hand_overs"] / seconds, more["failovers"] / seconds, *quantiles,
        ])  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the whole state. Takes some microseconds per worker."""
        counts, fleet = self._proxy.counts, self._fleet
        workers = [self._worker(worker) for worker in fleet.workers.values()]
        return {
            "now": time.time(),
            "interval": REFRESH_SECONDS,
            "router": {
                "since": self._since,
                "route": self._proxy.options.route,
                "models": list(fleet.models),
                "running": self._proxy.queue.running,
                "waiting": self._proxy.queue.waiting,
                "index_blocks": sum(len(served.index) for served in fleet.models.values()),
            },
            "workers": workers,
            "history": self._samples.to_dict(),
            "totals": {
                "requests": _answered(counts.requests),
                "failed": sum(count for (_, status), count in counts.requests.items() if status >= 500),
                "prompt_tokens": counts.prompt_tokens,
                "cached_tokens": counts.expected_hit_tokens,
                "hand_overs": counts.hand_overs,
                "named_encoders": counts.named_encoders,
                "failovers": counts.failovers,
                "continued_streams": counts.continued_streams,
                "deaths": fleet.deaths,
                "copied_prefixes": self._proxy.replicator.copied,
                "latency": {
                    name: {f"p{round(100 * q)}": histogram.quantile(q) for q in QUANTILES}
                    for name, histogram in (("ttft", counts.ttft), ("overhead", counts.overhead))
                },
            },
        }

    def _worker(self, worker: Worker) -> dict[str, Any]:
        blocks: dict[str, int] = {}
        sums = {"running": 0, "waiting": 0, "prompt_tokens": 0, "cached_tokens": 0}
        tiers: list[dict[str, Any]] = []
        used = backlog = 0.0
        for model, offer in worker.models.items():
            served = self._fleet.models[model]
            for medium, count in served.index.counts(worker.name).items():
                blocks[medium] = blocks.get(medium, 0) + count
            load = served.scorer.loads.get(worker.name)
            if load is not None:
                backlog += load.backlog(now())
            if offer.load:
                for name in sums:
                    sums[name] += int(offer.load.get(name, 0))
                used = max(used, float(offer.load.get("used", 0.0)))
                tiers += offer.load.get("tiers", [])
            elif load is not None:  # the worker is not kvloom: use the requests that this router sent
                sums["running"] += len(load.requests) - load.waiting
                sums["waiting"] += load.waiting
        has_report = any(offer.load for offer in worker.models.values())
        sent = worker.sent
        if not has_report:
            sums["prompt_tokens"], sums["cached_tokens"] = sent.prompt_tokens, sent.expected_hit_tokens
        roles = {offer.role for offer in (*worker.models.values(), *worker.encodes.values())}
        images = 0
        for offer in worker.encodes.values():
            sums["waiting"] += int(offer.load.get("waiting", 0))
            tiers += offer.load.get("tiers", [])
            images += int(offer.load.get("encoding", {}).get("encoded_images", 0))
        return {
            "name": worker.name,
            "url": worker.url,
            "alive": worker.is_alive,
            "role": roles.pop() if len(roles) == 1 else "both",
            "models": list(worker.models or worker.encodes),
            "images": images,
            "open_requests": worker.open_requests,
            **sums,
            "used": used,
            "backlog_seconds": backlog,
            "blocks": blocks,
            "tiers": tiers,
            "requests": sent.requests,
            "failures": sent.failures,
            "hand_overs": dict(sent.prefills),
            "ttft": {f"p{round(100 * q)}": sent.ttft.quantile(q) for q in QUANTILES},
        }


def _answered(requests: dict[tuple[str, int], int]) -> int:
    """Return the number of answered requests of clients. Requests for health, metrics and this page do not count."""
    return sum(count for (path, _), count in requests.items() if path.startswith("/v1/"))

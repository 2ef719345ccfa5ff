"""What the server counts, as Prometheus reads it. Counters of the engine begin again when it is restarted."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .limits import Gate
from .link import EngineLink

__all__ = ["Metrics"]

FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counts of one server, each in a registry of its own."""

    def __init__(self, link: EngineLink, gate: Gate) -> None:
        self._link = link
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "kvloom_requests",
            "HTTP requests by endpoint and status",
            ["endpoint", "status"],
            registry=registry,
        )
        self.prompt_tokens = Counter("kvloom_prompt_tokens", "Tokens of prompts", registry=registry)
        self.cached_tokens = Counter(
            "kvloom_cached_prompt_tokens", "Tokens of prompts that were found in the cache", registry=registry
        )
        self.output_tokens = Counter("kvloom_output_tokens", "Tokens of answers", registry=registry)
        self.gone = Counter(
            "kvloom_disconnected_requests", "Requests whose client went away", registry=registry
        )
        self.first_token = Histogram(
            "kvloom_time_to_first_token_seconds", "From request to first token of a stream", buckets=FIRST, registry=registry
        )  # fmt: skip
        self.between_tokens = Histogram(
            "kvloom_inter_token_seconds",
            "Between pieces of a stream, a token",
            buckets=BETWEEN,
            registry=registry,
        )
        self.duration = Histogram(
            "kvloom_request_seconds",
            "From request to the end of its answer",
            buckets=WHOLE,
            registry=registry,
        )
        registry.register(_Engine(link, gate))

    def text(self, tenant: str | None = None) -> bytes:
        """Everything, and beside it what a tenant uses, where one asks."""
        told = generate_latest(self._registry)
        if tenant is None:
            return told
        used, held = self._link.stats.tenants.get(tenant, (0, 0))
        return (
            told
            + (
                "# HELP kvloom_tenant_bytes Bytes of the pool that the asking tenant uses, and holds\n"
                f'# TYPE kvloom_tenant_bytes gauge\nkvloom_tenant_bytes{{state="used"}} {used}\n'
                f'kvloom_tenant_bytes{{state="held"}} {held}\n'
            ).encode()
        )


class _Engine(Collector):
    """What the engine told last."""

    def __init__(self, link: EngineLink, gate: Gate) -> None:
        self._link, self._gate = link, gate

    def collect(self) -> Iterator[Metric]:
        link, stats = self._link, self._link.stats
        slab = 0 if link.facts is None else link.facts.slab_bytes
        gauges = (
            ("engine_up", "1 while the engine is ready", int(link.ready)),
            ("open_requests", "Generating HTTP requests that have not ended", self._gate.requests),
            ("running", "Answers that hold pages", stats.running),
            ("waiting", "Answers that wait for their turn", stats.waiting),
            ("pool_bytes", "Bytes of the pool", stats.slabs * slab),
            ("pool_free_bytes", "Bytes of the pool that are lent to nobody", stats.free_slabs * slab),
            ("held_pages", "Pages that requests hold", stats.held_pages),
            ("cached_pages", "Pages that stay for later requests", stats.cached_pages),
        )
        counters = (
            ("engine_restarts", "Times the engine was started again", link.restarts),
            ("preemptions", "Times an answer gave its pages up and waited again", stats.preemptions),
            ("looked_up_tokens", "Tokens that were looked up in the cache", stats.looked_up_tokens),
            ("hit_tokens", "Of those, tokens that were found", stats.hit_tokens),
            ("evictions", "Entries that left the cache", stats.evictions),
        )
        for name, said, value in gauges:
            yield GaugeMetricFamily(f"kvloom_{name}", said, value)
        for name, said, value in counters:
            yield CounterMetricFamily(f"kvloom_{name}", said, value)

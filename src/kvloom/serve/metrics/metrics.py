"""The server's counters and histograms, and the text that /metrics returns.

The counters are plain numbers. `series.py` adds the names of metrics when /metrics is read. Counters of the engine
start at zero when the engine restarts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvloom.core import Histogram
from kvloom.serve.auth import RequestLimiter
from kvloom.serve.worker import EngineClient, TenantUsage

from .request_records import RequestRecord
from .saved_time import SavedTime
from .series import PoolInfo, Series, engine_series, expositions, tenant_series

__all__ = ["Metrics", "ServerMetrics"]

TTFT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320, 640)  # fmt: skip
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)  # fmt: skip
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)  # fmt: skip
TOKEN_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

VLLM_FINISH_REASONS = {
    "cancelled": "abort",
    "no_room": "error",
    "grammar": "error",
    "slo": "error",
    "failed": "error",
}
"""vLLM's names of finish reasons. Only reasons with another name in vLLM are listed."""


MAX_TENANTS = 100
"""Largest number of tenants, and of adapters, whose tokens are counted by name."""


@dataclass(slots=True)
class TokenUse:
    """Counts of one tenant or adapter: finished requests, their prompt tokens, and cached prompt tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class ServerMetrics:
    """Counters that belong to no model: open requests, and HTTP responses by endpoint and status."""

    def __init__(self, limiter: RequestLimiter) -> None:
        self._limiter = limiter
        self.requests: Counter[tuple[str, str]] = Counter()

    def series(self) -> list[Series]:
        """Return every series of the server, with its current value."""
        return [
            Series("kvloom_open_requests", "gauge", "Open HTTP requests that generate", self._limiter.requests),
            Series("kvloom_requests", "counter", "HTTP requests by endpoint and status", dict(self.requests), labels=("endpoint", "status")),
        ]  # fmt: skip

    def exposition_text(
        self,
        models: Iterable[Metrics],
        is_labelled: bool = False,
        tenant: str | None = None,
        everyone: bool = False,
    ) -> bytes:
        """Return all series in Prometheus' text format. Of the series about tenants, the text contains only those of
        `tenant`. With `everyone` (for an admin), it contains those of all tenants. With `is_labelled`, the series of a
        model have the label `model`.
        """
        found = {one.model: [*one.series(), *one.tenant_series(tenant, everyone)] for one in models}
        return expositions(found, is_labelled, self.series()).encode()


class Metrics:
    """Counters of one model. If `is_enabled` is False, nothing is counted."""

    def __init__(self, engine: EngineClient, model: str = "", is_enabled: bool = True) -> None:
        self._engine, self.model = engine, model
        self.is_enabled = is_enabled
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.disconnected = 0
        self.reused_tokens = 0
        self.finish_reasons = Counter({"stop": 0, "length": 0, "cancelled": 0, "failed": 0})
        self.hit_tokens = Counter({"device": 0})
        self.saved_time = SavedTime()
        self.tenant_tokens: dict[str, TokenUse] = {}
        self.adapter_tokens: dict[str, TokenUse] = {}
        """Token counts by name of the LoRA adapter; "" is the base model. Empty until a request names an adapter."""
        self.ttft, self.inter_token, self.time_per_token = (
            Histogram(TTFT_SECONDS),
            Histogram(TOKEN_SECONDS),
            Histogram(TOKEN_SECONDS),
        )
        self.request_time, self.queue_time, self.prefill_time, self.decode_time, self.inference_time = (
            Histogram(REQUEST_SECONDS) for _ in range(5)
        )
        self.prompt_lengths, self.output_lengths, self.max_tokens = (
            Histogram(TOKEN_COUNTS) for _ in range(3)
        )

    def count(self, record: RequestRecord) -> None:
        """Count a finished request."""
        if not self.is_enabled:
            return
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens
        self.reused_tokens += record.reused_tokens
        self.output_tokens += record.output_tokens
        self.disconnected += record.is_disconnected
        for reason in record.finish_reasons or ["cancelled" if record.is_disconnected else "failed"]:
            self.finish_reasons[reason] += 1
        self.hit_tokens.update(record.hit_tokens)
        _count_use(self.tenant_tokens, record.tenant, record)
        if record.adapter or self.adapter_tokens:
            _count_use(self.adapter_tokens, record.adapter or "", record)
        self.request_time.add(record.seconds)
        self.prompt_lengths.add(record.prompt_tokens)
        self.output_lengths.add(record.output_tokens)
        self.max_tokens.add(record.max_tokens)
        if record.queue_seconds is None or record.ttft_seconds is None:
            return
        self.queue_time.add(record.queue_seconds)
        self.ttft.add(record.ttft_seconds)
        prefill = record.ttft_seconds - record.queue_seconds
        self.prefill_time.add(prefill)
        computed = record.prompt_tokens - record.cached_tokens - record.reused_tokens
        self.saved_time.add(computed, record.cached_tokens, prefill, record.load_seconds)
        self.decode_time.add(record.seconds - record.ttft_seconds)
        self.inference_time.add(record.seconds - record.queue_seconds)
        if record.output_tokens > record.answers:
            after = (record.output_tokens - record.answers) / record.answers
            each = (record.seconds - record.ttft_seconds) / after
            self.time_per_token.add(each)
            if not record.stream:
                self.inter_token.add(each, record.output_tokens - record.answers)

    def tenant_series(self, tenant: str | None, everyone: bool) -> list[Series]:
        """With `everyone`, return the series of every tenant. Otherwise return the series of `tenant`, or an empty list
        if `tenant` is None.
        """
        known = self._engine.stats.tenants
        shown = known if everyone else {} if tenant is None else {tenant: known.get(tenant, TenantUsage())}
        return tenant_series(shown) if shown else []

    def series(self) -> list[Series]:
        """Return every series that belongs to no tenant, with its current value."""
        engine, stats = self._engine, self._engine.stats
        vllm_reasons: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        for reason, count in self.finish_reasons.items():
            vllm_reasons[VLLM_FINISH_REASONS.get(reason, reason)] += count
        series = [
            Series("kvloom_engine_up", "gauge", "1 while the engine is ready", int(engine.is_ready)),
            Series("kvloom_engine_restarts", "counter", "Restarts of the engine", engine.restarts),
            Series("kvloom_prompt_tokens", "counter", "Prompt tokens", self.prompt_tokens, ("vllm:prompt_tokens",)),
            Series("kvloom_cached_prompt_tokens", "counter", "Prompt tokens found in the cache", self.cached_tokens, ("vllm:prompt_tokens_cached",)),
            Series("kvloom_reused_prompt_tokens", "counter", "Prompt tokens copied from documents; answers are then approximate", self.reused_tokens),
            Series("kvloom_output_tokens", "counter", "Output tokens", self.output_tokens, ("vllm:generation_tokens",)),
            Series("kvloom_disconnected_requests", "counter", "Requests whose client disconnected", self.disconnected),
            Series("kvloom_finished_answers", "counter", "Finished answers by finish reason", dict(self.finish_reasons), labels=("reason",)),
            Series("", "counter", "Finished answers by finish reason", dict(vllm_reasons), ("vllm:request_success",), ("finished_reason",)),
            Series("kvloom_tier_hit_tokens", "counter", "Prompt tokens found, by tier", dict(self.hit_tokens), labels=("tier",)),
            Series("kvloom_saved_prefill_seconds", "counter", "Prefill time saved by cached tokens, less load time (an estimate)", self.saved_time.seconds),
            Series("kvloom_time_to_first_token_seconds", "histogram", "Time from request to first token", self.ttft, ("vllm:time_to_first_token_seconds",)),
            Series("kvloom_inter_token_seconds", "histogram", "Time between output tokens", self.inter_token, ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")),
            Series("kvloom_time_per_output_token_seconds", "histogram", "Mean time per output token after the first, one value per request", self.time_per_token, ("vllm:request_time_per_output_token_seconds",), aliases=("kvloom_token_seconds",)),
            Series("kvloom_request_seconds", "histogram", "Time from request to the end of its answers", self.request_time, ("vllm:e2e_request_latency_seconds",)),
            Series("kvloom_queue_seconds", "histogram", "Time from request to its first step", self.queue_time, ("vllm:request_queue_time_seconds",)),
            Series("kvloom_prefill_seconds", "histogram", "Time from first step to first token", self.prefill_time, ("vllm:request_prefill_time_seconds",)),
            Series("kvloom_decode_seconds", "histogram", "Time from first token to the end", self.decode_time, ("vllm:request_decode_time_seconds",)),
            Series("", "histogram", "Time from first step to the end", self.inference_time, ("vllm:request_inference_time_seconds",)),
            Series("kvloom_request_prompt_tokens", "histogram", "Prompt tokens per request", self.prompt_lengths, ("vllm:request_prompt_tokens",)),
            Series("kvloom_request_output_tokens", "histogram", "Output tokens per request", self.output_lengths, ("vllm:request_generation_tokens",)),
            Series("kvloom_request_max_tokens", "histogram", "Limit of output tokens per answer", self.max_tokens, ("vllm:request_max_num_generation_tokens", "vllm:request_params_max_tokens")),
        ]  # fmt: skip
        return [*series, *engine_series(stats, self._pool_info())]

    def _pool_info(self) -> PoolInfo:
        info = self._engine.info
        if info is None:
            return PoolInfo()
        padding = {str(row["group"]).rsplit(" #", 1)[0]: float(row["waste"]) for row in info.layout}
        return PoolInfo(info.slab_bytes, info.block_tokens, padding)


def _count_use(uses: dict[str, TokenUse], name: str, record: RequestRecord) -> None:
    """Count the tokens of a request under `name`, a tenant or an adapter. At most MAX_TENANTS names are counted."""
    if name not in uses and len(uses) >= MAX_TENANTS:
        return
    use = uses.setdefault(name, TokenUse())
    use.requests += 1
    use.prompt_tokens += record.prompt_tokens
    use.cached_tokens += record.cached_tokens

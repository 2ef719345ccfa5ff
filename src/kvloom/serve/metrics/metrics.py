"""What the server counts, as Prometheus reads it. Counting is adding to plain numbers; names are given when somebody asks
(series.py). Counters of the engine begin again when it is restarted."""

from __future__ import annotations

from collections import Counter

from kvloom.core.histogram import Histogram
from kvloom.serve.auth.limits import Gate
from kvloom.serve.worker.engine_client import EngineLink
from kvloom.serve.worker.messages import TenantUse

from .request_records import Record
from .series import Pool, Row, engine_rows, exposition, tenant_rows

__all__ = ["Metrics"]

FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
WHOLE = (0.01, 0.05, 0.1, 0.25, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

USUAL_ENDS = {"cancelled": "abort", "no_room": "error", "grammar": "error", "failed": "error"}
"""How the field calls the ways in which requests end, where it has another word."""


class Metrics:
    """Counts of one server. `observe` off: nothing is counted but HTTP answers."""

    def __init__(self, link: EngineLink, gate: Gate, model: str = "", observe: bool = True) -> None:
        self._link, self._gate, self._model = link, gate, model
        self.observe = observe
        self.requests: Counter[tuple[str, str]] = Counter()
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.gone = 0
        self.ends = Counter({"stop": 0, "length": 0, "cancelled": 0, "failed": 0})
        self.hits = Counter({"device": 0})
        self.first_token, self.between_tokens, self.per_token = (
            Histogram(FIRST),
            Histogram(BETWEEN),
            Histogram(BETWEEN),
        )
        self.duration, self.queued, self.prefill, self.decode, self.inference = (
            Histogram(WHOLE) for _ in range(5)
        )
        self.prompt_lengths, self.output_lengths, self.most_tokens = (Histogram(TOKENS) for _ in range(3))

    def count(self, record: Record) -> None:
        """A request has ended."""
        if not self.observe:
            return
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens
        self.output_tokens += record.output_tokens
        self.gone += record.gone
        for why in record.finishes or ["cancelled" if record.gone else "failed"]:
            self.ends[why] += 1
        self.hits.update(record.hits)
        self.duration.add(record.seconds)
        self.prompt_lengths.add(record.prompt_tokens)
        self.output_lengths.add(record.output_tokens)
        self.most_tokens.add(record.max_tokens)
        if record.queue_seconds is None or record.first_seconds is None:
            return
        self.queued.add(record.queue_seconds)
        self.first_token.add(record.first_seconds)
        self.prefill.add(record.first_seconds - record.queue_seconds)
        self.decode.add(record.seconds - record.first_seconds)
        self.inference.add(record.seconds - record.queue_seconds)
        if record.output_tokens > record.answers:
            after = (record.output_tokens - record.answers) / record.answers
            each = (record.seconds - record.first_seconds) / after
            self.per_token.add(each)
            if not record.stream:
                self.between_tokens.add(each, record.output_tokens - record.answers)

    def text(self, tenant: str | None = None, everyone: bool = False) -> bytes:
        """Everything that is not of one tenant; beside it what the tenant uses that asks, or for an operator what each does."""
        known = self._link.stats.tenants
        shown = known if everyone else {} if tenant is None else {tenant: known.get(tenant, TenantUse())}
        return exposition([*self.rows(), *(tenant_rows(shown) if shown else ())], self._model).encode()

    def rows(self) -> list[Row]:
        """Every series that is not a tenant's, with its value now."""
        link, stats = self._link, self._link.stats
        usual_ends: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        for why, count in self.ends.items():
            usual_ends[USUAL_ENDS.get(why, why)] += count
        rows = [
            Row("kvloom_engine_up", "gauge", "1 while the engine is ready", int(link.ready)),
            Row("kvloom_engine_restarts", "counter", "Times the engine was started again", link.restarts),
            Row("kvloom_open_requests", "gauge", "Generating HTTP requests that have not ended", self._gate.requests),
            Row("kvloom_requests", "counter", "HTTP requests by endpoint and status", dict(self.requests), labels=("endpoint", "status")),
            Row("kvloom_prompt_tokens", "counter", "Tokens of prompts", self.prompt_tokens, ("vllm:prompt_tokens",)),
            Row("kvloom_cached_prompt_tokens", "counter", "Tokens of prompts that were found in the cache", self.cached_tokens, ("vllm:prompt_tokens_cached",)),
            Row("kvloom_output_tokens", "counter", "Tokens of answers", self.output_tokens, ("vllm:generation_tokens",)),
            Row("kvloom_disconnected_requests", "counter", "Requests whose client went away", self.gone),
            Row("kvloom_finished_answers", "counter", "Answers by how they ended", dict(self.ends), labels=("reason",)),
            Row("", "counter", "Answers by how they ended", dict(usual_ends), ("vllm:request_success",), ("finished_reason",)),
            Row("kvloom_tier_hit_tokens", "counter", "Tokens of prompts that were found, by the tier that had them", dict(self.hits), labels=("tier",)),
            Row("kvloom_time_to_first_token_seconds", "histogram", "From request to first token", self.first_token, ("vllm:time_to_first_token_seconds",)),
            Row("kvloom_inter_token_seconds", "histogram", "Between the tokens of an answer", self.between_tokens, ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")),
            Row("kvloom_token_seconds", "histogram", "Seconds a token after the first, one value a request", self.per_token, ("vllm:request_time_per_output_token_seconds",)),
            Row("kvloom_request_seconds", "histogram", "From request to the end of its answer", self.duration, ("vllm:e2e_request_latency_seconds",)),
            Row("kvloom_queue_seconds", "histogram", "From request to its first work", self.queued, ("vllm:request_queue_time_seconds",)),
            Row("kvloom_prefill_seconds", "histogram", "From first work to first token", self.prefill, ("vllm:request_prefill_time_seconds",)),
            Row("kvloom_decode_seconds", "histogram", "From first token to the end", self.decode, ("vllm:request_decode_time_seconds",)),
            Row("", "histogram", "From first work to the end", self.inference, ("vllm:request_inference_time_seconds",)),
            Row("kvloom_request_prompt_tokens", "histogram", "Tokens of a request's prompts", self.prompt_lengths, ("vllm:request_prompt_tokens",)),
            Row("kvloom_request_output_tokens", "histogram", "Tokens of a request's answers", self.output_lengths, ("vllm:request_generation_tokens",)),
            Row("kvloom_request_max_tokens", "histogram", "Tokens that an answer was allowed", self.most_tokens, ("vllm:request_max_num_generation_tokens", "vllm:request_params_max_tokens")),
        ]  # fmt: skip
        return [*rows, *engine_rows(stats, self._pool())]

    def _pool(self) -> Pool:
        facts = self._link.facts
        if facts is None:
            return Pool()
        padding = {str(row["group"]).rsplit(" #", 1)[0]: float(row["waste"]) for row in facts.layout}
        return Pool(facts.slab_bytes, facts.block_tokens, padding)

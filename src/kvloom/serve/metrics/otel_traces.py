"""OpenTelemetry traces of requests over OTLP/HTTP: queue, match, loads, prefill and decode.

    request ├─ queue ─┤├ match ┤├──── prefill ────┤├──────── decode ────────┤
                                 ├ load host ┤

Spans are built from a request's record when it finishes, without additional measurements. They contain names and
numbers, never text, keys or token ids. If the client sends the W3C header `traceparent`, the spans belong to the
client's trace. This module needs the extra `otel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from .request_records import RequestRecord, explain_miss

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError(f"--otlp needs OpenTelemetry ({error.name}): pip install 'kvloom[otel]'") from None

__all__ = ["Traces", "traces_url"]

TRACE_HEADERS = ("traceparent", "tracestate")
FLUSH_MILLISECONDS = 5000
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


class Traces:
    """Sends spans to the OTLP receiver at `url`, in batches from a separate thread. OpenTelemetry drops and logs
    spans that cannot be sent. Requests never wait for the receiver.
    """

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        resource = Resource.create({"service.name": "kvloom"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(url))))
        self._tracer = self._provider.get_tracer("kvloom.serve")
        self._propagator = TraceContextTextMapPropagator()

    def context(self, headers: Mapping[str, str]) -> Any:
        """Return the trace context in a client's headers, or an empty context."""
        return self._propagator.extract({name: headers[name] for name in TRACE_HEADERS if name in headers})

    def send(self, record: RequestRecord, context: Any) -> None:
        """Queue the spans of a request for sending. Takes tens of microseconds."""
        zero = record.arrived - record.started  # offset from the monotonic clock to the wall clock

        def at(second: float) -> int:
            return int((zero + second) * 1e9)

        operation = OPERATIONS.get(record.endpoint, "generate")
        whole = self._tracer.start_span(
            f"{operation} {self._model}",
            context,
            SpanKind.SERVER,
            self._attributes(record, operation),
            start_time=at(record.started),
        )
        inside = set_span_in_context(whole, context)

        def part(name: str, start: float, end: float, **attributes: str | int) -> None:
            named = {f"kvloom.{key}": value for key, value in attributes.items()}
            span = self._tracer.start_span(
                name, inside, SpanKind.INTERNAL, named, start_time=at(max(start, record.started))
            )
            span.end(at(max(start, end)))

        for progress in record.progress.values():
            word, _ = explain_miss(progress, record.prompts[progress.id], operator=False)
            last = record.finished
            part("queue", record.started, progress.looked_up)
            position = progress.miss_position
            miss: dict[str, str | int] = {"miss_position": position, "miss_reason": word}
            # Former names, still sent for one version.
            former: dict[str, str | int] = {"stop_token": position, "stop_reason": word}
            part(
                "match",
                progress.looked_up,
                progress.started,
                cached_tokens=progress.cached_tokens,
                **miss,
                **former,
            )
            for tier, start, end, tokens in progress.loads:
                part(f"load {tier}", start, end, tier=tier, tokens=tokens)
            part(
                "prefill",
                progress.started,
                progress.first_token or last,
                tokens=record.prompts[progress.id] - progress.cached_tokens,
                chunks=len(progress.chunks),
            )
            if progress.first_token:
                part("decode", progress.first_token, last, preemptions=progress.preemptions)
        if record.error_code is not None:
            whole.set_status(Status(StatusCode.ERROR, record.error_code))
        whole.end(at(record.finished))

    def close(self) -> None:
        """Send the queued spans, within FLUSH_MILLISECONDS."""
        self._provider.force_flush(FLUSH_MILLISECONDS)
        self._provider.shutdown()

    def _attributes(self, record: RequestRecord, operation: str) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "kvloom",
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": record.max_tokens,
            "gen_ai.response.id": record.id,
            "gen_ai.response.finish_reasons": [record.finish_reason or "unknown"],
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "kvloom.tenant": record.tenant,
            "kvloom.cached_tokens": record.cached_tokens,
            **{f"kvloom.hit_tokens.{tier}": tokens for tier, tokens in record.hit_tokens.items()},
        }


def traces_url(url: str) -> str:
    """Return the URL to which traces are sent. If `url` has no path, the default path /v1/traces is added. Raises
    ValueError for an invalid URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"--otlp {url!r} is not the URL of an OTLP/HTTP receiver; use one like http://127.0.0.1:4318"
        )
    return url if parts.path.strip("/") else url.rstrip("/") + "/v1/traces"

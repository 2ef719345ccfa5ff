"""OpenTelemetry traces of requests, sent over OTLP/HTTP: the way of each through queue, match, loads, prefill and decode.

    request ├─ queue ─┤├ match ┤├──── prefill ────┤├──────── decode ────────┤
                                 ├ load host ┤

Spans are made from a request's record when it has ended, so nothing is measured for their sake. They hold names and numbers,
never text, keys or token ids. A client's W3C `traceparent` is continued. Needs the packages of the extra `otel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from .request_records import Record, stop_text

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

CARRIED = ("traceparent", "tracestate")
CLOSING_MILLISECONDS = 5000
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


class Traces:
    """Sends spans to the OTLP receiver at `url`, in batches, from a thread of its own; what it cannot send is dropped and
    logged by OpenTelemetry, and no request waits for it."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        resource = Resource.create({"service.name": "kvloom"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(url))))
        self._tracer = self._provider.get_tracer("kvloom.serve")
        self._propagator = TraceContextTextMapPropagator()

    def context(self, headers: Mapping[str, str]) -> Any:
        """The trace that a client's headers name; an empty one where they name none."""
        return self._propagator.extract({name: headers[name] for name in CARRIED if name in headers})

    def tell(self, record: Record, context: Any) -> None:
        """Hand a request's spans over for sending. Tens of microseconds."""
        zero = record.arrived - record.began  # from the monotonic clock to the time of day

        def at(second: float) -> int:
            return int((zero + second) * 1e9)

        operation = OPERATIONS.get(record.endpoint, "generate")
        whole = self._tracer.start_span(
            f"{operation} {self._model}",
            context,
            SpanKind.SERVER,
            self._attributes(record, operation),
            start_time=at(record.began),
        )
        inside = set_span_in_context(whole, context)

        def part(name: str, start: float, end: float, **attributes: str | int) -> None:
            named = {f"kvloom.{key}": value for key, value in attributes.items()}
            span = self._tracer.start_span(
                name, inside, SpanKind.INTERNAL, named, start_time=at(max(start, record.began))
            )
            span.end(at(max(start, end)))

        for story in record.stories.values():
            word, _ = stop_text(story, record.prompts[story.id], operator=False)
            last = record.ended
            part("queue", record.began, story.looked_up)
            part("match", story.looked_up, story.began, cached_tokens=story.cached, stop_token=story.stop, stop_reason=word)  # fmt: skip
            for tier, start, end, tokens in story.loads:
                part(f"load {tier}", start, end, tier=tier, tokens=tokens)
            part("prefill", story.began, story.first or last, tokens=record.prompts[story.id] - story.cached)
            if story.first:
                part("decode", story.first, last, preemptions=story.preemptions)
        if record.failure is not None:
            whole.set_status(Status(StatusCode.ERROR, record.failure))
        whole.end(at(record.ended))

    def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        self._provider.force_flush(CLOSING_MILLISECONDS)
        self._provider.shutdown()

    def _attributes(self, record: Record, operation: str) -> dict[str, Any]:
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
            **{f"kvloom.hit_tokens.{tier}": tokens for tier, tokens in record.hits.items()},
        }


def traces_url(url: str) -> str:
    """Where traces go: the receiver's address as it is given to `--otlp`, to which the usual path belongs. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"--otlp {url!r} is no address of an OTLP/HTTP receiver; give one like http://127.0.0.1:4318"
        )
    return url if parts.path.strip("/") else url.rstrip("/") + "/v1/traces"

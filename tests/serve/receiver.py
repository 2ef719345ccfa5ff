"""A small OTLP/HTTP receiver on loopback that decodes and stores spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

__all__ = ["Receiver", "attributes", "receiving"]


@dataclass(slots=True)
class Receiver:
    url: str = ""
    spans: list[Any] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    def of(self, response: str) -> list[Any]:
        """The spans of one request's trace, its own first; empty until all of them are there."""
        roots = [s for s in self.spans if attributes(s).get("gen_ai.response.id") == response]
        if not roots:
            return []
        return [roots[0], *(s for s in self.spans if s.parent_span_id == roots[0].span_id)]


@contextmanager
def receiving() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            message = ExportTraceServiceRequest.FromString(data)
            found.raw.append(data)
            found.paths.add(self.path)
            for resource in message.resource_spans:
                for scope in resource.scope_spans:
                    found.spans.extend(scope.spans)
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    """A span's attributes as plain values."""
    found = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found

"""Logs one line per request, with its id (`x-request-id`). The log never contains text, token ids or keys."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError
from .metrics import RequestRecord

__all__ = ["RequestLog", "RequestLogger", "log_rejected", "request_log"]

MAX_PATH_CHARACTERS = 200
MAX_REASON_CHARACTERS = 300
POLLED = ("/health", "/ping", "/metrics", "/kvloom/state")
"""Paths that monitoring programs poll. Their successful responses, and responses with status 503 (loading, draining),
are logged at level debug.
"""
KEY = "kvloom.log"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

access = logging.getLogger("kvloom.access")


@dataclass(slots=True)
class RequestLog:
    """The values that the log line of a request contains. Endpoints set them."""

    id: str = ""
    tenant: str | None = None
    error: ApiError | None = None
    record: RequestRecord | None = None


def request_log(scope: Scope) -> RequestLog:
    """Return the log entry of the request with this scope."""
    found: RequestLog = scope.setdefault(KEY, RequestLog())
    return found


class RequestLogger:
    """ASGI middleware that gives each request an id (`x-request-id`), returns the id, and logs one line per request.

    The client's id is used if it has 1 to 128 letters, digits or `._:-`. Otherwise a new id is created.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started, status = time.monotonic(), 0
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode(
            "latin-1"
        )
        log = request_log(scope)
        log.id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def with_id(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", log.id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        finally:
            _log_request(scope["method"], scope["path"], status, time.monotonic() - started, log)


def _log_request(method: str, path: str, status: int, seconds: float, log: RequestLog) -> None:
    level = logging.DEBUG if path in POLLED else logging.INFO
    if status >= 400 and not (path in POLLED and status == 503):
        level = logging.ERROR if status >= 500 and status != 503 else logging.WARNING
    if not access.isEnabledFor(level):
        return
    record = log.record
    fields: dict[str, Any] = {
        "method": method,
        "path": path if len(path) <= MAX_PATH_CHARACTERS else f"{path[:MAX_PATH_CHARACTERS]}…",
        "status": status,
        "seconds": round(seconds, 4),
        "request_id": log.id,
    }
    tenant = log.tenant if record is None else record.tenant
    if tenant is not None:
        fields["tenant"] = tenant
    if record is not None:
        fields |= {
            "id": record.id,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "cached_tokens": record.cached_tokens,
        }
        if record.finish_reason is not None:
            fields["finish_reason"] = record.finish_reason
    if log.error is not None:
        fields |= _error_fields(log.error)
    access.log(level, "request", extra={"fields": fields})


def log_rejected(error: ApiError) -> None:
    """Log an error response that was sent on a connection without a valid request."""
    access.warning("connection refused", extra={"fields": {"status": error.status, **_error_fields(error)}})


def _error_fields(error: ApiError) -> dict[str, Any]:
    given = {"code": error.code, "param": error.param, "reason": error.log_text[:MAX_REASON_CHARACTERS]}
    return {name: value for name, value in given.items() if value is not None}

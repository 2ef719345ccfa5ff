"""Error responses in OpenAI's format: a status, and a body with message, type, param and code.

All folders of the server raise ApiError. This module imports none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

__all__ = [
    "ApiError",
    "above_share",
    "bad_request",
    "bodies_full",
    "body_too_large",
    "context_too_long",
    "cut_off",
    "draining",
    "engine_died",
    "engine_loading",
    "grammars_busy",
    "invalid_key",
    "not_found",
    "pool_full",
    "queue_full",
    "slo_not_met",
    "slow_reader",
    "unknown_model",
    "unknown_request",
    "unloading",
]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}

RETRY_SECONDS = 1
SLO_FIELDS = ("ttft_ms", "tbt_ms", "deadline_ms", "predicted_ttft_ms", "predicted_tbt_ms", "retry_after_s")
"""Fields of the error response to a request that cannot meet its service-level objective."""


class ApiError(Exception):
    """An error response. `retry_after` is sent as a header, in seconds. `slo` (the objective of the request, and the
    predicted times) is added to the body. If the message may contain text of the request, `logged` replaces the message
    in the log.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        logged: str | None = None,
        slo: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.slo = slo
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after
        self._logged = logged

    @property
    def log_text(self) -> str:
        """The text for the log: `logged` if it is given, otherwise the message without its quoted parts. Quoted parts
        may be values of the request."""
        return self._logged or re.sub(r"['\"].*['\"]", "'…'", self.message, flags=re.DOTALL)

    @property
    def body(self) -> bytes:
        body: dict[str, Any] = {
            "message": self.message,
            "type": _TYPES.get(self.status, "server_error"),
            "param": self.param,
            "code": self.code,
        }
        if self.slo is not None:
            body["slo"] = self.slo
        return msgspec.json.encode({"error": body})

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        more = [] if self.retry_after is None else [(b"retry-after", b"%d" % self.retry_after)]
        if self.status == 401:
            more.append((b"www-authenticate", b"Bearer"))
        if self.status == 408:  # the rest of the body is not read
            more.append((b"connection", b"close"))
        return [(b"content-type", b"application/json"), *more]


def bad_request(
    message: str, param: str | None = None, code: str | None = None, logged: str | None = None
) -> ApiError:
    return ApiError(400, message, param, code, logged=logged)


def invalid_key(given: bool) -> ApiError:
    problem = "unknown API key" if given else "API key required"
    return ApiError(401, f"{problem}: send it as `Authorization: Bearer KEY`", code="invalid_api_key")


def unknown_model(asked: str, served: Iterable[str]) -> ApiError:
    names = " or ".join(repr(name) for name in served)
    return ApiError(404, f"model {asked!r} is not served here; use {names}", "model", "model_not_found")


def unloading(model: str) -> ApiError:
    return ApiError(503, f"model {model!r} is being unloaded and accepts no requests", "model", "unloading")


def unknown_request(asked: str) -> ApiError:
    return ApiError(
        404,
        f"no record of request {asked!r}: the server keeps the latest requests, and a tenant sees its own only",
        code="request_not_found",
    )


def not_found(method: str, path: str) -> ApiError:
    return ApiError(
        404,
        f"no endpoint {method} {path}; see /v1/models and /health",
        code="unknown_url",
    )


def body_too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"request body exceeds the limit of {limit:,} bytes: shorten it, or raise --max-body",
        code="body_too_large",
    )


def context_too_long(prompt: int, new: int, longest: int, param: str, at_least: bool = False) -> ApiError:
    """Return the error for a request that exceeds the limit of `longest` tokens. The request has `prompt` prompt
    tokens, and asks for `new` output tokens. With `at_least`, the prompt has at least `prompt` tokens, because counting
    stopped there. `param` is the request field that the error names."""
    count = f"{prompt:,} or more" if at_least else f"{prompt:,}"
    asked = f"{count} prompt tokens and {new:,} output tokens" if new else f"{count} prompt tokens"
    return bad_request(
        f"{asked} exceed the limit of {longest:,} tokens per request: shorten the prompt, or lower max_tokens "
        "(the limit is the model's, or that of the server's memory: --pool, --tier host:SIZE)",
        param,
        "context_length_exceeded",
    )


def queue_full(asked: int, in_progress: int, limit: int) -> ApiError:
    return ApiError(
        429,
        f"queue is full ({in_progress} of {limit} answers, {asked} requested); retry in {RETRY_SECONDS} s",
        code="rate_limit_exceeded",
        retry_after=RETRY_SECONDS,
    )


def above_share(asked: int, open_answers: int, limit: int) -> ApiError:
    return ApiError(
        429,
        f"this tenant has {open_answers} of {limit} open answers, {asked} requested; retry in {RETRY_SECONDS} s",
        code="rate_limit_exceeded",
        retry_after=RETRY_SECONDS,
    )


def bodies_full() -> ApiError:
    return ApiError(
        429,
        f"too many large request bodies at once; retry in {RETRY_SECONDS} s",
        code="rate_limit_exceeded",
        retry_after=RETRY_SECONDS,
    )


def grammars_busy(why: str, param: str | None) -> ApiError:
    return ApiError(
        429,
        why,
        param,
        "rate_limit_exceeded",
        retry_after=RETRY_SECONDS,
        logged="too many grammars or images",
    )


def slo_not_met(why: str, slo: dict[str, Any]) -> ApiError:
    """Return the error for a request that cannot meet its objective. `slo` contains the objective and the predicted
    times."""
    shown = {name: slo[name] for name in SLO_FIELDS}
    return ApiError(429, why, "slo", "slo_not_met", slo["retry_after_s"], slo=shown)


def draining() -> ApiError:
    return ApiError(
        503, "the server is shutting down and accepts no requests", code="draining", retry_after=10
    )


def cut_off() -> ApiError:
    return ApiError(
        503, "the server is stopping; this answer was cut off: send the request again", code="server_stopping", retry_after=10
    )  # fmt: skip


def engine_loading() -> ApiError:
    return ApiError(503, "the engine is loading; retry in 2 s", code="engine_loading", retry_after=2)


def engine_died(hung: str = "") -> ApiError:
    """Return the error for requests whose engine process has ended. `hung` is the reason why the watchdog killed the
    process, or "" if the process ended by itself.
    """
    how = f"{hung} and was killed" if hung else "died"
    return ApiError(
        503, f"the engine process {how} during this request; it is restarting, retry in 2 s", code="engine_died", retry_after=2
    )  # fmt: skip


def pool_full() -> ApiError:
    return ApiError(
        503, "the page pool is too full for this request; request fewer tokens, or retry in 2 s", code="no_room", retry_after=2
    )  # fmt: skip


def slow_reader(what: str) -> ApiError:
    return ApiError(408, f"the client reads too slowly: {what}", code="slow_reader")

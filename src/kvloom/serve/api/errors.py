"""What goes wrong, as users of OpenAI's interface know it: a status, and a body with message, type, param and code."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "ApiError",
    "above_share",
    "bad_request",
    "busy",
    "draining",
    "engine_died",
    "engine_loading",
    "grammars_busy",
    "invalid_key",
    "no_room",
    "not_found",
    "slow_reader",
    "too_large",
    "too_long",
    "unknown_model",
    "unknown_request",
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


class ApiError(Exception):
    """Something that a client is told. `retry_after` seconds are worth waiting."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> bytes:
        told: dict[str, Any] = {
            "message": self.message,
            "type": _TYPES.get(self.status, "server_error"),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": told})

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        more = [] if self.retry_after is None else [(b"retry-after", b"%d" % self.retry_after)]
        if self.status == 401:
            more.append((b"www-authenticate", b"Bearer"))
        if self.status == 408:  # what should have come is not waited for
            more.append((b"connection", b"close"))
        return [(b"content-type", b"application/json"), *more]


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def invalid_key(given: bool) -> ApiError:
    said = "this API key is not known" if given else "an API key is needed"
    return ApiError(401, f"{said}: send it as `Authorization: Bearer KEY`", code="invalid_api_key")


def unknown_model(asked: str, served: str) -> ApiError:
    return ApiError(
        404, f"there is no model {asked!r} here; {served!r} is served", "model", "model_not_found"
    )


def unknown_request(asked: str) -> ApiError:
    return ApiError(
        404,
        f"nothing is known of a request {asked!r} here: the last ones are remembered, and each tenant sees its own",
        code="request_not_found",
    )


def not_found(method: str, path: str) -> ApiError:
    return ApiError(
        404,
        f"there is nothing at {method} {path}; /v1/models and /health are good to try",
        code="unknown_url",
    )


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than this server takes, {limit:,} bytes", code="body_too_large")


def too_long(prompt: int, new: int, longest: int, param: str, at_least: bool = False) -> ApiError:
    """`at_least`: so many were counted, and not all were."""
    count = f"{prompt:,} or more" if at_least else f"{prompt:,}"
    asked = f"{count} tokens of prompt and {new:,} new ones" if new else f"{count} tokens of prompt"
    return bad_request(
        f"{asked} exceed the {longest:,} that a request can have here: shorten the prompt, or ask for fewer new ones",
        param,
        "context_length_exceeded",
    )


def busy(asked: int, waiting: int, most: int) -> ApiError:
    return ApiError(
        429,
        f"{waiting} answers are being made or wait, and {most} may: {asked} more must come later",
        code="rate_limit_exceeded",
        retry_after=1,
    )


def above_share(asked: int, open_: int, most: int) -> ApiError:
    return ApiError(
        429,
        f"{open_} answers of this tenant are being made or wait, and it may have {most} now: send {asked} more later",
        code="rate_limit_exceeded",
        retry_after=1,
    )


def grammars_busy(why: str, param: str | None) -> ApiError:
    return ApiError(429, why, param, "rate_limit_exceeded", retry_after=1)


def draining() -> ApiError:
    return ApiError(
        503, "the server is shutting down and takes no new requests", code="draining", retry_after=10
    )


def engine_loading() -> ApiError:
    return ApiError(503, "the engine is loading; try again soon", code="engine_loading", retry_after=2)


def engine_died(hung: str = "") -> ApiError:
    """`hung`: how it was seen that it would not go on, where it did not end by itself."""
    how = f"{hung} and was ended" if hung else "ended"
    return ApiError(
        503, f"the engine's process {how} while it worked on this request; it is being restarted", code="engine_died", retry_after=2
    )  # fmt: skip


def no_room() -> ApiError:
    return ApiError(
        503, "the cache had no room for this request; ask for fewer tokens, or later", code="no_room", retry_after=2
    )  # fmt: skip


def slow_reader(what: str) -> ApiError:
    return ApiError(408, f"the answer was not read fast enough: {what}", code="slow_reader")

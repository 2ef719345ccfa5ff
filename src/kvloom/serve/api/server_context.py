"""The state and checks that all endpoints share: served models, keys, limits and metrics."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from kvloom.serve.access_log import request_log
from kvloom.serve.auth import ApiKeys, BodyLimiter, HeldBody, Limits, RequestLimiter
from kvloom.serve.errors import ApiError, bad_request, body_too_large, draining, engine_loading, unknown_model
from kvloom.serve.metrics import RequestRecords, ServerMetrics

from .request_fields import RequestFields
from .served_model import ServedModel

__all__ = ["ServerContext", "is_loopback", "parse_digits"]

MOST_DIGITS = 18
MAX_NAMES = 10
"""Largest number of adapters that an error lists."""
SMALL_BODY_BYTES = 1 << 13
"""Bodies with fewer bytes than this are parsed in the event loop, because a switch to another thread would take longer.
"""

Some = TypeVar("Some")


@dataclass(slots=True)
class ServerContext:
    """The state of one server. `models` maps names to models, and the first model is the default. Without `keys`,
    the server accepts only requests whose headers Host and Origin have loopback names (`check_host`).
    """

    keys: ApiKeys
    limits: Limits
    limiter: RequestLimiter
    metrics: ServerMetrics
    models: dict[str, ServedModel] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Additional model names that requests may use: alias → name of the model."""
    records: RequestRecords = field(default_factory=RequestRecords)
    """The latest requests of all models."""
    labels_models: bool = False
    """Whether series in /metrics have the label `model`. This is set if the server may have several models."""
    memory: int | None = None
    """Bytes that the pools of all models share. None means that each pool has its own memory."""
    metrics_need_key: bool = False
    """Whether /metrics requires a key."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server."""
    lora_folders: tuple[Path, ...] = ()
    """Folders below which the API may load LoRA adapters."""
    bodies: BodyLimiter = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = BodyLimiter(self.limits.bodies * self.limits.body_bytes, self.limiter.shared)

    def require_accepting(self) -> None:
        """Raise ApiError while the server drains, or while no model is ready. Call this method before reading a
        body."""
        if self.limiter.is_draining:
            raise draining()
        if not any(served.status == "ok" for served in self.models.values()):
            raise engine_loading()

    def served(self, name: str | None) -> ServedModel:
        """Return the model with this name, alias or path, or the first model if the name is None. The name of an adapter
        stands for its base model. Raises ApiError 404 for an unknown name.
        """
        asked = name if name is None else self.aliases.get(name, name)
        for served in self.models.values():
            if asked is None or asked in (served.name, served.path):
                return served
        for served in self.models.values():
            if served.adapter(asked) is not None:
                return served
        adapters = (one.name for served in self.models.values() for one in served.adapters)
        raise unknown_model(name or "", [*self.models, *itertools.islice(adapters, MAX_NAMES)])

    def adapter(self, name: str | None) -> str | None:
        """Return the LoRA adapter that a request with this model name uses, or None for a base model."""
        asked = None if name is None else self.aliases.get(name, name)
        if asked is None or any(asked in (one.name, one.path) for one in self.models.values()):
            return None
        return asked

    def model_entry(self, name: str) -> dict[str, Any]:
        """Return the entry of a model or adapter in /v1/models. Raises ApiError 404 for an unknown name."""
        served, adapter = self.served(name), self.adapter(name)
        if adapter is None:
            return served.to_dict()
        return next(one for one in served.adapter_entries() if one["id"] == adapter)

    def listed_models(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models: one for each name, alias and adapter."""
        own = [served.to_dict() for served in self.models.values()]
        own += [entry for served in self.models.values() for entry in served.adapter_entries()]
        named = ((alias, self.models.get(name)) for alias, name in self.aliases.items())
        return own + [{**served.to_dict(), "id": alias} for alias, served in named if served is not None]

    def asked_model(self, request: Request) -> ServedModel:
        """Return the model in the query parameter `model`, or the first model without it. Raises ApiError 404 for an
        unknown name.
        """
        return self.served(request.query_params.get("model"))

    def authenticate(self, request: Request) -> str | None:
        """Return the tenant of a request's key, or None if the server has no keys. Raises ApiError 401 for an
        unknown key."""
        if not self.keys:
            return None
        tenant = self.keys.authenticate(_authorization(request))
        request_log(request.scope).tenant = tenant
        return tenant

    def visible_tenant(self, request: Request) -> str | None:
        """Return the tenant whose requests the caller may see. Raises ApiError 401 for an unknown key.

        None means all tenants, because the key is an admin key or the server has no keys.
        """
        given = _authorization(request)
        tenant = self.authenticate(request)
        return None if self.keys.is_admin(given) else tenant

    def require_admin(self, request: Request) -> None:
        """Raise ApiError 401 or 403 unless the request has an admin key. On a server without keys, every request is
        accepted.
        """
        if self.visible_tenant(request) is None:
            return
        raise ApiError(
            403,
            "admin key required: this request reads or changes data of all tenants; mark a key of --api-keys with "
            '`admin` at the end of its line, or with "admin": true',
            code="not_admin",
        )

    def request_tenant(self, request: Request, fields: RequestFields) -> str:
        """Return the tenant of a generating request. It is the tenant of the key or, without keys, the field
        `tenant`.
        """
        known = self.authenticate(request)
        if known is None:
            return fields.tenant or ""
        if fields.tenant not in (None, known):
            raise bad_request("tenant is set by the API key: omit the field", "tenant")
        return known

    def check_host(self, request: Request) -> None:
        """On a server without keys, raise ApiError 403 if the header Host or Origin has no loopback name. Origins in
        `cors_origins` are accepted, too.

        Without this check, any web page could make a browser on this machine send requests."""
        if self.keys:
            return
        host = request.headers.get("host", "localhost")
        origin = request.headers.get("origin", "http://localhost")
        page = "localhost" if origin in self.cors_origins else origin.partition("://")[2]
        for name in (_host_name(host), _host_name(page)):
            if not is_loopback(name):
                raise ApiError(
                    403,
                    f"{name!r} is not a loopback name; without API keys only loopback names are accepted: use --api-keys or --api-key, or allow a page with --cors-origin",
                )

    async def read_body(
        self, request: Request, held: HeldBody, content_type: str = "application/json"
    ) -> bytes:
        """Return the body of a request, which must have the given content type. Adds the size of each arriving chunk to
        `held`, because the bytes of all bodies together are limited. Raises ApiError for a wrong content type, too many
        bytes, or a slow client.
        """
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != content_type:
            raise ApiError(415, f"content type {kind!r} is not supported: send {content_type}")
        limit = self.limits.body_bytes
        stated = request.headers.get("content-length", "0")
        length = parse_digits(stated)
        if length is None or length > limit:  # None: more digits than any limit has
            raise body_too_large(limit)
        data = bytearray()
        try:
            async with asyncio.timeout(self.limits.request_seconds):
                async for chunk in request.stream():
                    held.add(len(chunk))
                    data += chunk
                    if len(data) > limit:
                        raise body_too_large(limit)
        except TimeoutError:
            raise ApiError(
                408, f"the request body did not arrive within {self.limits.request_seconds:g} seconds"
            ) from None
        except ClientDisconnect:
            raise bad_request("the client disconnected") from None
        return bytes(data)

    async def parse(self, read: Callable[[], Some], account: str, size: int) -> Some:
        """Call `read`, which parses a body of `size` bytes, and return its result. For a large body, `read` runs in a
        thread that serves tenants in turn. `account` is the tenant of the request.
        """
        encoders = (one.encoder for one in self.models.values() if one.encoder is not None)
        encoder = next(encoders, None)
        if size <= SMALL_BODY_BYTES or encoder is None:
            return read()
        return await encoder.run(read, account, size)


def _authorization(request: Request) -> str | None:
    """Return the Authorization header of a request. Clients of Anthropic send the header `x-api-key` instead. In this
    case, return the key of this header in the form of an Authorization header.
    """
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization", None if key is None else f"Bearer {key}")


def parse_digits(text: str) -> int | None:
    """Return the number in a text of up to 18 ASCII digits, or None for other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


def asked_time(request: Request, name: str) -> int | None:
    """Return the parameter `name` of an address, a Unix time in whole seconds, or None if it is not given. Raises
    ApiError for other text.
    """
    given = request.query_params.get(name)
    if given is None:
        return None
    at = parse_digits(given)
    if at is None:
        raise bad_request(f"{name} {given[:32]!r} must be a time in whole seconds since 1970", name)
    return at


def _host_name(host: str) -> str:
    """Return a host without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Return whether a name or address belongs only to this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

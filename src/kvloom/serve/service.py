"""What all endpoints share: the engine's link, the tokenizer, keys, limits and counts, and the checks that come first."""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from .errors import ApiError, bad_request, draining, engine_loading, too_large, unknown_model
from .fields import Fields
from .keys import Keys
from .limits import Gate, Limits
from .link import EngineLink
from .messages import Ready
from .metrics import Metrics
from .observer import Observer
from .prompts import Prompts

__all__ = ["Service", "is_loopback", "whole_number"]

MOST_DIGITS = 18


@dataclass(slots=True)
class Service:
    """One server. `model` is the name that requests give, `path` another that is understood; `prompts` is None while the
    tokenizer loads; without `keys` nobody is asked for one, and only names of this machine are answered to."""

    link: EngineLink
    keys: Keys
    limits: Limits
    gate: Gate
    observer: Observer
    model: str
    path: str
    created: int
    prompts: Prompts | None = None
    metrics_need_key: bool = False
    """/metrics answers requests with a key only."""
    reading: int = 0
    """Bytes of bodies that are being read."""

    @property
    def metrics(self) -> Metrics:
        return self.observer.metrics

    def ready(self) -> tuple[Ready, Prompts]:
        """The engine's facts and the tokenizer. Raises ApiError while one of them is missing, or the server shuts down."""
        if self.gate.shut:
            raise draining()
        facts = self.link.check()
        if self.prompts is None:
            raise engine_loading()
        return facts, self.prompts

    def tenant_of(self, request: Request) -> str | None:
        """The tenant that a request's key names; None where no keys are used. Raises ApiError 401."""
        return self.keys.tenant(request.headers.get("authorization")) if self.keys else None

    def sees(self, request: Request) -> str | None:
        """The tenant whose requests a key may see; None for everybody's: an operator's key, or no keys at all. Raises
        ApiError 401."""
        given = request.headers.get("authorization")
        tenant = self.tenant_of(request)
        return None if self.keys.admin(given) else tenant

    def check_admin(self, request: Request) -> None:
        """Raise ApiError 401 or 403 where a request may not see the whole cache. Without keys everyone may who gets here."""
        if self.sees(request) is None:
            return
        raise ApiError(
            403,
            "this shows what all tenants do, and the key is no admin's: a line of --api-keys that ends in `admin` makes one, "
            'or "admin": true',
            code="not_admin",
        )

    def tenant(self, request: Request, fields: Fields) -> str:
        """The tenant of a generating request: its key's, or without keys the one it names."""
        known = self.tenant_of(request)
        if known is None:
            return fields.tenant or ""
        if fields.tenant not in (None, known):
            raise bad_request("tenant is given by the API key; leave the field out", "tenant")
        return known

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 where a request names another model; one that names none means the one that is served."""
        if name is not None and name not in (self.model, self.path):
            raise unknown_model(name, self.model)

    def check_host(self, request: Request) -> None:
        """Without keys, refuse requests that were sent to another name than this machine's, or by a page that is not from
        this machine: a web page could have made a browser send them. Raises ApiError 403."""
        if self.keys:
            return
        host = request.headers.get("host", "localhost")
        page = request.headers.get("origin", "http://localhost").partition("://")[2]
        for name in (_name(host), _name(page)):
            if not is_loopback(name):
                raise ApiError(
                    403,
                    f"without API keys this server answers to names of its own machine and its pages, not {name!r}: start it with --api-keys",
                )

    async def body(self, request: Request) -> bytes:
        """A request's body: JSON, of a size and at a pace that are taken. Raises ApiError."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"the body must be application/json, not {kind!r}")
        limit = self.limits.body_bytes
        said = request.headers.get("content-length", "0")
        length = whole_number(said)
        if length is not None and length > limit:
            raise too_large(limit)
        data = bytearray()
        try:
            async with asyncio.timeout(self.limits.request_seconds):
                async for chunk in request.stream():
                    self.reading += len(chunk)
                    data += chunk
                    if len(data) > limit:
                        raise too_large(limit)
                    if self.reading > self.limits.bodies * limit:
                        raise ApiError(
                            429, "too many large requests are being read: send it again later", code="rate_limit_exceeded", retry_after=1
                        )  # fmt: skip
        except TimeoutError:
            raise ApiError(
                408, f"the body did not come within {self.limits.request_seconds:g} seconds"
            ) from None
        except ClientDisconnect:
            raise bad_request("the client went away") from None
        finally:
            self.reading -= len(data)
        return bytes(data)


def whole_number(text: str) -> int | None:
    """Return the number that a text of up to 18 ASCII digits writes, else None."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


def _name(host: str) -> str:
    """A host without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether a name or address is of this machine alone."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

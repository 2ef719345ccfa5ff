"""Endpoints for operators: the size of an elastic pool, and the role of a worker. If the server has API keys, both
endpoints require an admin key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvloom.core import parse_size
from kvloom.engine import Role
from kvloom.serve.errors import ApiError, bad_request
from kvloom.serve.worker import Ready

from .request_fields import read_fields
from .server_context import ServerContext

__all__ = ["PoolEndpoint", "RoleEndpoint"]

ANSWER_SECONDS = 30.0
"""Longest time in seconds that an endpoint waits for the engine, which may be in a long step."""


class AdminEndpoint(ABC):
    """An endpoint for admins. An ASGI application."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._respond(Request(scope, receive))
        await response(scope, receive, send)

    @abstractmethod
    async def _respond(self, request: Request) -> Response:
        """Return the response. Raises ApiError for a refused request."""


class PoolFields(msgspec.Struct, frozen=True):
    """Body of POST /admin/pool. The field `bytes` is a number or a text such as "4GiB"."""

    bytes: int | str


class PoolEndpoint(AdminEndpoint):
    """GET /admin/pool returns the size of the pool. POST changes it."""

    async def _respond(self, request: Request) -> Response:
        context = self._context
        context.require_admin(request)
        engine = context.asked_model(request).engine
        facts = engine.require_ready()
        if request.method == "GET":
            return _response(facts, facts.pool_bytes)
        with context.bodies.hold(context.authenticate(request) or "") as held:
            fields = read_fields(await context.read_body(request, held), PoolFields)
        wanted = _bytes(fields.bytes)
        if context.memory is not None:
            raise bad_request(
                "the models share --memory, so their load decides the size of each pool", "bytes"
            )
        if facts.pool_limits is None:
            raise bad_request("the pool keeps its size: start the server with --max-pool", "bytes")
        least, most = facts.pool_limits
        if not least <= wanted <= most:
            raise bad_request(f"bytes {wanted:,} must lie in {least:,} to {most:,}", "bytes")
        try:
            state = await engine.resize_pool(wanted, ANSWER_SECONDS)
        except TimeoutError:
            raise ApiError(
                504, f"the engine did not answer within {ANSWER_SECONDS:g} s; ask again with GET"
            ) from None
        return _response(engine.require_ready(), state.target_bytes)


class RoleFields(msgspec.Struct, frozen=True):
    """Body of POST /admin/role."""

    role: Role


class RoleEndpoint(AdminEndpoint):
    """GET /admin/role returns the role of the worker. POST changes the role for later requests."""

    async def _respond(self, request: Request) -> Response:
        context = self._context
        context.require_admin(request)
        engine = context.asked_model(request).engine
        if request.method == "POST":
            with context.bodies.hold(context.authenticate(request) or "") as held:
                fields = read_fields(await context.read_body(request, held), RoleFields)
            engine.set_role(fields.role)
        return Response(msgspec.json.encode({"role": engine.role}), media_type="application/json")


def _bytes(given: int | str) -> int:
    try:
        return parse_size(given) if isinstance(given, str) else given
    except ValueError as error:
        raise bad_request(f"bytes: {error}", "bytes") from None


def _response(facts: Ready, target: int) -> Response:
    least, most = facts.pool_limits or (facts.pool_bytes, facts.pool_bytes)
    found = {
        "bytes": facts.pool_bytes,
        "target_bytes": target,
        "min_bytes": least,
        "max_bytes": most,
        "max_tokens": facts.max_tokens,
    }
    return Response(msgspec.json.encode(found), media_type="application/json")

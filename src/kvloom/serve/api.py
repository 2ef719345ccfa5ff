"""The HTTP interface: which address does what, and how errors are told. OpenAI's addresses, those of other servers that
clients ask for (/tokenize, /version, /ping), /health and /metrics."""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib import metadata
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .dashboard.routes import dashboard_routes
from .dashboard.watch import Watch
from .errors import ApiError, bad_request, not_found, unknown_model, unknown_request
from .generation import Chats, Completions
from .service import Service, whole_number
from .tokens import Detokenize, Tokenize

__all__ = ["application"]

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")
MOST_RECORDS = 1000


def application(service: Service, watch: Watch | None = None) -> ASGIApp:
    """Everything that the server answers, as an ASGI application. `watch` is what the dashboard shows."""

    async def models(request: Request) -> Response:
        service.tenant_of(request)
        return _json({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        service.tenant_of(request)
        name = request.path_params["name"]
        if name not in (service.model, service.path):
            raise unknown_model(name, service.model)
        return _json(_model(service))

    def named_session(request: Request) -> tuple[str, str]:
        tenant = service.tenant_of(request)
        service.link.check()
        named = request.query_params.get("tenant", "") if tenant is None else tenant
        return named, request.path_params["session"]

    async def end_session(request: Request) -> Response:
        tenant, session = named_session(request)
        service.link.end_session(tenant, session)
        return _json({"id": session, "object": "session", "ended": True})

    async def expect_session(request: Request) -> Response:
        tenant, session = named_session(request)
        service.link.expect_session(tenant, session)
        return _json({"id": session, "object": "session", "expected": True}, 202)

    async def version(_: Request) -> Response:
        return _json({"version": metadata.version("kvloom")})

    async def health(_: Request) -> Response:
        if service.gate.shut:
            return _json({"status": "draining"}, 503)
        loaded = service.link.ready and service.prompts is not None
        return _json({"status": "ok"}) if loaded else _json({"status": "loading"}, 503)

    async def metrics(request: Request) -> Response:
        open_ = not service.keys
        if service.metrics_need_key:
            service.tenant_of(request)
        tenant = service.sees(request) if "authorization" in request.headers else None
        everyone = open_ or ("authorization" in request.headers and tenant is None)
        told = service.metrics.text(tenant, everyone)
        return Response(told, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def records(request: Request) -> Response:
        tenant = service.sees(request)
        given = request.query_params.get("limit", "50")
        limit = whole_number(given)
        if limit is None or not 0 < limit <= MOST_RECORDS:
            raise bad_request(f"limit {given[:32]!r} must be a number from 1 to {MOST_RECORDS}", "limit")
        found = service.observer.records.last(limit, tenant)
        return _json({"requests": [record.shape(operator=tenant is None) for record in found]})

    async def record(request: Request) -> Response:
        tenant, id_ = service.sees(request), request.path_params["id"]
        found = service.observer.records.find(id_, tenant)
        if found is None:
            raise unknown_request(id_)
        return _json(found.shape(operator=tenant is None))

    routes = [
        Route("/v1/completions", Completions(service), methods=["POST"]),
        Route("/v1/chat/completions", Chats(service), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/sessions/{session:path}", end_session, methods=["DELETE"]),
        Route("/v1/sessions/{session:path}", expect_session, methods=["POST"]),
        Route("/tokenize", Tokenize(service), methods=["POST"]),
        Route("/detokenize", Detokenize(service), methods=["POST"]),
        Route("/version", version),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/metrics", metrics),
        Route("/kvloom/requests", records),
        Route("/kvloom/requests/{id}", record),
        *dashboard_routes(service, watch or Watch(service)),
    ]
    handlers: dict[Any, Any] = {ApiError: _told, HTTPException: _http_error, Exception: _unexpected}
    return _Counted(Starlette(routes=routes, exception_handlers=handlers), service)


class _Counted:
    """Counts answers by their status, and refuses requests that were not meant for this machine."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"] if scope["path"] in ENDPOINTS else "other"

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._service.metrics.requests[path, str(message["status"])] += 1
            await send(message)

        request = Request(scope)
        try:
            self._service.check_host(request)
        except ApiError as error:
            response = await _told(request, error)
            await response(scope, receive, counted)
            return
        await self._app(scope, receive, counted)


def _model(service: Service) -> dict[str, Any]:
    facts = service.link.facts
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "kvloom",
        "root": service.path,
        "parent": None,
        "max_model_len": None if facts is None else facts.longest,
    }


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


async def _told(_: Request, error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return Response(error.body, error.status, headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    method, path = request.method, request.url.path
    if error.status_code == 404:
        return await _told(request, not_found(method, path))
    allowed = (error.headers or {}).get("Allow", "another method")
    said = f"{path} takes {allowed}, not {method}" if error.status_code == 405 else str(error.detail)
    told = await _told(request, ApiError(error.status_code, said))
    told.headers.update(error.headers or {})
    return told


async def _unexpected(request: Request, _: Exception) -> Response:
    return await _told(
        request, ApiError(500, "something went wrong here; the server's log says what", code="internal_error")
    )

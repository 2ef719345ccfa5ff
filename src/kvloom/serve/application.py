"""The HTTP application: routes, error responses, and counts of responses.

It has OpenAI's endpoints, /health, /metrics and the dashboard. It also has endpoints that clients of other servers
expect (/tokenize, /version, /ping).
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from importlib import metadata
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.serve.dashboard import Dashboards, dashboard_routes

from .access_log import RequestLogger, request_log
from .api import (
    ChatEndpoint,
    CompletionEndpoint,
    CountTokensEndpoint,
    DetokenizeEndpoint,
    EmbeddingsEndpoint,
    LoadAdapterEndpoint,
    MessagesEndpoint,
    PoolEndpoint,
    ResponsesEndpoint,
    RoleEndpoint,
    ServerContext,
    TokenizeEndpoint,
    TranscriptionsEndpoint,
    TranslationsEndpoint,
    UnloadAdapterEndpoint,
    asked_time,
    documentation_routes,
    openapi,
    parse_digits,
    probe_routes,
)
from .errors import ApiError, bad_request, not_found, unknown_request
from .worker import EngineClient

__all__ = ["application"]

ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/models",
    "/health",
    "/metrics",
)
MAX_RECORDS = 1000


def application(
    context: ServerContext, dashboards: Dashboards | None = None, more: Sequence[Route] = ()
) -> ASGIApp:
    """Return the ASGI application of a server. `dashboards` provides the data of /kvloom/state. If `dashboards` is
    None, this function creates it. `more` are additional routes.
    """

    routes = [
        Route("/", _root),
        Route("/admin/pool", PoolEndpoint(context), methods=["GET", "POST"]),
        Route("/admin/role", RoleEndpoint(context), methods=["GET", "POST"]),
        Route("/v1/completions", CompletionEndpoint(context), methods=["POST"]),
        Route("/v1/chat/completions", ChatEndpoint(context), methods=["POST"]),
        Route("/v1/responses", ResponsesEndpoint(context), methods=["POST"]),
        Route("/v1/messages", MessagesEndpoint(context), methods=["POST"]),
        Route("/v1/messages/count_tokens", CountTokensEndpoint(context), methods=["POST"]),
        Route("/v1/embeddings", EmbeddingsEndpoint(context), methods=["POST"]),
        Route("/v1/audio/transcriptions", TranscriptionsEndpoint(context), methods=["POST"]),
        Route("/v1/audio/translations", TranslationsEndpoint(context), methods=["POST"]),
        Route("/v1/load_lora_adapter", LoadAdapterEndpoint(context), methods=["POST"]),
        Route("/v1/unload_lora_adapter", UnloadAdapterEndpoint(context), methods=["POST"]),
        *_model_list_routes(context),
        *_session_routes(context),
        Route("/tokenize", TokenizeEndpoint(context), methods=["POST"]),
        Route("/detokenize", DetokenizeEndpoint(context), methods=["POST"]),
        *_status_routes(context),
        *probe_routes(context),
        *_record_routes(context),
        *more,
        *dashboard_routes(context, dashboards or Dashboards(context)),
    ]
    handlers: dict[Any, Any] = {ApiError: _error_response, HTTPException: _http_error, Exception: _unexpected}
    described = openapi(routes, metadata.version("kvloom"))
    routes += documentation_routes(described)
    app: ASGIApp = Starlette(routes=routes, exception_handlers=handlers)
    if context.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=context.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return RequestLogger(_CountResponses(app, context))


async def _root(_: Request) -> Response:
    return RedirectResponse("/dashboard")


def _model_list_routes(context: ServerContext) -> list[Route]:
    """Return the routes that list the served models, for clients and routers."""

    async def models(request: Request) -> Response:
        context.authenticate(request)
        return _json({"object": "list", "data": context.listed_models()})

    async def model(request: Request) -> Response:
        context.authenticate(request)
        return _json(context.model_entry(request.path_params["name"]))

    async def worker(request: Request) -> Response:
        tenant = context.authenticate(request)
        models = [served.routing_info() for served in context.models.values()]
        found = [one for one in models if one is not None]
        return _json({"tenant": tenant, "open_requests": context.limiter.requests, "models": found})

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/kvloom/worker", worker),
    ]


def _session_routes(context: ServerContext) -> list[Route]:
    """Return the routes of sessions. POST prefetches the pages of a session. DELETE ends the session, so that its pages
    are evicted first.
    """

    def named_session(request: Request) -> tuple[EngineClient, str, str]:
        tenant = context.authenticate(request)
        served = context.asked_model(request)
        served.engine.require_ready()
        named = request.query_params.get("tenant", "") if tenant is None else tenant
        return served.engine, named, request.path_params["session"]

    async def end_session(request: Request) -> Response:
        engine, tenant, session = named_session(request)
        engine.end_session(tenant, session)
        return _json({"id": session, "object": "session", "ended": True})

    async def expect_session(request: Request) -> Response:
        engine, tenant, session = named_session(request)
        engine.expect_session(tenant, session)
        return _json({"id": session, "object": "session", "expected": True}, 202)

    return [
        Route("/v1/sessions/{session:path}", end_session, methods=["DELETE"]),
        Route("/v1/sessions/{session:path}", expect_session, methods=["POST"]),
    ]


def _status_routes(context: ServerContext) -> list[Route]:
    """Return the routes of version, health and metrics."""

    async def version(_: Request) -> Response:
        return _json({"version": metadata.version("kvloom")})

    async def health(request: Request) -> Response:
        models = {served.name: served.status for served in context.models.values()}
        loaded = all(
            served.status in ("ok", "unloading") or (served.is_added and served.engine.info is None)
            for served in context.models.values()
        )
        status = "draining" if context.limiter.is_draining else "ok" if loaded else "loading"
        if status != "ok":
            request_log(request.scope).error = ApiError(503, status)
        detail = {"models": models} if context.labels_models else {}
        roles = {served.engine.role for served in context.models.values()}
        role = {"role": roles.pop()} if len(roles) == 1 else {}
        return _json({"status": status, **role, **detail}, 200 if status == "ok" else 503)

    async def metrics(request: Request) -> Response:
        open_ = not context.keys
        if context.metrics_need_key:
            context.authenticate(request)
        tenant = context.visible_tenant(request) if "authorization" in request.headers else None
        everyone = open_ or ("authorization" in request.headers and tenant is None)
        models = [served.metrics for served in context.models.values()]
        response = context.metrics.exposition_text(models, context.labels_models, tenant, everyone)
        return Response(response, media_type="text/plain; version=0.0.4; charset=utf-8")

    return [
        Route("/version", version),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/metrics", metrics),
    ]


def _record_routes(context: ServerContext) -> list[Route]:
    """Return the routes that list the records of the latest requests."""

    async def records(request: Request) -> Response:
        tenant = context.visible_tenant(request)
        given = request.query_params.get("limit", "50")
        limit = parse_digits(given)
        if limit is None or not 0 < limit <= MAX_RECORDS:
            raise bad_request(f"limit {given[:32]!r} must be 1 to {MAX_RECORDS}", "limit")
        asked = request.query_params.get("model")
        model = None if asked is None else context.served(asked).name
        found = context.records.latest(limit, tenant, model, asked_time(request, "until"))
        return _json({"requests": [record.to_dict(operator=tenant is None) for record in found]})

    async def record(request: Request) -> Response:
        tenant, id_ = context.visible_tenant(request), request.path_params["id"]
        found = context.records.find(id_, tenant)
        if found is None:
            raise unknown_request(id_)
        return _json({**found.to_dict(operator=tenant is None), "waterfall": found.waterfall()})

    return [
        Route("/kvloom/requests", records),
        Route("/kvloom/requests/{id}", record),
    ]


class _CountResponses:
    """Counts responses by endpoint and status. Rejects requests whose host name is not allowed (`check_host`)."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"] if scope["path"] in ENDPOINTS else "other"

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._context.metrics.requests[path, str(message["status"])] += 1
            await send(message)

        request = Request(scope)
        try:
            self._context.check_host(request)
        except ApiError as error:
            response = await _error_response(request, error)
            await response(scope, receive, counted)
            return
        await self._app(scope, receive, counted)


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


async def _error_response(request: Request, error: ApiError) -> Response:
    request_log(request.scope).error = error
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return Response(error.body, error.status, headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    method, path = request.method, request.url.path
    if error.status_code == 404:
        return await _error_response(request, not_found(method, path))
    allowed = (error.headers or {}).get("Allow", "another method")
    message = f"{path} accepts {allowed}, not {method}" if error.status_code == 405 else str(error.detail)
    response = await _error_response(request, ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def _unexpected(request: Request, _: Exception) -> Response:
    return await _error_response(
        request, ApiError(500, "internal error; see the server's log", code="internal_error")
    )

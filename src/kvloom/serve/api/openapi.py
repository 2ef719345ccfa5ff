"""The description of the API: /openapi.json, generated from the request fields, and /docs, a page without scripts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .embeddings import EmbeddingFields
from .request_fields import UNSUPPORTED, ChatFields, CompletionFields
from .tokenize import IdsFields, MessagesFields, TextFields

__all__ = ["documentation_routes", "openapi"]

REF = "#/components/schemas/{name}"
BODIES: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "/v1/completions": (CompletionFields,),
    "/v1/chat/completions": (ChatFields,),
    "/v1/embeddings": (EmbeddingFields,),
    "/tokenize": (TextFields, MessagesFields),
    "/detokenize": (IdsFields,),
}
"""The fields of the body of each endpoint. If there are several entries, a body has the fields of one of them."""
SUMMARIES = {
    "/": "Redirect to /dashboard",
    "/v1/completions": "Complete prompts: text, token ids, or lists of these",
    "/v1/chat/completions": "Answer a chat",
    "/v1/responses": "Answer in OpenAI's Responses API, without stored responses",
    "/v1/messages": "Answer in Anthropic's Messages API",
    "/v1/messages/count_tokens": "Number of prompt tokens of a request to /v1/messages",
    "/v1/embeddings": "Embeddings of prompts: pooled hidden states",
    "/v1/audio/transcriptions": "Transcribe the WAV file of a form",
    "/v1/audio/translations": "Translate the speech in the WAV file of a form to English",
    "/v1/models": "List the served models",
    "/v1/models/{name}": "Describe a served model",
    "/admin/pool": "GET: size of the page pool; POST: set the size",
    "/admin/role": "GET: role of the worker; POST: set the role (both, prefill, decode or encode)",
    "/admin/models": "Load one more model",
    "/admin/models/{name}": "Unload a model",
    "/v1/load_lora_adapter": "Load a LoRA adapter",
    "/v1/unload_lora_adapter": "Unload a LoRA adapter",
    "/v1/sessions/{session}": "POST: prefetch the pages of a session; DELETE: evict them first",
    "/tokenize": "Token ids of a prompt or a chat",
    "/detokenize": "Text of token ids",
    "/version": "Version of the server",
    "/health": "200 while requests are accepted; 503 while loading or draining",
    "/ping": "As /health",
    "/server_info": "Sizes of the server, for gateways",
    "/v1/loads": "Load of the server, for gateways",
    "/metrics": "Metrics for Prometheus",
    "/kvloom/requests": "The latest requests, with hits and miss reasons",
    "/kvloom/requests/{id}": "One request, by its id or its x-request-id",
    "/kvloom/state": "The data of the dashboard",
    "/kvloom/worker": "Load, sizes and addresses of the worker, for routers",
    "/dashboard": "The live page",
    "/dashboard/{name}": "Scripts, styles and images of the dashboard",
}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def openapi(routes: Sequence[Route], version: str) -> dict[str, Any]:
    """Return the OpenAPI description of routes. Unsupported fields of requests are left out."""
    structs = list(dict.fromkeys(struct for body in BODIES.values() for struct in body))
    _, schemas = msgspec.json.schema_components(structs, ref_template=REF)
    for schema in schemas.values():
        schema["properties"] = {
            name: found for name, found in schema.get("properties", {}).items() if name not in UNSUPPORTED
        }
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        for method in sorted(
            (route.methods or {"POST"} if path in BODIES else route.methods or {"GET"}) - {"HEAD"}
        ):
            paths.setdefault(path, {})[method.lower()] = _operation(path, method)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvloom",
            "version": version,
            "description": "OpenAI-compatible API of kvloom serve.",
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(path: str, method: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": SUMMARIES.get(path, path),
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "responses": {
            "200": {"description": "success"},
            "default": {
                "description": "error",
                "content": {"application/json": {"schema": {"$ref": REF.format(name="Error")}}},
            },
        },
    }
    if names := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if body := BODIES.get(path):
        refs = [{"$ref": REF.format(name=struct.__name__)} for struct in body]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def documentation_routes(described: dict[str, Any]) -> list[Route]:
    """Return the routes of /openapi.json and /docs."""
    data, page = msgspec.json.encode(described), _page(described)

    async def schema(_: Request) -> Response:
        return Response(data, media_type="application/json")

    async def docs(_: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=HEADERS)

    return [Route("/openapi.json", schema), Route("/docs", docs)]


def _page(described: dict[str, Any]) -> str:
    """Return the OpenAPI description `described` as an HTML page."""
    rows, tables = [], []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            rows.append(
                f"<tr><td>{method.upper()}</td><td>{escape(path)}</td><td>{escape(operation['summary'])}</td></tr>"
            )
    for path, body in BODIES.items():
        for struct in body:
            schema = described["components"]["schemas"][struct.__name__]
            required = schema.get("required", [])
            fields = "".join(
                f"<tr><td>{escape(name)}{' (required)' if name in required else ''}</td><td>{escape(_type(found))}</td></tr>"
                for name, found in schema["properties"].items()
            )
            tables.append(f"<h2>POST {escape(path)}: {struct.__name__}</h2><table>{fields}</table>")
    version = escape(described["info"]["version"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>kvloom API</title>'
        '<link rel="stylesheet" href="/dashboard/style.css"></head><body><main>'
        f'<h1>kvloom {version}</h1><p>Schema: <a href="/openapi.json">/openapi.json</a></p>'
        f"<table>{''.join(rows)}</table>{''.join(tables)}</main></body></html>"
    )


def _type(schema: dict[str, Any]) -> str:
    """Return a field's type in one line."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"] if one.get("type") != "null"))
    kind = schema.get("type", "any")
    return f"list of {_type(schema['items'])}" if kind == "array" and schema.get("items") else str(kind)

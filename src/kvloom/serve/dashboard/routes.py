"""Routes of the dashboard: the page, its files, and its data. The page loads nothing from other hosts.

The page itself contains no data. With API keys its data requires an admin key.
"""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from kvloom.serve.api import ServerContext
from kvloom.serve.errors import not_found

from .dashboard_state import Dashboards

__all__ = ["HEADERS", "dashboard_routes", "page_files"]

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def page_files() -> dict[str, bytes]:
    """Return the page's files from the package, by name."""
    folder = resources.files("kvloom.serve.dashboard") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rsplit(".")[-1] in TYPES}


def dashboard_routes(context: ServerContext, dashboards: Dashboards) -> list[Route]:
    """Return the routes of /dashboard and /kvloom/state."""
    files = page_files()

    def sent(name: str) -> Response:
        kind = TYPES[name.rsplit(".", maxsplit=1)[-1]]
        return Response(files[name], media_type=kind, headers={**HEADERS, "cache-control": "no-cache"})

    async def page(_: Request) -> Response:
        return sent("index.html")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if not name:
            return RedirectResponse("../dashboard", headers=HEADERS)
        if name not in files:
            raise not_found(request.method, request.url.path)
        return sent(name)

    async def state(request: Request) -> Response:
        context.require_admin(request)
        headers = {**HEADERS, "cache-control": "no-store"}
        state = await dashboards.of(context.asked_model(request)).state_json()
        return Response(state, media_type="application/json", headers=headers)

    return [
        Route("/dashboard", page),
        Route("/dashboard/{name:path}", file),
        Route("/kvloom/state", state),
    ]

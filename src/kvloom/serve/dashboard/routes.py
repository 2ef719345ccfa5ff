"""The dashboard's addresses: the page and its few files, and what it shows. Nothing of the page comes from elsewhere.

The page is the same for everyone and tells nothing; what it shows needs an admin's key where there are keys at all.
"""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from kvloom.serve.api.server_context import Service
from kvloom.serve.errors import not_found

from .dashboard_state import Watch

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
    """The page's files by their names, as they come with the package."""
    folder = resources.files("kvloom.serve.dashboard") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rsplit(".")[-1] in TYPES}


def dashboard_routes(service: Service, watch: Watch) -> list[Route]:
    """The page at /dashboard, and /kvloom/state."""
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
        service.check_admin(request)
        headers = {**HEADERS, "cache-control": "no-store"}
        return Response(await watch.state(), media_type="application/json", headers=headers)

    return [
        Route("/dashboard", page),
        Route("/dashboard/{name:path}", file),
        Route("/kvloom/state", state),
    ]

"""Routes of the dashboard: the page, its files, and its data.

The page itself contains no data. If the server has API keys, the data require an admin key.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from kvloom.serve.api import ServerContext, asked_time
from kvloom.serve.errors import ApiError, not_found

from .assets import HEADERS, file_type, page_files
from .dashboard_state import Dashboards

__all__ = ["dashboard_routes"]


def dashboard_routes(context: ServerContext, dashboards: Dashboards) -> list[Route]:
    """Return the routes of /dashboard and /kvloom/state."""
    files = page_files()

    def sent(name: str) -> Response:
        return Response(
            files[name], media_type=file_type(name), headers={**HEADERS, "cache-control": "no-cache"}
        )

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
        dashboard, at = dashboards.of(context.asked_model(request)), asked_time(request, "at")
        state = await dashboard.state_json() if at is None else dashboard.past_json(at)
        if state is None:
            raise ApiError(
                404,
                "no state of the past is kept yet; the first is kept a few seconds after the start",
                "at",
                "no_past",
            )
        return Response(state, media_type="application/json", headers=headers)

    return [
        Route("/dashboard", page),
        Route("/dashboard/{name:path}", file),
        Route("/kvloom/state", state),
    ]

"""Routes that load and unload models: POST /admin/models, DELETE /admin/models/{name}. If the server has API keys,
these routes require an admin key.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .api import ServedModel, ServerContext, read_fields
from .errors import ApiError
from .model_set import ModelSet

__all__ = ["model_routes"]


class LoadFields(msgspec.Struct, frozen=True):
    """Body of POST /admin/models. `model` is a folder below one of the --model-dir folders. `name` is the model's name
    in requests. The default is the name of the folder.
    """

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    name: Annotated[str, msgspec.Meta(pattern=r"^[\w.:@/+-]{1,200}$")] | None = None


def model_routes(context: ServerContext, models: ModelSet) -> list[Route]:
    """Return the routes of /admin/models."""

    async def load(request: Request) -> Response:
        context.require_admin(request)
        with context.bodies.hold(context.authenticate(request) or "") as held:
            fields = read_fields(await context.read_body(request, held), LoadFields)
        return _response(await models.load(fields.model, fields.name))

    async def unload(request: Request) -> Response:
        context.require_admin(request)
        served = context.served(request.path_params["name"])
        staying = [one for one in context.models.values() if one.status != "failed" and not one.is_unloading]
        if staying == [served]:
            raise ApiError(409, f"model {served.name!r} is the last one: stop the server instead", "model")
        models.unload(served)
        return _response(served)

    return [
        Route("/admin/models", load, methods=["POST"]),
        Route("/admin/models/{name:path}", unload, methods=["DELETE"]),
    ]


def _response(served: ServedModel) -> Response:
    return Response(msgspec.json.encode(served.to_dict()), 202, media_type="application/json")

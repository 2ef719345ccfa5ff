"""/v1/load_lora_adapter and /v1/unload_lora_adapter: load and unload LoRA adapters of a running server, as in vLLM's
API. If the server has API keys, both endpoints require an admin key.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from kvloom.serve.errors import ApiError, bad_request

from .admin import AdminEndpoint
from .allowed_folders import allowed_folder
from .request_fields import read_fields
from .served_model import ServedModel

__all__ = ["LoadAdapterEndpoint", "UnloadAdapterEndpoint"]

ANSWER_SECONDS = 120.0
"""Longest time in seconds that an endpoint waits for the engine, which reads the files of the adapter."""


class LoadFields(msgspec.Struct, frozen=True):
    """Body of POST /v1/load_lora_adapter. With `load_inplace`, the adapter replaces a loaded adapter of the same name.
    `base_model_name` is the served model that gets the adapter.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadFields(msgspec.Struct, frozen=True):
    """Body of POST /v1/unload_lora_adapter. `lora_int_id` is accepted and has no effect."""

    lora_name: str
    lora_int_id: int | None = None


class LoadAdapterEndpoint(AdminEndpoint):
    """POST /v1/load_lora_adapter loads an adapter from a folder. The folder must be below one of the folders that
    --lora-dir lists."""

    async def _respond(self, request: Request) -> Response:
        context = self._context
        context.require_admin(request)
        with context.bodies.hold(context.authenticate(request) or "") as held:
            fields = read_fields(await context.read_body(request, held), LoadFields)
        if not context.lora_folders:
            raise ApiError(403, "loading adapters is disabled: start the server with --lora-dir DIR")
        served = context.served(fields.base_model_name or request.query_params.get("model"))
        facts = served.engine.require_ready()
        if not facts.adapter_slots:
            raise bad_request(
                "the engine has no slots for adapters: start the server with --max-loras N", "lora_name"
            )
        if not fields.lora_name or fields.lora_name in (*context.models, *context.aliases):
            raise bad_request(
                f"lora_name {fields.lora_name[:200]!r} is empty or the name of a model: give another one",
                "lora_name",
            )
        folder = await asyncio.to_thread(
            allowed_folder, fields.lora_path, context.lora_folders, "lora_path", "--lora-dir"
        )
        await _change(served, fields.lora_name, str(folder), fields.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' added successfully.")


class UnloadAdapterEndpoint(AdminEndpoint):
    """POST /v1/unload_lora_adapter removes an adapter. Requests that were sent earlier still use the adapter until they
    finish.
    """

    async def _respond(self, request: Request) -> Response:
        context = self._context
        context.require_admin(request)
        with context.bodies.hold(context.authenticate(request) or "") as held:
            fields = read_fields(await context.read_body(request, held), UnloadFields)
        served = next((one for one in context.models.values() if one.adapter(fields.lora_name)), None)
        if served is None:
            raise ApiError(
                404, f"there is no adapter {fields.lora_name[:200]!r}: /v1/models lists the adapters", "lora_name",
                "model_not_found",
            )  # fmt: skip
        served.engine.require_ready()
        await _change(served, fields.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")


async def _change(served: ServedModel, name: str, folder: str | None = None, replace: bool = False) -> None:
    """Load an adapter from `folder`. With `replace`, it may replace a loaded adapter of the same name. If `folder` is
    None, unload the adapter. Raises ApiError if the engine refuses the change.
    """
    try:
        error = await served.engine.change_adapter(name, folder, replace, ANSWER_SECONDS)
    except TimeoutError:
        raise ApiError(
            504, f"the engine did not answer within {ANSWER_SECONDS:g} s; /v1/models lists the adapters"
        ) from None
    if error:
        raise bad_request(error, "lora_path" if folder else "lora_name")

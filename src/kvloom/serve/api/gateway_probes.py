"""Answers to the probes of gateways: GET /server_info and GET /v1/loads, with the names that SGLang's servers use.

A gateway such as smg (SGLang's gateway) reads the load of each worker here. It sends requests to the worker with the
least load.
"""

from __future__ import annotations

import time
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .server_context import ServerContext

__all__ = ["probe_routes"]


def probe_routes(context: ServerContext) -> list[Route]:
    """Return the routes of the probes. If the server has API keys, the routes require a key."""

    async def info(request: Request) -> Response:
        context.authenticate(request)
        return Response(msgspec.json.encode(_server_info(context)), media_type="application/json")

    async def loads(request: Request) -> Response:
        context.authenticate(request)
        return Response(msgspec.json.encode(_loads(context)), media_type="application/json")

    return [Route("/server_info", info), Route("/v1/loads", loads)]


def _server_info(context: ServerContext) -> dict[str, Any]:
    """Return the description of the server's first model. Sizes are missing while the model loads."""
    served = next(iter(context.models.values()))
    facts = served.engine.info
    sizes = {} if facts is None else {
        "context_length": facts.max_tokens,
        "page_size": facts.block_tokens,
        "max_total_num_tokens": _tokens_in(facts.pool_bytes, facts.bytes_per_token),
    }  # fmt: skip
    return {
        "version": metadata.version("kvloom"),
        "model_path": served.path,
        "served_model_name": served.name,
        "tp_size": 1,
        "dp_size": 1,
        "disaggregation_mode": "null" if served.engine.role == "both" else served.engine.role,
        **sizes,
    }


def _loads(context: ServerContext) -> dict[str, Any]:
    """Return the summed load of all models of the server, in the form of one worker."""
    running = waiting = used = capacity = prompt = cached = 0
    for served in context.models.values():
        facts, stats, metrics = served.engine.info, served.engine.stats, served.metrics
        running, waiting = running + stats.running, waiting + stats.waiting
        prompt, cached = prompt + metrics.prompt_tokens, cached + metrics.cached_tokens
        if facts is not None:
            used += _tokens_in(stats.in_use_bytes, facts.bytes_per_token)
            capacity += _tokens_in(stats.slabs * facts.slab_bytes, facts.bytes_per_token)
    usage = used / capacity if capacity else 0.0
    load = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": capacity,
        "token_usage": usage,
        "cache_hit_rate": cached / prompt if prompt else 0.0,
    }
    total = {
        "total_running_reqs": running,
        "total_waiting_reqs": waiting,
        "total_reqs": running + waiting,
        "avg_token_usage": usage,
    }
    return {
        "timestamp": time.time(),
        "version": metadata.version("kvloom"),
        "dp_rank_count": 1,
        "loads": [load],
        "aggregate": total,
    }


def _tokens_in(size: int, bytes_per_token: int) -> int:
    """Return the number of tokens whose pages take `size` bytes."""
    return int(size / bytes_per_token) if bytes_per_token else 0

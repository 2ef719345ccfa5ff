"""The engine process, and its client in the API process.

    engine_client.py      EngineClient: starts and restarts the engine process, exchanges messages with it
    request_pins.py       RequestPins: prompts that requests pin
    response_stream.py    ResponseStream: the deltas of one HTTP request
    messages.py           the messages between both processes
    pool_broker.py        plan_pools: one memory budget for the pools of several models
    watchdog.py           Watchdog: detects an engine that hangs
    engine_process.py     the engine process: loads the model, then runs steps
    worker.py             Worker: runs requests on the engine
    encode_worker.py      EncodeWorker: encodes images for other workers
    adapter_loads.py      AdapterLoads: reads LoRA adapters in a thread
    image_prompts.py      ImagePrompts: decodes the images of requests in a thread
    stats.py              the engine's counters as one message
    cache_snapshot.py     CacheSnapshot: the cache as JSON for the dashboard

The files from engine_process.py on run in the engine process. Names are imported on first use, because the API process
must not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine_client import EngineClient, StartError
    from .engine_process import load_engine
    from .messages import (
        AdapterInfo,
        Add,
        Delta,
        EngineStats,
        FromEngine,
        HistogramCounts,
        ImagePrompt,
        Outputs,
        Ready,
        RequestProgress,
        Start,
        TenantConfig,
        TenantUsage,
        TierUsage,
        TokenLogprob,
        TokenRange,
    )
    from .pool_broker import PoolBroker, PoolLoad, plan_pools
    from .response_stream import ResponseStream
    from .stats import engine_stats
    from .watchdog import WatchdogLimits
    from .worker import Worker

__all__ = [
    "AdapterInfo",
    "Add",
    "Delta",
    "EngineClient",
    "EngineStats",
    "FromEngine",
    "HistogramCounts",
    "ImagePrompt",
    "Outputs",
    "PoolBroker",
    "PoolLoad",
    "Ready",
    "RequestProgress",
    "ResponseStream",
    "Start",
    "StartError",
    "TenantConfig",
    "TenantUsage",
    "TierUsage",
    "TokenLogprob",
    "TokenRange",
    "WatchdogLimits",
    "Worker",
    "engine_stats",
    "load_engine",
    "plan_pools",
]

_MODULES = {
    "engine_client": (
        "EngineClient",
        "StartError",
    ),
    "engine_process": ("load_engine",),
    "messages": (
        "AdapterInfo",
        "Add",
        "Delta",
        "EngineStats",
        "FromEngine",
        "HistogramCounts",
        "ImagePrompt",
        "Outputs",
        "Ready",
        "RequestProgress",
        "Start",
        "TenantConfig",
        "TenantUsage",
        "TierUsage",
        "TokenLogprob",
        "TokenRange",
    ),
    "pool_broker": ("PoolBroker", "PoolLoad", "plan_pools"),
    "response_stream": ("ResponseStream",),
    "stats": ("engine_stats",),
    "watchdog": ("WatchdogLimits",),
    "worker": ("Worker",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)

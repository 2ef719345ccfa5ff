"""Observes requests: metrics, records, traces, recordings.

    metrics.py            Metrics: the counters of a model; ServerMetrics: those of the server, and /metrics
    series.py             Series: names, help texts and Prometheus' text format
    observer.py           RequestObserver: passes each request to metrics, records, traces and the recorder
    saved_time.py         SavedTime: the prefill time that cached tokens save
    request_records.py    RequestRecord: one request's numbers, and why it hit or missed
    otel_traces.py        Traces: OpenTelemetry spans
    trace_recorder.py     Recorder: writes a traffic recording for `kvloom replay`

Imports worker and auth. Names are imported on first use, because `kvloom replay` needs only the recorder.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .metrics import Metrics, ServerMetrics
    from .observer import RequestObserver
    from .otel_traces import Traces
    from .request_records import RequestRecord, RequestRecords, explain_miss
    from .series import PoolInfo, Series, age_histogram, engine_series, exposition, full_name, tenant_series
    from .trace_recorder import VERSION, Recorder

__all__ = [
    "VERSION",
    "Metrics",
    "PoolInfo",
    "Recorder",
    "RequestObserver",
    "RequestRecord",
    "RequestRecords",
    "Series",
    "ServerMetrics",
    "Traces",
    "age_histogram",
    "engine_series",
    "explain_miss",
    "exposition",
    "full_name",
    "tenant_series",
]

_MODULES = {
    "metrics": ("Metrics", "ServerMetrics"),
    "observer": ("RequestObserver",),
    "otel_traces": ("Traces",),
    "request_records": (
        "RequestRecord",
        "RequestRecords",
        "explain_miss",
    ),
    "series": (
        "PoolInfo",
        "Series",
        "age_histogram",
        "engine_series",
        "exposition",
        "full_name",
        "tenant_series",
    ),
    "trace_recorder": (
        "Recorder",
        "VERSION",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)

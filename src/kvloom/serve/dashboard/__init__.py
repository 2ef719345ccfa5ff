"""The dashboard: a live page about one server's cache, and the same data in a terminal. See docs/dashboard.md.

    routes.py             /dashboard and /kvloom/state
    assets.py             files and headers of the pages
    dashboard_state.py    Dashboards: cache snapshot and history of each model as JSON
    history.py            samples of counters
    past.py               Past: the documents of the past hour
    terminal.py           the dashboard as terminal output
    command.py            `kvloom top`
    fleet_terminal.py     a router's fleet as terminal output
    page/                 HTML, CSS and JavaScript: index.html shows a server, fleet.html a router's fleet

This package imports `serve.api`. Its names are imported on first use, because `kvloom top` needs no server
packages.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .assets import HEADERS, file_type, page_files
    from .dashboard_state import Dashboards
    from .history import QUANTILES, Samples
    from .routes import dashboard_routes

__all__ = ["HEADERS", "QUANTILES", "Dashboards", "Samples", "dashboard_routes", "file_type", "page_files"]

_MODULES = {
    "dashboard_state": ("Dashboards",),
    "history": ("QUANTILES", "Samples"),
    "assets": ("HEADERS", "file_type", "page_files"),
    "routes": ("dashboard_routes",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)

"""The dashboard: a live page about one server's cache, and the same in a terminal. See docs/dashboard.md.

    routes.py             /dashboard and /kvloom/state
    dashboard_state.py    Dashboards: cache snapshot and history of each model as JSON
    history.py            samples of counters
    terminal.py           the dashboard as terminal output
    command.py            `kvloom top`
    page/                 HTML, CSS and JavaScript of the page

Imports api. Names are imported on first use, because `kvloom top` needs no server packages.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dashboard_state import Dashboards
    from .routes import dashboard_routes, page_files

__all__ = ["Dashboards", "dashboard_routes", "page_files"]

_MODULES = {
    "dashboard_state": ("Dashboards",),
    "routes": (
        "dashboard_routes",
        "page_files",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)

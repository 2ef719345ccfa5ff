"""One KV-cache system for LLM inference. Heavy modules are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloom.adapters.transformers import Cache
    from kvloom.core import Objective
    from kvloom.engine import LLM, SamplingParams

    __version__: str

__all__ = ["LLM", "Cache", "Objective", "SamplingParams"]

_HOMES = {
    "LLM": "kvloom.engine",
    "Cache": "kvloom.adapters.transformers",
    "Objective": "kvloom.core",
    "SamplingParams": "kvloom.engine",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("kvloom")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvloom' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})

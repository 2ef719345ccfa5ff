"""One KV-cache system for LLM inference. What is heavy is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloom.engine.llm import LLM
    from kvloom.engine.request import SamplingParams

__all__ = ["LLM", "SamplingParams"]

_HOMES = {"LLM": "kvloom.engine.llm", "SamplingParams": "kvloom.engine.request"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvloom' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

"""Engines for tests: settings as keyword arguments."""

from __future__ import annotations

from typing import Any

from kvloom.engine import Engine, EngineConfig, OffloadConfig
from kvloom.tiers.transfers import TransferConfig

__all__ = ["PATIENT", "make_engine"]

PATIENT = OffloadConfig(
    "always", deadline_seconds=(20.0, 20.0), transfers=TransferConfig(lookup_seconds=20.0)
)
"""For pages that must be found, however busy the machine is."""


def make_engine(
    model: Any, pool_bytes: int | None = None, kv_dtype: Any = None, tokenizer: Any = None, **settings: Any
) -> Engine:
    """Return an engine; `settings` are fields of `EngineConfig`."""
    return Engine(model, EngineConfig(pool_bytes=pool_bytes, kv_dtype=kv_dtype, **settings), tokenizer)

"""Engines for tests: settings as keyword arguments, and eviction of all cached pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvloom.core import CacheControl
from kvloom.engine import Engine, EngineConfig, OffloadConfig
from kvloom.tiers.transfers import TransferConfig

__all__ = ["PATIENT", "evict_all", "make_engine"]

PATIENT = OffloadConfig(
    "always", deadline_seconds=(20.0, 20.0), transfers=TransferConfig(lookup_seconds=20.0)
)
"""For pages that must be found, however busy the machine is."""


def make_engine(
    model: Any, pool_bytes: int | None = None, kv_dtype: Any = None, tokenizer: Any = None, **settings: Any
) -> Engine:
    """Return an engine; `settings` are fields of `EngineConfig`."""
    return Engine(model, EngineConfig(pool_bytes=pool_bytes, kv_dtype=kv_dtype, **settings), tokenizer)


def evict_all(engine: Engine) -> bool:
    """Evict all cached pages: allocate all pages of the pool, and free them. Return whether no page is cached any more.
    If the pool has too few slabs left for a block of all groups, a few pages stay."""
    cache, sequences = engine.cache, []
    for count in (min(960, cache.max_tokens), 96, 16):
        tokens, is_full = np.full(count, 5, np.int32), False
        while not is_full:
            sequence = cache.open(cache.match(tokens, CacheControl(read=False, store=False)))
            is_full = bool(sequence.extend(count))
            sequences.append(sequence)
    for sequence in sequences:
        sequence.close()
    return not engine.cache.stats()["cached_pages"]

"""Counters of an offload manager since its start. Plain numbers; every part adds to the fields it owns."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OffloadStats"]


@dataclass(slots=True)
class OffloadStats:
    """Counters since the start of the engine."""

    load_jobs: int = 0
    """Copies from host memory into the pool that started."""
    loaded_tokens: int = 0
    """Tokens that requests could resume behind because of those copies."""
    loaded_bytes: int = 0
    failed_pages: int = 0
    """Pages that host memory had evicted before they were copied."""
    not_worth_loading: int = 0
    """Loads skipped because recomputing is faster."""
    no_room: int = 0
    """Loads postponed because the pool had no room."""
    prefetched_sessions: int = 0
    offloaded_pages: int = 0
    """Pages copied to host memory."""
    offloaded_bytes: int = 0

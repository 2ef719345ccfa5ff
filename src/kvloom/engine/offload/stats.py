"""Counters of an offload manager since its start. Each module increments its own fields."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OffloadStats"]


@dataclass(slots=True)
class OffloadStats:
    """Counters since the start of the engine."""

    load_jobs: int = 0
    """Number of started copies from host memory into the pool."""
    loaded_tokens: int = 0
    """Number of prompt tokens that were loaded by these copies instead of computed."""
    loaded_bytes: int = 0
    failed_pages: int = 0
    """Pages that host memory had evicted before they were copied."""
    not_worth_loading: int = 0
    """Loads skipped because recomputing is faster."""
    no_free_pages: int = 0
    """Loads postponed because the pool had no free pages."""
    prefetched_sessions: int = 0
    loaded_images: int = 0
    """Images whose embeddings were loaded from tiers."""
    encoded_images: int = 0
    """Images that no tier had in time, so the vision tower ran."""
    hand_overs: int = 0
    """Prompts for which a prefill worker computed the pages, and all pages arrived."""
    cut_hand_overs: int = 0
    """Prompts whose prefill worker or pages were lost or late. The rest was computed here."""
    handed_over_pages: int = 0
    """Pages pulled from prefill workers while they computed."""
    offloaded_pages: int = 0
    """Pages copied to host memory."""
    offloaded_bytes: int = 0
    cold_pages: int = 0
    """Pages of running requests that became cold, because the pool is too small for them."""

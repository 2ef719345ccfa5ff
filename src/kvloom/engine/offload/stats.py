"""Counters of an offload manager since its start. Each module increments its own fields."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OffloadStats"]


@dataclass(slots=True)
class OffloadStats:
    """Counters of offloaded and loaded pages since the start of the engine."""

    load_jobs: int = 0
    """Number of started copies from host memory into the pool."""
    loaded_tokens: int = 0
    """Number of prompt tokens that were loaded by these copies instead of computed."""
    loaded_bytes: int = 0
    failed_pages: int = 0
    """Number of pages that host memory had evicted before they were copied into the pool."""
    not_worth_loading: int = 0
    """Number of loads that were skipped because recomputing is faster."""
    no_free_pages: int = 0
    """Number of loads that were postponed because the pool had no free pages."""
    prefetched_sessions: int = 0
    loaded_images: int = 0
    """Number of images whose embeddings were loaded from tiers."""
    encoded_images: int = 0
    """Number of images that the vision tower encoded, because no tier had them in time."""
    hand_overs: int = 0
    """Number of prompts that a prefill worker computed and whose pages all arrived here."""
    cut_hand_overs: int = 0
    """Number of prompts whose prefill worker or pages were lost or late. This worker computed the rest of the
    prompt."""
    handed_over_pages: int = 0
    """Number of pages that were pulled from prefill workers while they computed."""
    offloaded_pages: int = 0
    """Number of pages that were copied to host memory."""
    offloaded_bytes: int = 0
    cold_pages: int = 0
    """Number of pages of running requests that were moved to host memory (cold pages), because the pool is too small
    for these requests."""

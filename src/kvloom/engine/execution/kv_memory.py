"""A model's pool: what its layers keep, laid out as pages in a buffer on its device, and the cache that keeps its books.

    model → layer specs, scales → layout (its images' too) → bytes, given or found → slabs → buffer and cache

What makes no sense is refused before the buffer is allocated. Knows no requests, no steps and no tiers, but that what tiers
keep must be named after the very weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kvloom.core import CheckpointPolicy, KVCache, PoolLayout, Tenant
from kvloom.kernels.memory import allocate
from kvloom.models.loading import model_fingerprint
from kvloom.models.paged import Scales, fingerprint, install, load_scales
from kvloom.models.specs import KVDtype, model_spec
from kvloom.models.vision import Vision, vision_of

from .memory_budget import MemoryBudget, measure_budget

__all__ = ["KVMemory", "allocate_kv_memory"]

MAX_TOKENS = 131072
"""The longest sequence where the model names no limit."""


@dataclass(frozen=True, slots=True)
class KVMemory:
    """`cache` keeps the books of the pages in `buffer`. `limit` are the tokens a sequence may have, if anybody says; `room` is
    how the pool got its size where it was left to find it; `invariant`: a row's bits may not depend on those beside it, and on
    this device that takes kernels of their own."""

    layout: PoolLayout
    buffer: torch.Tensor
    cache: KVCache
    scales: Scales | None
    vision: Vision | None
    limit: int | None
    budget: MemoryBudget | None
    invariant: bool


def allocate_kv_memory(
    model: Any,
    *,
    pool_bytes: int | None,
    memory_fraction: float,
    block_tokens: int,
    token_budget: int,
    max_running: int,
    max_context: int | None,
    kv_dtype: KVDtype | None,
    kv_scales: str | os.PathLike[str],
    tenants: Iterable[Tenant],
    graphs: bool,
    batch_invariant: bool,
    stored: bool,
) -> KVMemory:
    """The pool for a model that is on its device, whose attention reads pages from now on. The arguments are the Engine's;
    `stored`: pages go to tiers, too. Without `pool_bytes` a GPU runs a trial step to find them, which takes seconds.
    Raises ValueError for what cannot be."""
    weight = next(model.parameters())
    if batch_invariant and not weight.is_cuda and weight.dtype != torch.float32:
        raise ValueError(
            f"batch_invariant on a CPU needs float32, not {weight.dtype}: give dtype float32 (--dtype), "
            "with which a seed's tokens are the same there in any batch"
        )
    invariant = batch_invariant and weight.is_cuda  # a CPU in float32 needs nothing for it
    spec = model_spec(
        {**model.config.to_dict(), "dtype": str(weight.dtype).removeprefix("torch.")},
        kv_dtype=kv_dtype,
        static_scales=kv_scales != "dynamic",
    )
    scales = None if kv_scales == "dynamic" else load_scales(kv_scales, model, spec.layers)
    layout = PoolLayout.build(spec.layers, block_tokens)
    vision = vision_of(model)
    if vision is not None:
        layout = vision.extend_layout(spec.layers, layout)
    limit = _limit(spec.max_context, max_context)
    longest = limit or MAX_TOKENS
    install(model, limit)
    room = None
    if pool_bytes is None:
        room = measure_budget(
            model, layout, memory_fraction, token_budget, max_running, graphs, scales, longest, invariant, vision
        )  # fmt: skip
        pool_bytes = room.pool
    slabs = layout.slabs_in(pool_bytes)
    if slabs < 2:
        raise ValueError(
            f"a pool of {pool_bytes:,} bytes is too small: its unit is {layout.slab_bytes:,} and it needs two"
        )
    buffer = allocate(layout, slabs, weight.device)
    name = spec.name
    if stored:  # who finds pages there must have computed just these
        name = f"{model.config.model_type} {model_fingerprint(model)}{' invariant' * batch_invariant}"
    cache = KVCache(
        layout,
        slabs=slabs,
        model=name if scales is None else f"{name}, scales {fingerprint(scales)}",
        max_sequences=max_running,
        max_tokens=longest,
        tenants=tenants,
        snapshots=CheckpointPolicy(before_last=True),
    )
    return KVMemory(layout, buffer, cache, scales, vision, limit, room, invariant)


def _limit(models: int | None, asked: int | None) -> int | None:
    """The tokens a sequence may have: what is asked for, or as many as the model can do."""
    if asked is None:
        return models
    if not 1 <= asked <= (models or MAX_TOKENS):
        raise ValueError(
            f"max_context {asked} must lie in 1 to {models or MAX_TOKENS}, what the model can do"
        )
    return asked

"""KV memory: allocates the page pool of a model on its device, and the cache that manages it.

    model → layer specs, scales → layout (with images) → bytes, configured or measured → slabs → buffer and cache

Settings that cannot work are refused before the buffer is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kvloom.combinations import refused
from kvloom.core import (
    WHOLE,
    CheckpointPolicy,
    ContextPart,
    KVCache,
    PoolLayout,
    TensorPart,
    divided_specs,
)
from kvloom.engine.config import EngineConfig
from kvloom.kernels.memory import ElasticBuffer, allocate, elastic_buffer, granularity
from kvloom.models.fusion import fuse
from kvloom.models.heads import Head
from kvloom.models.loading import model_fingerprint, transformers_config
from kvloom.models.lora import AdapterSlots
from kvloom.models.paged import Scales, divide_scales, fingerprint, hidden_states_field, install, load_scales
from kvloom.models.sharding import ranks_of, whole_of
from kvloom.models.specs import ModelSpec, folder_of, kv_dtypes, model_spec, with_draft
from kvloom.models.vision import Vision, vision_of

from .memory_budget import MemoryBudget, measure_budget

__all__ = ["KVMemory", "allocate_kv_memory"]

MAX_TOKENS = 131072
"""Largest number of tokens of a sequence if the model has no limit."""


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The pool of an engine. `cache` manages the pages in `buffer`.

    | field             | meaning                                                                                |
    |-------------------|----------------------------------------------------------------------------------------|
    | `elastic`         | memory of the buffer if slabs can be added and removed, else None                      |
    | `scales`          | static scales; None for dynamic scales and unquantised pages                           |
    | `vision`          | encodes images; None for a model without images                                        |
    | `limit`           | largest number of tokens of a sequence; None if the model has no limit                 |
    | `budget`          | measurement that gave the pool size; None if the size was configured                   |
    | `batch_invariant` | whether runners must use batch-invariant kernels                                       |
    """

    layout: PoolLayout
    buffer: torch.Tensor
    elastic: ElasticBuffer | None
    cache: KVCache
    scales: Scales | None
    vision: Vision | None
    limit: int | None
    budget: MemoryBudget | None
    batch_invariant: bool


def allocate_kv_memory(
    model: Any, config: EngineConfig, draft: Any = None, lora: AdapterSlots | None = None
) -> KVMemory:
    """Allocate the pool of a model on its device, and make the model's attention read pages. A `draft` model or
    head shares the pool. Only rank 0 runs it, but the pools of all ranks have its pages. The slots of adapters (`lora`) are allocated first.

    In `config`, `token_budget` and `max_running` must be set. If `pool_bytes` is None, a GPU runs a trial step to
    measure the free memory, which takes seconds. Raises ValueError for settings that cannot work."""
    assert config.token_budget is not None
    assert config.max_running is not None
    weight = next(model.parameters())
    if config.batch_invariant and not weight.is_cuda and weight.dtype != torch.float32:
        raise ValueError(refused("batch_invariant, dtype", dtype=weight.dtype))
    batch_invariant = config.batch_invariant and weight.is_cuda  # float32 on a CPU is already batch-invariant
    spec = _pool_spec(model, draft, config)
    if draft is not None:
        install(draft, spec.max_context)
    ranks, part = ranks_of(model), WHOLE
    whole_scales = _static_scales(model, spec, config)
    scales = whole_scales
    if whole_scales is not None and ranks is not None:
        shard = ranks.weight_shard
        scales = divide_scales(whole_scales, spec.layers, TensorPart(shard.rank, shard.count))
    step = 16 if config.max_pool_bytes is None else granularity(weight.device)
    if ranks is not None and ranks.context is not None:
        part = ContextPart(ranks.context.shard.rank, ranks.context.shard.count)
    layout = PoolLayout.build(spec.layers, config.block_tokens, step, part)
    vision = vision_of(model)
    if vision is not None:
        layout = vision.extend_layout(spec.layers, layout, step)
    limit = _limit(spec.max_context, config.max_context)
    longest = limit or MAX_TOKENS
    install(model, limit)
    if lora is not None:
        fuse(model)  # first, because fused layers share adapter slots
        lora.attach()
    budget, pool_bytes = None, config.pool_bytes
    if pool_bytes is None:
        budget = measure_budget(
            model,
            layout,
            config.memory_fraction,
            config.token_budget,
            config.max_running,
            config.cuda_graphs and part == WHOLE,  # ranks that divide the context have no graphs
            scales,
            longest,
            batch_invariant,
            vision,
            0 if config.speculate == "off" else 1 + bool(config.draft_model or config.head),
            lora,
        )
        pool_bytes = budget.pool
    slabs = layout.slabs_in(pool_bytes)
    if ranks is not None:
        slabs = ranks.every.smallest(slabs)  # page ids must be valid on every rank
    if slabs < 2:
        raise ValueError(
            f"a pool of {pool_bytes:,} bytes is too small: give at least two slabs of {layout.slab_bytes:,} bytes"
        )
    elastic = reserved = None
    if config.max_pool_bytes is not None:
        reserved = max(slabs, layout.slabs_in(config.max_pool_bytes))
        elastic = elastic_buffer(layout, reserved, weight.device, mapped=slabs)
    buffer = allocate(layout, slabs, weight.device) if elastic is None else elastic.tensor
    cache = KVCache(
        layout,
        slabs=slabs,
        reserved=reserved,
        model=_model_identity(model, draft, spec, whole_scales, config),
        # One more sequence: a copy of a document briefly opens a second one.
        max_sequences=config.max_running + (config.reuse_documents is not None),
        max_tokens=longest,
        tenants=config.tenants,
        public_bytes=config.public_bytes,
        policy=config.eviction_policy,
        checkpoint_policy=CheckpointPolicy(
            before_last=True,
            every_blocks=-(-config.checkpoint_every // config.block_tokens),
            is_measured=not config.checkpoint_every and "snapshots" not in config.fixed,
        ),
    )
    return KVMemory(layout, buffer, elastic, cache, scales, vision, limit, budget, batch_invariant)


def _static_scales(model: Any, spec: ModelSpec, config: EngineConfig) -> Scales | None:
    """Return the static scales of the whole model. None if scales are dynamic."""
    if config.kv_scales == "dynamic":
        return None
    layers = {name: layer.whole() for name, layer in spec.layers.items()}
    return load_scales(config.kv_scales, model, layers)


def _pool_spec(model: Any, draft: Any, config: EngineConfig) -> ModelSpec:
    """Return the spec of all layers that have pages in the pool: those of the model on this rank, and those of the
    draft model or head."""
    dtype = next(model.parameters()).dtype
    spec = _spec(model.config, dtype, config)
    whole = whole_of(model)
    if whole is not None:
        layers = divided_specs(spec.layers, _spec(whole.config, dtype, config).layers)
        spec = replace(spec, layers=layers)
    if draft is not None:
        return _with_draft(spec, draft, config)
    if config.draft_model:
        # Only rank 0 runs the draft model. The other ranks reserve its pages, so that page ids are equal.
        beside = transformers_config(folder_of(config.draft_model))
        return with_draft(spec, _draft_spec(beside, dtype, config))
    return spec


def _model_identity(
    model: Any, draft: Any, spec: ModelSpec, scales: Scales | None, config: EngineConfig
) -> str:
    """Return the text that identifies the model in block hashes. With tiers, the text covers the weights, because
    other processes may load the pages."""
    name = spec.name
    if config.tiers:
        invariant = " invariant" if config.batch_invariant else ""
        name = f"{model.config.model_type} {model_fingerprint(model)}{invariant}"
        if draft is not None:  # tiers store pages of the draft beside pages of the target
            name += f", draft {model_fingerprint(draft)}"
    return name if scales is None else f"{name}, scales {fingerprint(scales)}"


def _spec(model_config: Any, dtype: torch.dtype, config: EngineConfig) -> ModelSpec:
    return model_spec(
        {**model_config.to_dict(), "dtype": str(dtype).removeprefix("torch.")},
        kv_dtype=config.kv_dtype,
        static_scales=config.kv_scales != "dynamic",
    )


def _with_draft(spec: ModelSpec, draft: Any, config: EngineConfig) -> ModelSpec:
    """Return one spec with the layers of the target (`spec`) and of the draft model or head. Raises ValueError for a
    draft model that cannot share the pool.
    """
    weight = next(draft.parameters())
    beside = _draft_spec(draft.config, weight.dtype, config)
    if any(layer.unit == "state" for layer in beside.layers.values()):
        raise ValueError(refused("draft model, states", name=beside.name))
    if spec.media is not None or beside.media is not None:
        raise ValueError(refused("draft model, images"))
    if isinstance(draft, Head):
        return with_draft(spec, beside, hidden_states_field(draft.state_size, weight.dtype))
    return with_draft(spec, beside)


def _draft_spec(draft_config: Any, dtype: torch.dtype, config: EngineConfig) -> ModelSpec:
    every, _ = kv_dtypes(config.kv_dtype)
    fields = {**draft_config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}
    return model_spec(fields, kv_dtype=every)


def _limit(model_limit: int | None, asked: int | None) -> int | None:
    """Return the largest number of tokens of a sequence: `asked`, or `model_limit` if `asked` is None. Raises
    ValueError if `asked` exceeds `model_limit`.
    """
    if asked is None:
        return model_limit
    most = model_limit or MAX_TOKENS
    if not 1 <= asked <= most:
        raise ValueError(f"max_context {asked} must be from 1 to {most}, the model's limit")
    return asked

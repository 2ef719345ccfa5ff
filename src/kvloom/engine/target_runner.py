"""The runner of an engine's model. Every rank creates its runner from the same settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvloom.models.lora import AdapterSlots
from kvloom.models.paged import DRAFT_STEP_TOKENS

from .config import EngineConfig
from .execution import MAX_RUNNING, TOKEN_BUDGET, KVMemory, ModelRunner
from .speculation import longest_draft

__all__ = ["draft_rows", "target_runner", "with_step_sizes"]

MIN_DRAFT_ROWS = 64
"""Smallest limit on the positions at which a step with drafts samples. The limit is higher if `max_running` requests
with the longest drafts have more positions, up to `DRAFT_STEP_TOKENS`. The limit is never below `max_running`, so that
each request can sample one token.
"""


def with_step_sizes(config: EngineConfig, on_gpu: bool) -> EngineConfig:
    """Return the settings, with `token_budget` and `max_running` filled in."""
    return replace(
        config,
        token_budget=TOKEN_BUDGET[on_gpu] if config.token_budget is None else config.token_budget,
        max_running=MAX_RUNNING[on_gpu] if config.max_running is None else config.max_running,
    )


def draft_rows(config: EngineConfig) -> int:
    """Return the largest number of positions at which a step with drafts samples. 0 without speculation."""
    assert config.max_running is not None
    if config.speculate == "off":
        return 0
    wanted = min(config.max_running * (1 + _draft_length(config)), DRAFT_STEP_TOKENS)
    return max(config.max_running, MIN_DRAFT_ROWS, wanted)


def target_runner(
    model: Any, memory: KVMemory, config: EngineConfig, lora: AdapterSlots | None = None
) -> ModelRunner:
    """Return the runner of a model on its KV memory. In `config`, step sizes must be set."""
    assert config.token_budget is not None
    assert config.max_running is not None
    return ModelRunner(
        model,
        memory.cache,
        memory.buffer,
        config.token_budget,
        config.max_running,
        config.cuda_graphs,
        memory.scales,
        memory.vision,
        memory.batch_invariant,
        2 * draft_rows(config),
        draft_length=_draft_length(config),
        trees=config.tree_nodes > 0,
        lora=lora,
        # An EAGLE head reads hidden states of all tokens after some layers.
        whole_steps=config.head.startswith("eagle="),
    )


def _draft_length(config: EngineConfig) -> int:
    return longest_draft(config.proposers, config.draft_tokens, config.tree_nodes)

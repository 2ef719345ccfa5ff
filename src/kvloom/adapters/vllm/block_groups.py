"""Block size, window and resume rule of vLLM's KV cache groups.

A prompt can resume at position p if three conditions hold. Every full group has all blocks before p. Every windowed
group has the blocks that token p can read. Every state group has the state after exactly p tokens. vLLM keeps this
state in the block that ends at p. kvloom's own resume rule is the same, for its own layouts
(`core/prefix/resume_rule.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    MambaSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
    iter_layer_specs,
)

from kvloom.core import HASH_TOKENS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["BlockGroup", "block_groups", "common_block_tokens", "resume_positions"]

Mask = npt.NDArray[np.bool_]
_FULL = (KVCacheSpecKind.FULL_ATTENTION, KVCacheSpecKind.MLA_ATTENTION)


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """One KV cache group of vLLM. A group without window, chunk and state has full attention.

    - `window` is the number of tokens that a query can read, including its own token.
    - `chunk` is the number of tokens in a chunk of chunked local attention.
    - With `is_state`, a block contains the recurrent state after its last token.
    """

    index: int
    layers: tuple[str, ...]
    block_tokens: int
    window: int = 0
    chunk: int = 0
    kind: str = KVCacheSpecKind.FULL_ATTENTION.value
    is_state: bool = False

    @property
    def is_full(self) -> bool:
        """Whether a token can read all blocks before it."""
        return not self.window and not self.chunk and not self.is_state

    def first_block(self, position: int) -> int:
        """Return the index of the first block that the token at `position` can read. For recurrent states, this is the
        block that ends at `position`.
        """
        if self.is_state:
            return max(0, position // self.block_tokens - 1)
        first = 0
        if self.window:
            first = max(0, position - self.window + 1)
        if self.chunk:
            first = position // self.chunk * self.chunk
        return first // self.block_tokens

    def can_resume(self, start: int, position: int, found: Mask) -> bool:
        """Return whether a prompt can resume at `position`, as far as this group is concerned: all needed blocks must
        exist. vLLM itself has the blocks before token `start`. For each later block, `found` states whether a tier has
        it.
        """
        base = start // self.block_tokens
        first = max(0, self.first_block(position) - base)
        return bool(found[first : position // self.block_tokens - base].all())


def block_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[BlockGroup, ...]:
    """Return the KV cache groups of a model. Raises ValueError with the reason if they cannot be stored."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(
                f"{name} is {getattr(parallel, name)}; kvloom's connector stores whole blocks: use 1"
            )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ValueError(
            "calculate_kv_scales gives every process other scales, so stored pages cannot be used again: "
            "use scales of the checkpoint"
        )
    found = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        kind = get_kv_cache_spec_kind(spec)
        if not group.layer_names:
            raise ValueError(
                f"KV cache group {index} ({kind.value}) has no layer on this stage of the pipeline, so it has no pages: "
                "use a smaller --pipeline-parallel-size"
            )
        window = chunk = 0
        if kind is KVCacheSpecKind.SLIDING_WINDOW:
            window = _window(spec)
        elif kind is KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION:
            chunk = _chunk(spec)
        elif kind is KVCacheSpecKind.MAMBA:
            _check_states(spec, group.layer_names[0])
        elif kind not in _FULL:
            raise ValueError(
                f"layer {group.layer_names[0]} has KV of kind {kind.value}, which kvloom's connector cannot store: "
                "remove the connector"
            )
        if spec.block_size % HASH_TOKENS:
            raise ValueError(
                f"block size {spec.block_size} is not a multiple of {HASH_TOKENS}: use --block-size {HASH_TOKENS}, "
                "or a multiple"
            )
        is_state = kind is KVCacheSpecKind.MAMBA
        names = tuple(group.layer_names)
        found.append(BlockGroup(index, names, spec.block_size, window, chunk, kind.value, is_state))
    if not found:
        raise ValueError("this model has no KV cache, so there is nothing to store: remove the KV connector")
    return tuple(found)


def _window(spec: KVCacheSpec) -> int:
    """Return how many tokens vLLM keeps for a sliding window. With speculation, vLLM may keep more tokens than the
    window has.
    """
    layers = (one for one in iter_layer_specs(spec) if isinstance(one, SlidingWindowSpec))
    return _only({one.sliding_window + one.extra_retained_tokens for one in layers}, "windows")


def _chunk(spec: KVCacheSpec) -> int:
    layers = (one for one in iter_layer_specs(spec) if isinstance(one, ChunkedLocalAttentionSpec))
    return _only({one.attention_chunk_size for one in layers}, "chunks")


def _only(sizes: set[int], name: str) -> int:
    """Return the size that all layers of a group have. Raises ValueError if layers have different sizes."""
    if len(sizes) != 1:
        raise ValueError(
            f"layers of one KV cache group have {name} of {sorted(sizes)} tokens; they must be equal"
        )
    return int(sizes.pop())


def _check_states(spec: KVCacheSpec, layer: str) -> None:
    """Raise ValueError if vLLM does not keep the recurrent states of a group at the ends of blocks."""
    for one in iter_layer_specs(spec):
        assert isinstance(one, MambaSpec)
        if one.mamba_cache_mode != "align":
            raise ValueError(
                f"layer {layer} has a recurrent state, which can be stored only with mamba cache mode 'align', and the "
                f"mode is {one.mamba_cache_mode!r}: use --enable-prefix-caching --mamba-cache-mode align"
            )
        if one.num_speculative_blocks:
            raise ValueError(
                f"layer {layer} has a recurrent state, and draft tokens change it before they are accepted: "
                "remove --speculative-config, or the connector"
            )


def common_block_tokens(groups: Sequence[BlockGroup]) -> int:
    """Return the smallest number of tokens that is a multiple of the block size of every group."""
    return math.lcm(*(group.block_tokens for group in groups))


def resume_positions(groups: Sequence[BlockGroup], start: int, end: int, found: Sequence[Mask]) -> list[int]:
    """Return all positions in (start, end] at which a prompt can resume, in ascending order. `found` states, for each
    group, which of its blocks from token `start` on are stored. O(blocks of full groups + positions * blocks of
    windows).
    """
    step = common_block_tokens(groups)
    for group, mask in zip(groups, found, strict=True):
        if group.is_full:
            stored = len(mask) if mask.all() else int(np.argmin(mask))
            end = min(end, start + stored * group.block_tokens)
    windowed = [(g, mask) for g, mask in zip(groups, found, strict=True) if not g.is_full]
    return [
        position
        for position in range(start + step, end + 1, step)
        if all(group.can_resume(start, position, mask) for group, mask in windowed)
    ]

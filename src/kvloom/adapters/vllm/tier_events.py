"""Block events of tiers in vLLM's format. They report which blocks host memory and disk have stored and removed.

Workers report changes with kvloom's block hashes. Routers use vLLM's own block hashes, so the scheduler publishes
events with vLLM's hashes. To translate, the scheduler remembers both hashes of every block that this process has
stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from .block_groups import BlockGroup
from .messages import Change

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["TierEvents"]

MAX_BLOCKS = 1 << 20
"""Largest number of blocks whose hashes are stored. If there are more, the hashes of the oldest block are dropped, and
the removal of this block is not published.
"""


@dataclass(slots=True)
class _Block:
    """The fields of the events about one block. `media` are the kinds of tiers (as in vLLM's events) that have the
    block now."""

    hash: bytes
    parent: bytes | None
    tokens: list[int]
    lora: str | None
    media: set[str] = field(default_factory=set)


class TierEvents:
    """Creates vLLM's KV cache events (block stored, block removed) when tiers gain or lose blocks. Only layer groups whose
    block size equals vLLM's hash block size have events.
    """

    def __init__(self, groups: Sequence[BlockGroup], hash_tokens: int) -> None:
        self._groups = {group.index: group for group in groups if group.block_tokens == hash_tokens}
        self._blocks: OrderedDict[tuple[int, bytes], _Block] = OrderedDict()
        self._events: list[KVCacheEvent] = []

    def remember(self, group: int, block_hash: bytes, request: Request, index: int) -> None:
        """Store the fields of block `index` of a request for later events about this block. The block will be stored in
        tiers under `block_hash`.
        """
        if group not in self._groups or index >= len(request.block_hashes):
            return
        size = self._groups[group].block_tokens
        lora = request.lora_request
        self._blocks.setdefault(
            (group, block_hash),
            _Block(
                request.block_hashes[index],
                request.block_hashes[index - 1] if index else None,
                list(request.all_token_ids[index * size : (index + 1) * size]),
                lora.lora_name if lora is not None else None,
            ),
        )
        if len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)

    def apply(self, changes: Sequence[Change]) -> None:
        """Turn changes of tiers into events."""
        for change in changes:
            key = (change.group, change.block_hash)
            block = self._blocks.get(key)
            if block is None or (change.medium in block.media) == change.is_stored:
                continue
            name = maybe_convert_block_hash(block.hash)
            if change.is_stored:
                block.media.add(change.medium)
                self._events.append(self._stored(block, change))
                continue
            block.media.discard(change.medium)
            self._events.append(
                BlockRemoved(block_hashes=[name], medium=change.medium, group_idx=change.group)
            )
            if not block.media:
                del self._blocks[key]

    def _stored(self, block: _Block, change: Change) -> BlockStored:
        group = self._groups[change.group]
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(block.hash)],
            parent_block_hash=None if block.parent is None else maybe_convert_block_hash(block.parent),
            token_ids=block.tokens,
            block_size=group.block_tokens,
            lora_id=None,
            medium=change.medium,
            lora_name=block.lora,
            group_idx=change.group,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window or None,
        )

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

"""Stores the parents and tokens of published blocks, so that events of tiers can contain them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvloom.core import HASH_TOKENS, TOKEN_BYTES, BlockRemoved, BlockStored

__all__ = ["BlockTokens"]

MOST_REMOVED = 65536


@dataclass(slots=True)
class _Block:
    parent: bytes
    is_first: bool
    tokens: bytes
    media: int = 0
    """The media (device pool or tiers) that have the block, as a bit mask."""


class BlockTokens:
    """Parents and tokens of all blocks that a worker has in the pool or in a tier. Not thread-safe.

    A block stays here while the pool or a tier has its page of layer group `group`. The last MOST_REMOVED blocks
    without such a page also stay. Such a block may be in transfer: the pool has evicted it, and its tier has not
    reported it yet. Takes about 300 bytes per block.
    """

    def __init__(self, group: int) -> None:
        self._group = group
        self._blocks: dict[bytes, _Block] = {}
        self._bits: dict[str, int] = {}
        self._removed: dict[bytes, None] = {}  # blocks that no medium has, oldest first

    def __len__(self) -> int:
        return len(self._blocks)

    def stored(self, event: BlockStored, is_first: bool) -> list[tuple[BlockStored, bool]]:
        """Return the events to send instead of `event`, each with a flag: True if its first block starts a prompt.
        `is_first` is this flag of `event`.

        An event of the pool contains tokens. They are recorded, and the event is returned unchanged. An event of a tier
        contains neither parent nor tokens. It is split into chains of consecutive blocks, and each chain becomes one
        event with its parent and its tokens. Blocks whose tokens are unknown, such as blocks of a disk tier after a
        restart, stay without tokens."""
        if self._group not in event.groups or event.tail_tokens:
            return [(event, is_first)]
        if event.tokens:
            self._remember(event, is_first)
        bit = self._bits.setdefault(event.medium, 1 << len(self._bits))
        found: list[tuple[BlockStored, bool]] = []
        for block_hash in event.hashes:
            block = self._blocks.get(block_hash)
            if block is not None:
                block.media |= bit
                self._removed.pop(block_hash, None)
            if event.tokens:
                continue
            parent, first, tokens = (
                (block.parent, block.is_first, block.tokens) if block else (b"", True, b"")
            )
            last = found[-1][0] if found else None
            if last is not None and last.hashes[-1] == parent and tokens:
                joined = replace(last, hashes=(*last.hashes, block_hash), tokens=last.tokens + tokens)
                found[-1] = (joined, found[-1][1])
            else:
                found.append((replace(event, parent=parent, hashes=(block_hash,), tokens=tokens), first))
        return found or [(event, is_first)]

    def _remember(self, event: BlockStored, is_first: bool) -> None:
        parent, size = event.parent, HASH_TOKENS * TOKEN_BYTES
        for place, block_hash in enumerate(event.hashes):
            if block_hash not in self._blocks:
                tokens = event.tokens[place * size : (place + 1) * size]
                self._blocks[block_hash] = _Block(parent, is_first and not place, tokens)
            parent = block_hash

    def removed(self, event: BlockRemoved) -> None:
        """Record that a medium no longer has the blocks of `event`. If more than MOST_REMOVED blocks are in no medium,
        drops the oldest of these blocks."""
        if self._group not in event.groups:
            return
        bit = self._bits.get(event.medium, 0)
        for block_hash in event.hashes:
            block = self._blocks.get(block_hash)
            if block is not None:
                block.media &= ~bit
                if not block.media:
                    self._removed[block_hash] = None
        while len(self._removed) > MOST_REMOVED:
            oldest = next(iter(self._removed))
            del self._removed[oldest], self._blocks[oldest]

"""Computes the hashes of nodes on demand, and publishes them in events.

Without listeners no hash is computed. A cache without tiers, peers and routers therefore never computes a block
hash.
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvloom.core.events import BlockRemoved, BlockStored, EventBus
from kvloom.core.layout.pool_layout import HASH_TOKENS, PoolLayout
from kvloom.core.pool import loops

from .block_hash import TOKEN_BYTES, BlockHash, hash_chain, media_hash, tail_hash
from .multimodal import MediaIds
from .node import Checkpoint, Node

__all__ = ["MEDIUM", "EventPublisher"]

MEDIUM = "device"


class EventPublisher:
    """Computes the hashes of nodes, and publishes which blocks were added to and removed from the tree."""

    def __init__(self, layout: PoolLayout, events: EventBus, media_ids: MediaIds) -> None:
        self.block = layout.block_tokens
        self.events = events
        self._media_ids = media_ids
        self.token_groups = tuple(g.index for g in layout.of("token"))
        self.state_groups = tuple(g.index for g in layout.of("state"))
        self.media_groups = tuple(g.index for g in layout.of("media"))
        windowed = [g for g in layout.of("token") if g.spec.visibility.windowed]
        self.window_columns = tuple(g.columns for g in windowed)
        self.window_groups = tuple(g.index for g in windowed)

    @property
    def resolve(self) -> Callable[[int], bytes] | None:
        """A function that maps the id of a media token to the digest of its content. None until the first media token
        gets an id. While the value is None, hashing does not search for media tokens."""
        return self._media_ids.digest_of if self._media_ids.used else None

    def hash_before(self, node: Node) -> bytes:
        """Return the hash of the tokens before `node`, up to the last multiple of HASH_TOKENS."""
        return self._last_hash(node.parent) if node.parent is not None else node.root.hash

    def _last_hash(self, node: Node | None) -> bytes:
        while node is not None and node.parent is not None:
            if self.hashes(node):
                return node.hashes[-1]
            node = node.parent
        assert node is not None
        return node.root.hash

    def hashes(self, node: Node) -> list[bytes]:
        """Return the hashes of all units of HASH_TOKENS tokens whose last token is in `node`. Each hash is computed
        only once."""
        if not self._unhashed_tokens(node):
            return node.hashes
        unhashed = []
        current = node
        while current.parent is not None:  # walks up to the first node that has a hash
            if self._unhashed_tokens(current):
                unhashed.append(current)
            if current.hashes:
                break
            current = current.parent
        for current in reversed(unhashed):
            first = current.start // HASH_TOKENS
            begin = (first + len(current.hashes)) * HASH_TOKENS
            parent = current.hashes[-1] if current.hashes else self.hash_before(current)
            current.hashes += hash_chain(parent, self._text(current, begin, current.end), self.resolve)
        return node.hashes

    @staticmethod
    def _unhashed_tokens(node: Node) -> int:
        return node.end // HASH_TOKENS - node.start // HASH_TOKENS - len(node.hashes)

    def _text_before(self, node: Node, tokens: int) -> bytes:
        text = b""
        current = node.parent
        while current is not None and len(text) < tokens * TOKEN_BYTES:
            text = bytes(current.text) + text
            current = current.parent
        return text[-tokens * TOKEN_BYTES :]

    def _text(self, node: Node, begin: int, end: int) -> bytes:
        """Return the tokens [begin, end) of the path that ends in `node`, as bytes."""
        first, last = max(0, begin - node.start) * TOKEN_BYTES, (end - node.start) * TOKEN_BYTES
        text = bytes(memoryview(node.text)[first:last])
        return text if begin >= node.start else self._text_before(node, node.start - begin) + text

    def _tokens(self, text: bytes) -> bytes:
        """Return the token bytes `text` for an event. In the tree, media tokens have negative ids, which only this
        process can interpret. Here, a checksum of the image's content replaces each of them.
        """
        if not self._media_ids.used or not loops.any_negative(text):
            return text
        ids = np.frombuffer(text, "<i4").copy()
        for media in np.unique(ids[ids < 0]).tolist():
            ids[ids == media] = crc32(self._media_ids.digest_of(media)) & 0x7FFFFFFF
        return ids.tobytes()

    def hash_at(self, node: Node, position: int) -> bytes:
        """Return the hash of the prefix that ends at `position` in `node`."""
        units = position // HASH_TOKENS - node.start // HASH_TOKENS
        parent = self.hashes(node)[units - 1] if units else self.hash_before(node)
        if position % HASH_TOKENS == 0:
            return parent
        text = self._text(node, position // HASH_TOKENS * HASH_TOKENS, position)
        return tail_hash(parent, text, self.resolve)

    def block_hash_at(self, node: Node, position: int) -> bytes:
        """Return the hash of the prefix that ends at `position` in `node`. If blocks have several units of
        HASH_TOKENS tokens, returns a `BlockHash`, which also contains the hashes of the block's units up to
        `position`."""
        end = self.hash_at(node, position)
        if self.block == HASH_TOKENS:
            return end
        units = []
        for before in range((position - 1) // self.block * self.block + HASH_TOKENS, position, HASH_TOKENS):
            current = node
            while current.start > before and current.parent is not None:
                current = current.parent
            units.append(self.hash_at(current, before))
        return BlockHash.of([*units, end])

    def stored(self, node: Node, at: int) -> None:
        """Publish that the tokens of `node` from position `at` on were stored."""
        base = node.start // HASH_TOKENS
        first, last = at // HASH_TOKENS - base, node.end // HASH_TOKENS - base
        if last > first:
            text = self._text(node, (base + first) * HASH_TOKENS, (base + last) * HASH_TOKENS)
            if len(node.hashes) < first:  # the listener is new
                self.hashes(node)
            parent = node.hashes[first - 1] if first else self.hash_before(node)
            if len(node.hashes) < last:
                node.hashes[first:] = hash_chain(parent, text, self.resolve)
            hashes = tuple(node.hashes[first:] if first else node.hashes)
            self.events.emit(
                BlockStored(
                    parent,
                    hashes,
                    self.token_groups,
                    MEDIUM,
                    tokens=self._tokens(text),
                    adapter=node.root.adapter,
                )
            )
        tail = node.end % HASH_TOKENS
        if tail:
            block_hash = self.hash_at(node, node.end)
            parent = self.hash_at(node, node.end - tail) if last else self.hash_before(node)
            text = self._tokens(self._text(node, node.end - tail, node.end))
            groups = self.token_groups
            self.events.emit(
                BlockStored(parent, (block_hash,), groups, MEDIUM, tail, text, node.root.adapter)
            )

    def checkpoint_stored(self, checkpoint: Checkpoint) -> None:
        """Publish that the state snapshot of a checkpoint was stored."""
        node, position = checkpoint.node, checkpoint.position
        block_hash = self.hash_at(node, position)
        before = (position - 1) // HASH_TOKENS * HASH_TOKENS
        parent = self.hash_at(node, before) if before > node.start else self.hash_before(node)
        # A partial block inside a longer node has pages, but a prompt can resume there only with a snapshot.
        groups = self.state_groups + (self.token_groups if position % HASH_TOKENS else ())
        text = self._tokens(self._text(node, before, position))
        tail, adapter = position % HASH_TOKENS, node.root.adapter
        self.events.emit(BlockStored(parent, (block_hash,), groups, MEDIUM, tail, text, adapter))

    def adopted(self, node: Node, missing: npt.NDArray[np.bool_]) -> None:
        """Publish that `node` again has window pages that it lacked before. `missing` marks these pages."""
        for window, columns in enumerate(self.window_columns):
            rows = np.flatnonzero(missing[:, columns.start])
            groups = (self.window_groups[window],)
            for block_hash, parent, end in self._row_hashes(node, rows):
                text = self._tokens(self._text(node, end - HASH_TOKENS, end))
                adapter = node.root.adapter
                self.events.emit(BlockStored(parent, (block_hash,), groups, MEDIUM, 0, text, adapter))

    def window_pages_dropped(self, node: Node, rows: npt.NDArray[np.intp], group: int, reason: str) -> None:
        """Publish that the window pages of `group` were removed from the blocks `rows` of `node`."""
        hashes = tuple(block_hash for block_hash, _, _ in self._row_hashes(node, rows))
        if hashes:
            self.events.emit(BlockRemoved(hashes, (group,), MEDIUM, reason))

    def _row_hashes(self, node: Node, rows: npt.NDArray[np.intp]) -> list[tuple[bytes, bytes, int]]:
        """Return (hash, parent hash, end) for each unit of HASH_TOKENS tokens in some blocks of a node. `rows` are the
        numbers of these blocks. Units whose last token is outside the node are left out.
        """
        hashes = self.hashes(node)
        per_block = self.block // HASH_TOKENS
        skipped = node.start // HASH_TOKENS - node.start // self.block * per_block
        found = []
        for row in rows.tolist():
            for unit in range(row * per_block - skipped, (row + 1) * per_block - skipped):
                if 0 <= unit < len(hashes):
                    parent = hashes[unit - 1] if unit else self.hash_before(node)
                    found.append((hashes[unit], parent, (node.start // HASH_TOKENS + unit + 1) * HASH_TOKENS))
        return found

    def dropped(self, node: Node, end: int, reason: str) -> None:
        """Publish that the tokens of `node` from position `end` on were removed."""
        base = node.start // HASH_TOKENS
        hashes = self.hashes(node)[end // HASH_TOKENS - base :]
        if node.end % HASH_TOKENS:
            hashes = [*hashes, self.hash_at(node, node.end)]
        if hashes:
            self.events.emit(BlockRemoved(tuple(reversed(hashes)), self.token_groups, MEDIUM, reason))

    def media_stored(self, root: bytes, digest: bytes) -> None:
        """Publish that the media run of an image was stored. `root` is the root hash of images, and `digest` identifies
        the image."""
        self.events.emit(BlockStored(root, (media_hash(root, digest),), self.media_groups, MEDIUM))

    def media_dropped(self, root: bytes, digest: bytes, reason: str) -> None:
        """Publish that the media run of an image was removed. `root` and `digest` are those of `media_stored`."""
        self.events.emit(BlockRemoved((media_hash(root, digest),), self.media_groups, MEDIUM, reason))

    def grown(self, node: Node) -> None:
        """Publish that the hash of the partial last block of `node` was removed, because the block grows and gets
        another hash. If there is a checkpoint at the end of the node, the old hash stays valid, and nothing is
        published."""
        if node.end % HASH_TOKENS and all(c.position != node.end for c in node.checkpoints):
            self.events.emit(
                BlockRemoved((self.hash_at(node, node.end),), self.token_groups, MEDIUM, "grown")
            )

    def checkpoint_dropped(self, checkpoint: Checkpoint, reason: str) -> None:
        """Publish that the state snapshot of a checkpoint was removed. If the checkpoint is inside a block, and not
        at the end of its node, the partial block before it is also published as removed. Without the snapshot, no
        prompt can resume there."""
        block_hash = self.hash_at(checkpoint.node, checkpoint.position)
        inner_tail = checkpoint.position % HASH_TOKENS and checkpoint.position != checkpoint.node.end
        groups = self.state_groups + (self.token_groups if inner_tail else ())
        if groups:
            self.events.emit(BlockRemoved((block_hash,), groups, MEDIUM, reason))

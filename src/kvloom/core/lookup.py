"""Looking a prompt up: how far the cache can take it, and why no further.

Reads only; the cache is the same afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .allocator import Allocator
from .layout.pool_layout import HASH_TOKENS
from .pool.page_pool import Ids
from .prefix.block_hash import TOKEN_BYTES, HashIndex, hash_chain, media_hash, tail_hash
from .prefix.multimodal import Media
from .prefix.node import Checkpoint, Node
from .prefix.radix_tree import RadixTree
from .prefix.resume_rule import longest_resume
from .sequences.sequence import CacheControl

__all__ = ["MISS_REASONS", "NOT_CACHED", "Lookup", "Match", "Miss"]

MISS_REASONS = {
    "complete": "everything but the last token is cached; that one must be computed to get logits",
    "never seen": "no earlier request had these tokens here",
    "evicted": "the pages were here and had to leave",
    "other tenant": "another tenant has this prefix; tenants never share pages",
    "snapshot missing": "the tokens match further, but no recurrent state was kept there",
    "window page missing": "the tokens match further, but pages of a sliding or chunked window left",
    "media missing": "the tokens match further, but the pages of an image before that point left",
    "reading off": "the request asked not to read the cache",
}
NOT_CACHED = ("never seen", "evicted")
"""Reasons that say that the pool has nothing of the tokens that come next."""


class Miss(NamedTuple):
    """Where a lookup stopped and why; `when` and `policy` for what was evicted."""

    reason: str
    position: int
    when: float | None = None
    policy: str | None = None

    def __str__(self) -> str:
        detail = f" at {self.when:.3f} s by {self.policy}" if self.when is not None else ""
        return f"stopped at token {self.position}: {self.reason}{detail} ({MISS_REASONS[self.reason]})"


@dataclass(slots=True)
class Match:
    """What a lookup found. It goes stale when the cache changes; `open` looks again if it has."""

    root_hash: bytes
    data: bytes
    length: int
    limit: int
    control: CacheControl
    media: tuple[Media, ...]
    path: list[Node]
    matched: int
    resume: int
    rows: Ids
    checkpoint: Checkpoint | None
    miss: Miss
    version: int


class Lookup:
    def __init__(self, tree: RadixTree, room: Allocator) -> None:
        self.tree = tree
        self.allocator = room

    def find(
        self, root_name: bytes, data: bytes, control: CacheControl, media: Sequence[Media], limit: int
    ) -> Match:
        """The longest resume point of `data` at or below `limit` tokens."""
        tree = self.tree
        root = tree.roots.get(root_name) if control.read else None
        path, matched = ([], 0) if root is None else tree.walk(root, data, limit)
        rows = tree.rows(path, matched)
        resume, reason = matched, ""
        if media and self.allocator.media.width:
            for item in media:
                run = self.allocator.media_runs.get(root_name + item.digest)
                if run is not None and item.tokens not in (0, run.tokens):
                    raise ValueError(f"media {item.digest.hex()} has {run.tokens} tokens, not {item.tokens}")
                if (
                    item.tokens
                    and item.start < resume
                    and run is None
                    and self.allocator.media_outlives_prompt
                ):
                    resume, reason = item.start, "media missing"
        checkpoint = None
        if tree.keeps_checkpoints and resume:
            rows, resume, checkpoint, reason = self._resume(path, resume, rows, reason)
        if not control.read:
            stop = Miss("reading off", 0)
        elif resume < matched:
            stop = Miss(reason, resume)
        else:
            stop = self._end_of_match(root_name, path, matched, data, limit)
        if resume < matched:
            rows = rows[: -(-resume // tree.block)]
        length = len(data) // TOKEN_BYTES
        return Match(
            root_name,
            data,
            length,
            limit,
            control,
            tuple(media),
            path,
            matched,
            resume,
            rows,
            checkpoint,
            stop,
            tree.version,
        )

    def _resume(
        self, path: list[Node], limit: int, rows: Ids, reason: str
    ) -> tuple[Ids, int, Checkpoint | None, str]:
        """The rows, the longest resume point, its checkpoint, and the reason why it is not `limit`."""
        tree = self.tree
        windows = tree.presence(rows)
        found = {c.position: c for c in self._snapshots(path, limit)} if tree.has_states else None
        resume, broken = longest_resume(limit, windows, tree.block, found)
        if resume < limit:
            reason = "window page missing" if broken is not None else reason or "snapshot missing"
            above = path[:-1]
            while (
                above and above[-1].end > resume and (above[-1].end > limit or not above[-1].end % tree.block)
            ):
                above = above[:-1]
            if above and above[-1].end > resume:
                # Where nodes meet inside a block, the upper one's page may be there though the lower's left.
                upper = self._resume(above, above[-1].end, tree.rows(above, above[-1].end), reason)
                if upper[1] > resume:
                    return upper
        return rows, resume, found.get(resume) if found else None, reason

    @staticmethod
    def _snapshots(path: list[Node], limit: int) -> Iterator[Checkpoint]:
        for node in reversed(path):
            for checkpoint in reversed(node.checkpoints):
                if checkpoint.position <= limit:
                    yield checkpoint

    def _end_of_match(
        self, root_name: bytes, path: list[Node], matched: int, data: bytes, limit: int
    ) -> Miss:
        if matched == limit:
            return Miss("complete", matched)
        if not path or path[-1].end == matched:
            place = path[-1].serial if path else root_name
            ghost = self.allocator.ghosts.find(place, data, matched * TOKEN_BYTES)
            if ghost is not None:
                return Miss("evicted", matched, ghost.when, ghost.why)
        return Miss("never seen", matched)

    def explain(self, match: Match, across_tenants: bool = True) -> Miss:
        """The match's stop, looking at other tenants' prefixes too. For the operator: it tells that
        another tenant has the same prompt. O(tenants)."""
        if across_tenants and match.miss.reason in NOT_CACHED:
            for name, root in self.tree.roots.items():
                if name != match.root_hash:
                    _, matched = self.tree.walk(root, match.data, match.limit)
                    if matched > max(match.matched, self.tree.block - 1):
                        return Miss("other tenant", match.resume)
        return match.miss

    # -- beyond what this process has -----------------------------------------------------------

    def block_hashes(self, match: Match) -> list[bytes]:
        """The names of all whole grains of the prompt; those that the tree knows are not hashed again."""
        teller = self.tree.publisher
        known: list[bytes] = []
        for node in match.path:
            if node.end <= match.matched:
                known += teller.hashes(node)
        parent = known[-1] if known else match.root_hash
        return known + hash_chain(
            parent, match.data[len(known) * HASH_TOKENS * TOKEN_BYTES :], teller.resolve
        )

    def hash_at(self, match: Match, end: int) -> bytes:
        """The name of the prompt's first `end` tokens: whole grains, all that the tree has of the prompt among them."""
        teller, known = self.tree.publisher, match.matched // HASH_TOKENS * HASH_TOKENS
        parent = teller.hash_at(match.path[-1], known) if match.path else match.root_hash
        more = hash_chain(parent, match.data[known * TOKEN_BYTES : end * TOKEN_BYTES], teller.resolve)
        return more[-1] if more else parent

    def resumable_with(self, match: Match, index: HashIndex) -> int:
        """The longest resume point that the pages in `index` give this prompt."""

        def tail(parent: bytes, start: int, length: int) -> bytes:
            text = match.data[start * TOKEN_BYTES : (start + length) * TOKEN_BYTES]
            return tail_hash(parent, text, self.tree.publisher.resolve)

        limit = match.limit
        for item in match.media:
            if (
                item.tokens
                and self.allocator.media.width
                and self.allocator.media_outlives_prompt
                and item.start < limit
            ):
                if media_hash(match.root_hash, item.digest) not in index:
                    limit = item.start
        return index.match(self.block_hashes(match), limit, root=match.root_hash, tail=tail)

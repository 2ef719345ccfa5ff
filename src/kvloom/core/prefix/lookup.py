"""Lookup finds the longest resumable prefix of a prompt, and the reason why the prefix is not longer. Does not modify
the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvloom.core.control import CacheControl
from kvloom.core.layout.pool_layout import HASH_TOKENS
from kvloom.core.pool.page_pool import Ids

from .block_hash import TOKEN_BYTES, hash_chain, media_hash, tail_hash
from .ghosts import Ghosts
from .hash_index import HashIndex
from .media_cache import MediaCache
from .multimodal import Media
from .node import Checkpoint, Node
from .radix_tree import RadixTree
from .resume_rule import longest_resume

__all__ = ["MISS_REASONS", "NOT_CACHED", "Lookup", "Match", "Miss", "Prefix"]

MISS_REASONS = {
    "complete": "everything but the last token is cached; the last token is computed to get logits",
    "never seen": "no earlier request computed these tokens",
    "evicted": "the pages were cached and evicted",
    "other tenant": "only another tenant has the first block; tenants never share pages",
    "snapshot missing": "the tokens match further, but no recurrent state was cached there",
    "window page missing": "the tokens match further, but pages of a sliding or chunked window were evicted",
    "media missing": "the tokens match further, but the pages of an image before that position were evicted",
    "reading off": "the request disabled reading the cache",
}
"""All miss reasons, with explanations."""
NOT_CACHED = ("never seen", "evicted")
"""Miss reasons that mean that the pool does not have the next tokens of the prompt."""


class Miss(NamedTuple):
    """Where a lookup ended (`position`), and why (`reason`). If the next pages were evicted, `when` is the time of the
    eviction and `policy` the name of the policy.

    `matched` is 0 except in the miss of a load plan (`LoadPlan.miss`). In that case, tiers have full-attention pages up
    to the later position `matched`, but the prompt cannot resume at that position.
    """

    reason: str
    position: int
    when: float | None = None
    policy: str | None = None
    matched: int = 0

    def __str__(self) -> str:
        detail = f" at {self.when:.3f} s by {self.policy}" if self.when is not None else ""
        return f"stopped at token {self.position}: {self.reason}{detail} ({MISS_REASONS[self.reason]})"


class Prefix(NamedTuple):
    """How the blocks of a prompt are hashed.

    - `root` is the parent of the first block hash.
    - `media_root` is the root hash of the tenant, under which images are cached.
    - `public` is the number of tokens of the public prefix.
    - `media` contains the images of the prompt, and its marks. A mark replaces one token in the block hashes. Hashes
      from this token on depend on the tenant (after a public prefix) or on an activated LoRA.
    """

    root: bytes
    media_root: bytes
    public: int
    media: tuple[Media, ...]


@dataclass(slots=True)
class Match:
    """The result of a lookup. It becomes stale when the tree changes, and `open` then repeats the lookup.

    | tokens       | meaning                                           |
    |--------------|---------------------------------------------------|
    | [0, resume)  | the hit: need not be computed                     |
    | [0, matched) | are in the tree, but some pages may be missing    |
    | [0, limit)   | were looked up                                    |
    | [0, length)  | the prompt                                        |
    | [0, public)  | a public prefix                                   |
    """

    root_hash: bytes
    media_root: bytes
    public: int
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
    """Looks up prompts in one tree. The time of a lookup grows with the number of nodes passed and of bytes compared."""

    def __init__(self, tree: RadixTree, media: MediaCache, ghosts: Ghosts) -> None:
        self._tree = tree
        self._media = media
        self._ghosts = ghosts

    def find(self, prefix: Prefix, data: bytes, control: CacheControl, limit: int) -> Match:
        """Look up the prompt `data` (token ids as bytes) under the root hash of `prefix`, and return the match. The
        match is at most `limit` tokens long."""
        tree = self._tree
        root_hash, media_root, public, media = prefix
        root = tree.roots.get(root_hash) if control.read else None
        path, matched = ([], 0) if root is None else tree.walk(root, data, limit)
        rows = tree.rows(path, matched)
        resume, reason = matched, ""
        if media and self._media.pages.width:
            for item in media:
                run = self._media.get(media_root + item.digest)
                if run is not None and item.tokens not in (0, run.tokens):
                    raise ValueError(f"media {item.digest.hex()} has {run.tokens} tokens, not {item.tokens}")
                if item.tokens and item.start < resume and run is None and self._media.outlives_prompt:
                    resume, reason = item.start, "media missing"
        checkpoint = None
        if tree.needs_checkpoints and resume:
            rows, resume, checkpoint, reason = self._resume(path, resume, rows, reason)
        if not control.read:
            miss = Miss("reading off", 0)
        elif resume < matched:
            miss = Miss(reason, resume)
        else:
            miss = self._end_of_match(root_hash, path, matched, data, limit)
        if resume < matched:
            rows = rows[: -(-resume // tree.block)]
        length = len(data) // TOKEN_BYTES
        return Match(
            root_hash,
            media_root,
            public,
            data,
            length,
            limit,
            control,
            media,
            path,
            matched,
            resume,
            rows,
            checkpoint,
            miss,
            tree.version,
        )

    def refreshed(self, match: Match) -> Match:
        """Return `match` if the tree has not changed since the lookup, else the result of a new lookup."""
        if match.version == self._tree.version:
            return match
        prefix = Prefix(match.root_hash, match.media_root, match.public, match.media)
        return self.find(prefix, match.data, match.control, match.limit)

    def rows(self, match: Match) -> Ids:
        """Return the page ids of all matched tokens, one row per block."""
        return self._tree.rows(match.path, match.matched)

    def _resume(
        self, path: list[Node], limit: int, rows: Ids, reason: str
    ) -> tuple[Ids, int, Checkpoint | None, str]:
        """Return four values: the page ids of the blocks, the longest resumable length, the checkpoint at this
        length, and the reason why the length is below `limit`. If the model has no states, the checkpoint is None."""
        tree = self._tree
        windows = tree.presence(rows)
        found = {c.position: c for c in self._checkpoints(path, limit)} if tree.has_states else None
        resume, broken = longest_resume(limit, windows, tree.block, found)
        if resume < limit:
            reason = "window page missing" if broken is not None else reason or "snapshot missing"
            above = path[:-1]
            while (
                above and above[-1].end > resume and (above[-1].end > limit or not above[-1].end % tree.block)
            ):
                above = above[:-1]
            if above and above[-1].end > resume:
                # If two nodes share a block, the upper node may still have a page that the lower node has lost.
                upper = self._resume(above, above[-1].end, tree.rows(above, above[-1].end), reason)
                if upper[1] > resume:
                    return upper
        return rows, resume, found.get(resume) if found else None, reason

    @staticmethod
    def _checkpoints(path: list[Node], limit: int) -> Iterator[Checkpoint]:
        for node in reversed(path):
            for checkpoint in reversed(node.checkpoints):
                if checkpoint.position <= limit:
                    yield checkpoint

    def base_of(self, match: Match) -> int:
        """Return the longest length at which a prompt could resume without periodic snapshots. O(checkpoints passed)."""
        found = (c.position for c in self._checkpoints(match.path, match.matched) if not c.is_periodic)
        return min(match.resume, next(found, 0))

    def _end_of_match(
        self, root_hash: bytes, path: list[Node], matched: int, data: bytes, limit: int
    ) -> Miss:
        if matched == limit:
            return Miss("complete", matched)
        if not path or path[-1].end == matched:
            place = path[-1].serial if path else root_hash
            ghost = self._ghosts.find(place, data, matched * TOKEN_BYTES)
            if ghost is not None:
                return Miss("evicted", matched, ghost.when, ghost.reason)
        return Miss("never seen", matched)

    def explain(self, match: Match, across_tenants: bool = True) -> Miss:
        """Return the miss. With `across_tenants`, the reason is "other tenant" if the match is shorter than a block, and
        the tree has the first block of the prompt under another root hash. O(roots). Only for operators, because the
        result reveals prompts of other tenants.

        Only the first block is compared. Otherwise the time would reveal how much of the prompt another tenant has
        sent."""
        block = self._tree.block
        if across_tenants and match.miss.reason in NOT_CACHED and match.matched < block <= match.limit:
            for root_hash, root in self._tree.roots.items():
                if root_hash != match.root_hash and self._tree.walk(root, match.data, block)[1] == block:
                    return Miss("other tenant", match.resume)
        return match.miss

    # -- hashes for tiers, peers and routers ----------------------------------------------------

    def block_hashes(self, match: Match) -> list[bytes]:
        """Return the block hashes of the prompt, one for each HASH_TOKENS tokens. Hashes that the tree stores are not
        computed again.
        """
        publisher = self._tree.publisher
        known: list[bytes] = []
        for node in match.path:
            if node.end <= match.matched:
                known += publisher.hashes(node)
        parent = known[-1] if known else match.root_hash
        return known + hash_chain(
            parent, match.data[len(known) * HASH_TOKENS * TOKEN_BYTES :], publisher.resolve
        )

    def hash_at(self, match: Match, end: int) -> bytes:
        """Return the hash of the prompt's first `end` tokens. `end` must be a multiple of HASH_TOKENS and after the
        matched tokens.
        """
        publisher, known = self._tree.publisher, match.matched // HASH_TOKENS * HASH_TOKENS
        parent = publisher.hash_at(match.path[-1], known) if match.path else match.root_hash
        more = hash_chain(parent, match.data[known * TOKEN_BYTES : end * TOKEN_BYTES], publisher.resolve)
        return more[-1] if more else parent

    def tail_hash(self, match: Match, parent: bytes, start: int, stop: int) -> bytes:
        """Return the hash of the prompt's tokens [start, stop), which follow the block with the hash `parent`. These
        must be fewer than HASH_TOKENS tokens."""
        text = match.data[start * TOKEN_BYTES : stop * TOKEN_BYTES]
        return tail_hash(parent, text, self._tree.publisher.resolve)

    def media_limit(self, match: Match, has_run: Callable[[Media], bool]) -> int:
        """Return the number of tokens before the first image whose media run (its pages) is needed but not
        available. The result is at most `match.limit`. `has_run` returns whether the media run of an image is
        available."""
        limit = match.limit
        if self._media.pages.width and self._media.outlives_prompt:
            for item in match.media:
                if item.tokens and item.start < limit and not has_run(item):
                    limit = item.start
        return limit

    def cached_media_limit(self, match: Match) -> int:
        """Return the number of tokens before the first image whose media run (its pages) is needed but not cached.
        The result is at most `match.limit`."""
        return self.media_limit(match, lambda item: match.media_root + item.digest in self._media)

    def resumable_with(self, match: Match, index: HashIndex[bytes]) -> int:
        """Return the length at which the prompt could resume with only the pages in `index`. Cached pages of the pool
        do not count."""

        def tail(parent: bytes, start: int, length: int) -> bytes:
            return self.tail_hash(match, parent, start, start + length)

        limit = self.media_limit(match, lambda item: media_hash(match.media_root, item.digest) in index)
        return index.match(self.block_hashes(match), limit, root=match.root_hash, tail=tail)

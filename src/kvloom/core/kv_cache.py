"""KVCache: the interface that a scheduler calls. Its main calls are match, open, extend, commit, rollback, fork and
close.

One cache serves every layer kind. The cache moves no bytes: `take_copies` returns the page copies that the engine must
make before the next step. `loading` is the interface of the offload manager, `cold` has the blocks of running sequences
that are in host memory, and `inspect` has the counters and the pool map.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping, Sequence as Many
from typing import Any

import numpy as np
import numpy.typing as npt

from .clock import Clock, WallClock
from .control import CacheControl, CheckpointPolicy
from .eviction import DEFAULT_POLICY, Account, Policy, SavablePolicy, Tenant
from .inspect import Inspector, cache_stats, check_integrity
from .layout import HASH_TOKENS, PoolLayout
from .loading import Loading
from .pool import CopyBatch, Ids, Rows
from .prefix import (
    TOKEN_BYTES,
    BlockHash,
    HashIndex,
    Match,
    Media,
    Miss,
    Pin,
    Prefix,
    QueuedPrefix,
    SnapshotInterval,
    hash_chain,
    private_mark,
    public_length,
    public_root_hash,
    root_hash,
    tail_hash,
    token_bytes,
)
from .sequences import (
    ColdBlocks,
    Sequence,
    checkpoint as take_checkpoint,
    close_sequence,
    commit,
    commit_many,
    exceeds_quota,
    extend,
    extend_many,
    fork,
    open_sequence,
    rollback,
)
from .state import CacheState

__all__ = ["KVCache"]

_DEFAULT = CacheControl()
_MOST_PREFIXES = 4096


class KVCache:
    """The KV cache of one engine. Not thread-safe: one scheduler calls it.

    - `slabs` is the number of slabs in the pool, and `reserved` the number to which it can grow. Both include slab 0,
      which is never used.
    - `model` identifies the model in block hashes.
    - `max_sequences` sequences of `max_tokens` tokens each can be open at the same time. The block tables reserve
      address space for all of them, but use memory only for open sequences.
    - `public_bytes` limits the pages of public prefixes (`CacheControl.public_tokens`). If it is 0, public prefixes are
      refused.
    """

    def __init__(
        self,
        layout: PoolLayout,
        slabs: int,
        *,
        reserved: int | None = None,
        model: str = "",
        policy: str | Policy = DEFAULT_POLICY,
        max_sequences: int = 256,
        max_tokens: int = 131072,
        tenants: Iterable[Tenant] = (),
        public_bytes: int = 0,
        checkpoint_policy: CheckpointPolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock: Clock = clock or WallClock()
        self.state = state = CacheState(
            layout,
            slabs,
            reserved,
            policy,
            max_sequences,
            max_tokens,
            tenants,
            public_bytes,
            checkpoint_policy or CheckpointPolicy(),
            self.clock,
        )
        """The components; for tests and for code inside `kvloom.core`."""
        self.layout = layout
        self.block_tokens = layout.block_tokens
        self.model = model
        self.max_tokens = max_tokens
        self.events = state.events
        self.block_tables = state.block_tables
        """Page ids and lengths of all sequences, as arrays. Read-only outside `kvloom.core`."""
        self.page_tables = state.block_tables.tables
        """Page ids, indexed [column, row, block]. A row number stands for an open sequence. Each block of a sequence
        owns one page per column."""
        self.state_pages = state.block_tables.states
        """Page ids of the live states, indexed [column, row]. A row number stands for an open sequence."""
        self.lengths = state.block_tables.length
        """Number of computed tokens of each open sequence, by row number."""
        self.reserved_blocks = state.block_tables.blocks
        """Number of reserved blocks of each open sequence, by row number."""
        self.has_states = state.has_states
        self.needs_checkpoints = state.tree.needs_checkpoints
        """Whether the model has windows or states, so that prompts can resume only at checkpoints."""
        self.media_outlives_prompt = state.media_cache.outlives_prompt
        """Whether tokens after an image still read the pages of the image (cross attention)."""
        self.block_bytes = state.pages.row_bytes
        """Bytes of one block: one page of each token group."""
        self.class_of = state.pool.class_of
        """Size class of each group. Groups with equal page sizes share a size class."""
        self.loading = Loading(state)
        self.cold = ColdBlocks(state)
        self.inspect = Inspector(state)
        self._private_prefixes: dict[tuple[str, str, str, bool], Prefix] = {}

    # -- lookup ---------------------------------------------------------------------------------

    def root_hash(self, control: CacheControl) -> bytes:
        """Return the root of a request's private block hashes. The root depends on model, tenant, adapter and salt.
        Lossy requests have a separate root. Does not depend on `control.public_tokens`.
        """
        return self._private_prefix(control).root

    def _private_prefix(self, control: CacheControl) -> Prefix:
        """Return how blocks are hashed in a prompt without images and without a public prefix."""
        key = (control.tenant, control.adapter, control.salt, control.lossy)
        found = self._private_prefixes.get(key)
        if found is None:
            if len(self._private_prefixes) > _MOST_PREFIXES:
                self._private_prefixes.clear()
            model = f"{self.model}, near" if control.lossy else self.model
            root = root_hash(model, control.tenant, control.adapter, control.salt)
            found = self._private_prefixes[key] = Prefix(root, root, 0, ())
        return found

    def public_length(self, control: CacheControl, length: int, media: Many[Media] = ()) -> int:
        """Return how many tokens of a prompt of `length` tokens are a public prefix. Raises ValueError if the request
        marks a public prefix, and this cache has no memory for public prefixes."""
        if not control.public_tokens:
            return 0
        if not self.state.accounts.public_bytes:
            raise ValueError(
                f"a public prefix of {control.public_tokens} tokens, but public prefixes are off: "
                "set public_bytes (--public-prefixes SIZE)"
            )
        return public_length(control.public_tokens, length, self.block_tokens, media)

    def _prefix(self, data: bytes, control: CacheControl, media: Many[Media]) -> Prefix:
        """Return how the blocks of a prompt (token ids as bytes) are hashed: the root hash, the root hash of images,
        the number of public tokens, and the images. If the prompt has a public prefix, the images are followed by the
        mark of the first private token (`private_mark`)."""
        private = self._private_prefix(control)
        if not control.public_tokens and not media:
            return private
        root, public = private.root, self.public_length(control, len(data) // TOKEN_BYTES, media)
        if not public:
            return private._replace(media=tuple(media))
        model = f"{self.model}, near" if control.lossy else self.model
        mark = private_mark(public, int(np.frombuffer(data, np.int32)[public]), root)
        return Prefix(public_root_hash(model, control.adapter), root, public, (*media, mark))

    def match(
        self, tokens: npt.ArrayLike, control: CacheControl | None = None, media: Many[Media] = ()
    ) -> Match:
        """Return the longest resumable prefix of a prompt. The prefix never contains the last token, which must be
        computed. Does not modify the cache and computes no hash. The time grows with the number of nodes passed and of
        bytes compared.
        """
        return self._match(tokens, control or _DEFAULT, media, leave_last=True)

    def _match(
        self, tokens: npt.ArrayLike, control: CacheControl, media: Many[Media], leave_last: bool
    ) -> Match:
        data = token_bytes(tokens)
        length = len(data) // TOKEN_BYTES
        prefix = self._prefix(data, control, media)
        if prefix.media:
            data = self.state.media_ids.place(np.frombuffer(data, np.int32), prefix.media).tobytes()
        if length > self.max_tokens:
            raise ValueError(f"a prompt of {length} tokens exceeds max_tokens {self.max_tokens}")
        limit = max(0, length - 1) if leave_last else length
        return self.state.lookup.find(prefix, data, control, limit)

    def has_media(self, match: Match, item: Media) -> bool:
        """Return whether the pool has the pages of the image `item`. Only pages that were cached under the root hash of
        `match` count."""
        return match.media_root + item.digest in self.state.media_cache

    def explain(self, match: Match, across_tenants: bool = True) -> Miss:
        """Return the reason why the hit is not longer. With `across_tenants`, the first block of the prompt is also
        searched among the prompts of other tenants. Show the result of such a search only to operators, because it
        reveals prompts of other tenants. Does not modify the cache. O(root hashes in the cache)."""
        return self.state.lookup.explain(match, across_tenants)

    def resumable_with(self, match: Match, index: HashIndex[bytes]) -> int:
        """Return the length at which the prompt could resume with only the pages in `index`. Cached pages of the pool
        do not count. Hashes the prompt."""
        return self.state.lookup.resumable_with(match, index)

    @property
    def version(self) -> int:
        """A number that increases with every change of the tree that may make earlier matches stale."""
        return self.state.tree.version

    @property
    def roots(self) -> KeysView[bytes]:
        """The root hashes that have cached prefixes or open sequences, as a live view."""
        return self.state.tree.roots.keys()

    # -- sequences ------------------------------------------------------------------------------

    def open(self, match: Match, is_counted: bool = True) -> Sequence:
        """Open a sequence that starts with the matched pages, and retain these pages. Repeats the lookup if the cache
        has changed. Raises RuntimeError if `max_sequences` sequences are already open. Allocates no pages, so call
        `extend` next. With `is_counted=False`, the counters of lookups and hits ignore the sequence. Use this for a
        sequence that serves another request.
        """
        state = self.state
        match = state.lookup.refreshed(match)
        seq = open_sequence(state, self, match, is_counted)
        if is_counted:
            state.counts.opened(match)
            seq.owners.account.count_lookup(match.length, match.resume)
        return seq

    def extend(self, seq: Sequence, n: int) -> int:
        """Reserve pages for `n` more tokens, and evict pages by policy if needed. Return the number of missing
        pages, or 0 on success. If pages are missing, nothing is reserved."""
        return extend(self.state, seq, n)

    def extend_many(self, rows: Rows, n: int | Rows = 1) -> int:
        """Reserve pages for `n` more tokens in each of many open sequences. `rows` contains the row numbers of the
        sequences. `n` is one number, or an array with one number for each sequence. Return the number of missing
        pages, or 0 on success. If pages are missing, usually no sequence is extended, but with several tenants some may
        be. The time of the call grows with the number of sequences that need a new block."""
        return extend_many(self.state, rows, n)

    def exceeds_quota(self, seq: Sequence, n: int) -> bool:
        """Return whether `n` more tokens would exceed the tenant's quota even if all its cached pages were evicted.
        In this case a sequence of the tenant must be closed first.
        """
        return exceeds_quota(self.state, seq, n)

    def commit(self, seq: Sequence, tokens: npt.ArrayLike, state_length: int | None = None) -> None:
        """Append computed tokens. The caller must already have written the pages of these tokens. Full blocks are
        published, so that other prompts can hit them.

        `state_length` is the number of tokens that the live states cover. None means all tokens. After a step that
        verifies a draft, the number is smaller, because such a step does not change the states. The next step then
        computes the accepted tokens again in the recurrent layers.
        """
        commit(self.state, seq, tokens, state_length)

    def commit_many(self, rows: Rows, tokens: npt.ArrayLike) -> None:
        """Commit one token for each of several open sequences. `rows` contains their row numbers in the block tables
        (`Sequence.row`), each at most once. `tokens` has one token id per row. The time of the call grows with the
        number of sequences that fill a block."""
        commit_many(self.state, rows, tokens)

    def checkpoint(self, seq: Sequence, position: int | None = None) -> bool:
        """Take a checkpoint at `position`, or at the current end. If `position` is after the current end, the
        checkpoint is taken when the sequence reaches `position`. In models with states, a checkpoint before the current
        end is not possible. Return False if the checkpoint is impossible or useless, or if the pool has no pages for
        the states."""
        return take_checkpoint(self.state, seq, position)

    def rollback(self, seq: Sequence, n: int) -> int:
        """Discard the last `n` computed tokens and all reserved pages. Return the new length.

        If states or windows can resume only at an earlier position, more than `n` tokens are discarded. The caller
        then computes the additional tokens again.
        """
        return rollback(self.state, seq, n)

    def fork(self, seq: Sequence) -> Sequence | None:
        """Return a second sequence with the same tokens, or None if the pool has no pages for its states. Both
        sequences share their pages. A partial block is copied before either sequence writes to it.
        """
        return fork(self.state, seq)

    def close(self, seq: Sequence) -> None:
        """Close a sequence. Its published pages stay cached and can be evicted. Its other pages become free."""
        close_sequence(self.state, seq)

    def block_hashes(
        self,
        tokens: npt.ArrayLike,
        control: CacheControl,
        media: Many[Media] = (),
        first: int = 0,
        end: int | None = None,
        parent: bytes | None = None,
    ) -> list[bytes]:
        """Return the hashes of the blocks of a prompt, from block `first` to token `end`. The last block may be
        partial. A state snapshot at `end` has the same hash as the last block. O(tokens).

        `parent` is the hash of the block before `first`. None means the root hash, which is correct only for block 0.
        """
        prompt = token_bytes(tokens)
        prefix = self._prefix(prompt, control, media)
        ids = self.state.media_ids.place(np.frombuffer(prompt, np.int32), prefix.media)
        data, resolve = ids[first * self.block_tokens : end].tobytes(), self.state.media_ids.digest_of
        parent = parent or prefix.root
        units = hash_chain(parent, data, resolve)
        rest = data[len(units) * HASH_TOKENS * TOKEN_BYTES :]
        if rest:
            units.append(tail_hash(units[-1] if units else parent, rest, resolve))
        each = self.block_tokens // HASH_TOKENS
        return [BlockHash.of(units[i : i + each]) for i in range(0, len(units), each)]

    # -- retention ------------------------------------------------------------------------------

    def pin(
        self, tokens: npt.ArrayLike, ttl: float, control: CacheControl | None = None, media: Many[Media] = ()
    ) -> Pin:
        """Retain the cached prefix of a prompt for `ttl` seconds. Return the pin. `Pin.length` is the length of the
        prefix in tokens."""
        if ttl <= 0:
            raise ValueError(f"ttl {ttl} is not positive; give seconds")
        match = self._match(tokens, control or _DEFAULT, media, leave_last=False)
        return self.state.pins.pin(match, self.state.owners(match.control, match.public), ttl)

    def unpin(self, pin: Pin) -> None:
        """End a pin early. A second call has no effect."""
        self.state.pins.unpin(pin)

    def release_expired(self) -> None:
        """End expired pins. The cache also does this when pages are missing."""
        self.state.pins.release_expired()

    def protect_queued(self, match: Match, turn: tuple[int, int]) -> QueuedPrefix:
        """Protect the cached prefix of a waiting request until `unprotect`. Among entries with the same
        `Entry.retention_priority`, protected entries are evicted last. `turn` is the sort key of the request in the
        waiting queue. Among protected prefixes, the prefix of the request that will run last is evicted first."""
        return self.state.pins.protect_queued(match, turn)

    def unprotect(self, queued: QueuedPrefix) -> None:
        """End `protect_queued`. A second call has no effect."""
        self.state.pins.unprotect(queued)

    def end_session(self, session: str) -> int:
        """Mark the blocks that only this session used, so that they are evicted first. Return the number of tokens in
        these blocks. Call this method when the session has ended."""
        return self.state.pins.end_session(session)

    # -- pages ----------------------------------------------------------------------------------

    def table(self, group: int) -> Ids:
        """Return the block tables of one token group, indexed [run, row, block]. A run is the set of layers that
        share a page, so a block owns one page per run. A row number stands for an open sequence. The result is a
        view that always shows the current page ids."""
        groups = self.layout.groups
        if not 0 <= group < len(groups) or groups[group] not in self.layout.of("token"):
            raise KeyError(f"{group} is not a token group; the layout has {[g.name for g in groups]}")
        return self.block_tables.tables[groups[group].columns]

    def take_changed(self, rows: npt.NDArray[np.int64]) -> Ids:
        """For each sequence in `rows` (row numbers), return the number of the first block whose page ids changed since
        the last call. If no block changed, return the sequence's number of reserved blocks."""
        return self.block_tables.take_changed(rows)

    def take_copies(self) -> list[CopyBatch]:
        """Return the page copies that the engine must make, in order, before the next step. Call this method once per
        step."""
        return self.state.copies.take()

    def free_pages(self, tokens: int, tenant: str = "") -> int:
        """Evict by policy until the pool has pages for `tokens` tokens of a tenant. Return the number of missing
        pages, or 0 on success."""
        state = self.state
        needs = state.pages.needs(-(-tokens // self.block_tokens))
        return state.allocator.free_pages(state.accounts[tenant], needs)

    @property
    def checkpoint_policy(self) -> CheckpointPolicy:
        """When sequences take checkpoints now."""
        return self.state.checkpoint_policy

    @property
    def snapshot_interval(self) -> SnapshotInterval | None:
        """Chooses the tokens between state snapshots. None for models without states."""
        return self.state.snapshot_interval

    @property
    def usable_slabs(self) -> int:
        """Number of slabs in the pool, without slab 0."""
        return self.state.pool.slabs - 1

    @property
    def free_slabs(self) -> int:
        """Number of slabs that have neither pages in use nor cached pages."""
        return self.state.pool.free_slabs

    def account(self, tenant: str) -> Account:
        """Return the account of a tenant. Undeclared tenants share one account. Do not modify the account."""
        return self.state.accounts[tenant]

    def reachable_bytes(self, account: Account) -> int:
        """Return how many bytes are free, or can be evicted for the tenant of `account`. O(tenants)."""
        return self.state.allocator.reachable(account)

    def unbacked_slabs(self, n: int) -> Ids:
        """Return the numbers of `n` slabs without memory. The caller allocates memory for them, then calls `grow`.
        Does not modify the cache. O(reserved).
        """
        return self.state.pool.unbacked_slabs(n)

    def grow(self, slabs: Iterable[int]) -> None:
        """Add slabs whose memory the caller has allocated. The memory may have any content. Recomputes the shares of
        tenants."""
        state = self.state
        state.pool.grow(slabs)
        state.accounts.set_pool_bytes(self.usable_slabs * self.layout.slab_bytes)

    def shrink(self, n: int) -> Ids:
        """Remove up to `n` slabs and return their numbers. Evicts and compacts as needed. Recomputes the shares of
        tenants.

        Return fewer slabs if pages are in use or copies are pending. A slab with a pending copy can be removed after
        `take_copies`. The caller may free the memory only after every earlier copy and step is done.
        """
        return self.state.allocator.shrink(n)

    # -- restarts -------------------------------------------------------------------------------

    def save_policy(self) -> dict[str, Any] | None:
        """Return what the eviction policy has learned, as numbers, strings, bytes, lists and dicts. Return None if the
        policy does not learn."""
        policy = self.state.accounts.policy
        return policy.save(self.clock.now()) if isinstance(policy, SavablePolicy) else None

    def restore_policy(self, saved: Mapping[str, Any]) -> None:
        """Let the eviction policy continue with the result of `save_policy` of another cache. Has no effect if the
        policy does not learn. Raises ValueError for damaged data, and then changes nothing."""
        policy = self.state.accounts.policy
        if isinstance(policy, SavablePolicy):
            policy.restore(saved, self.clock.now())

    # -- inspection -----------------------------------------------------------------------------

    def check(self) -> None:
        """Count every page again and compare with the cache's own counts. Raises AssertionError at the first
        difference. O(pool), so only for tests and idle time."""
        check_integrity(self.state)

    def stats(self) -> dict[str, float | int | dict[str, int]]:
        """Return the main counters. O(size classes)."""
        return cache_stats(self.state)

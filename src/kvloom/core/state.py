"""The state of one cache: its components, and the helpers that sequences, loads and inspection share.

    layout ── pool ── block tables          pages in slabs, page ids per sequence
              │
    tree, media cache, ghosts, lookup       cached prefixes
              │
    accounts, pins, pages in transfer, compaction ── allocator

`CacheState` creates the components in the order of their dependencies. No component is replaced later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from .allocator import Allocator
from .clock import Clock
from .control import PUBLIC_TENANT, CacheControl, CheckpointPolicy
from .events import EventBus
from .eviction.adaptive import Adaptive
from .eviction.policies import Policy
from .eviction.registry import make_policy
from .eviction.tenants import Account, Accounts, Tenant
from .layout.layer_spec import PROMPT
from .layout.pool_layout import PoolLayout
from .pool.block_pages import BlockPages
from .pool.block_tables import BlockTables
from .pool.compaction import Compaction
from .pool.page_pool import Ids, PagePool
from .pool.pending_copies import PendingCopies
from .prefix.ghosts import Ghosts
from .prefix.in_transfer import PagesInTransfer
from .prefix.lookup import Lookup, Match
from .prefix.lookup_counts import LookupCounts
from .prefix.media_cache import MediaCache
from .prefix.multimodal import MediaIds
from .prefix.owners import BlockOwners
from .prefix.pins import Pins
from .prefix.publisher import EventPublisher
from .prefix.radix_tree import RadixTree
from .prefix.snapshot_interval import SnapshotInterval

__all__ = ["CacheState"]

FULL_SHARE = 32
"""The pool counts as full if less than 1 / FULL_SHARE of its slabs are free."""


class CacheState:
    """The components of one cache. `KVCache` owns this object. The functions of `sequences` and `loading` modify
    it."""

    __slots__ = (
        "_private_owners",
        "accounts",
        "allocator",
        "block_tables",
        "block_tokens",
        "checkpoint_policy",
        "clock",
        "compaction",
        "copies",
        "counts",
        "events",
        "full_columns",
        "ghosts",
        "has_states",
        "in_transfer",
        "layout",
        "lookup",
        "max_tokens",
        "media",
        "media_cache",
        "media_ids",
        "pages",
        "pins",
        "pool",
        "snapshot_interval",
        "states",
        "tree",
    )

    def __init__(
        self,
        layout: PoolLayout,
        slabs: int,
        reserved: int | None,
        policy: str | Policy,
        max_sequences: int,
        max_tokens: int,
        tenants: Iterable[Tenant],
        public_bytes: int,
        checkpoint_policy: CheckpointPolicy,
        clock: Clock,
    ) -> None:
        if max_sequences < 1 or max_tokens < 1:
            raise ValueError(f"max_sequences {max_sequences} and max_tokens {max_tokens} must be positive")
        self.layout, self.block_tokens = layout, layout.block_tokens
        self.max_tokens, self.checkpoint_policy, self.clock = max_tokens, checkpoint_policy, clock
        self.events = EventBus()
        self.pool = PagePool([g.pages_per_slab for g in layout.groups], slabs, reserved)
        self.pages, self.states, self.media = (self._numbering(n) for n in ("token", "state", "media"))
        self.has_states = bool(self.states.width)
        full = [g for g in layout.of("token") if not g.spec.visibility.windowed]
        self.full_columns = np.array(
            [c for g in full for c in range(g.columns.start, g.columns.stop)], np.intp
        )
        """Columns of the token groups with full attention."""
        self._refuse_too_small()
        self.snapshot_interval = (
            SnapshotInterval(
                checkpoint_policy.every_blocks * self.block_tokens,
                self.states.row_bytes,
                self.pages.row_bytes / self.block_tokens,
                is_fixed=not checkpoint_policy.is_measured,
            )
            if self.has_states
            else None
        )
        """Chooses `CheckpointPolicy.every_blocks`. None for models without states."""
        self.media_ids = MediaIds()
        publisher = EventPublisher(layout, self.events, self.media_ids)
        self.tree = RadixTree(layout, self.pages, self.states, publisher)
        outlives_prompt = any(group.spec.lifetime != PROMPT for group in layout.of("media"))
        self.media_cache = MediaCache(self.media, publisher, outlives_prompt)
        self.ghosts = Ghosts()
        self.lookup = Lookup(self.tree, self.media_cache, self.ghosts)
        self.counts = LookupCounts(layout)
        policy = make_policy(policy)
        if isinstance(policy, Adaptive):
            policy.compare_with_lru(lambda: self.tree.tokens, lambda: self.counts.looked_up_tokens)
        self.accounts = Accounts(tenants, policy, (slabs - 1) * layout.slab_bytes, public_bytes)
        self._private_owners = {
            name: BlockOwners(self.accounts.owner(name)) for name in self.accounts.accounts
        }
        blocks, windows = -(-max_tokens // self.block_tokens), len(self.tree.windows)
        widths = self.pages.width, self.states.width
        self.block_tables = BlockTables(max_sequences, blocks, self.block_tokens, *widths, windows)
        self.copies = PendingCopies(self.pool, layout.slab_bytes)
        self.pins = Pins(self.tree, self.media_cache, clock)
        self.in_transfer = PagesInTransfer(self.pages, self.states, self.accounts)
        self.compaction = Compaction(
            self.pool,
            self.pages,
            self.states,
            self.media,
            self.block_tables,
            self.copies,
            (self.pins, self.in_transfer),
            self.block_tokens,
            self.accounts.renumber_borrowed,
        )
        self.allocator = Allocator(
            self.pool,
            self.tree,
            self.media_cache,
            self.accounts,
            self.pins,
            self.compaction,
            self.copies,
            self.ghosts,
            clock,
            layout.slab_bytes,
        )

    def _numbering(self, numbering: str) -> BlockPages:
        classes = [self.pool.class_of[g.index] for g in self.layout.of(numbering) for _ in range(g.runs)]
        return BlockPages(self.pool, classes, self.layout.slab_bytes)

    def _refuse_too_small(self) -> None:
        least = [a + b for a, b in zip(self.pages.needs(1), self.states.needs(1), strict=True)]
        short = self.pool.missing_slabs(least)
        if short:
            slabs = self.pool.slabs
            raise ValueError(
                f"a pool of {slabs} slabs of {self.layout.slab_bytes} bytes cannot hold one block and one state of "
                f"this model; give it {slabs + short} or more"
            )

    def observe_lookup(self, match: Match) -> None:
        """Record an opened prompt in `SnapshotInterval`, and apply the interval that it now chooses for state
        snapshots."""
        interval = self.snapshot_interval
        if interval is None or interval.is_fixed or not match.control.read:
            return
        is_full = self.pool.free_slabs * FULL_SHARE < self.pool.slabs
        if interval.observe(match.length, match.matched, match.resume, self.lookup.base_of(match), is_full):
            self.checkpoint_policy = replace(
                self.checkpoint_policy, every_blocks=interval.tokens // self.block_tokens
            )

    # -- pages ----------------------------------------------------------------------------------

    def needs(self, rows: int, states: int, media: int) -> list[int]:
        """Return the number of pages of each size class that `rows` blocks of tokens, `states` states and `media`
        blocks of images need."""
        needs = self.pages.needs(rows)
        if states:
            needs = [a + b for a, b in zip(needs, self.states.needs(states), strict=True)]
        if media:
            needs = [a + b for a, b in zip(needs, self.media.needs(media), strict=True)]
        return needs

    def owners(self, control: CacheControl, length: int) -> BlockOwners:
        """Return the owners of a sequence's blocks. `length` is the number of tokens of its public prefix."""
        private = self._private_owners.get(control.tenant)
        if private is None:  # an undeclared tenant
            private = BlockOwners(self.accounts.owner(control.tenant))
        if not length:
            return private
        return BlockOwners(private.private, self.accounts.owner(PUBLIC_TENANT), length // self.block_tokens)

    def take(self, owners: BlockOwners, needs: list[int], public_rows: int = 0) -> int:
        """Evict until the pages of `needs` are free, and charge these pages to `owners`. `public_rows` is the number
        of blocks in `needs` that belong to a public prefix. Return the number of missing pages. If pages are
        missing, nothing is charged."""
        public = public_rows * self.pages.row_bytes
        if public:
            self.allocator.limit_public(public)
        missing = self.allocator.free_pages(owners.account, needs)
        if not missing:
            owners.charge(self.allocator.bytes_of(needs), public)
        return missing

    @staticmethod
    def release(account: Account, columns: BlockPages, rows: Ids) -> None:
        """Remove one reference from every page in `rows`, and update `account`, to which the pages are charged.
        `rows` has the page ids of each block."""
        account.release(*columns.release(rows))

    def copy_rows(self, account: Account, columns: BlockPages, source: Ids, target: Ids) -> None:
        """Queue the copy of the pages `source` to the pages `target`. `account` is the account of the source pages. The
        pending copy takes over the caller's references to the source pages, so the caller must not release them."""
        self.copies.add_rows(columns, source, target)
        self.copies.retain_sources(columns, source, account)

    # -- rows of the block tables ---------------------------------------------------------------

    def set_window_edges(self, row: int, position: int) -> None:
        """Record the first block inside each window, for the sequence with row number `row` and a query at
        `position`."""
        for window, visibility in enumerate(self.tree.windows):
            self.block_tables.first[window, row] = visibility.first_visible(position) // self.block_tokens

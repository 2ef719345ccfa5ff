"""The façade a scheduler calls: match, open, extend, commit, rollback, fork, close.

One cache serves every kind of layer: nothing here asks which. It moves no bytes; copies that its
decisions need are collected by `take_copies` and must run before the next step writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence as Many

import numpy as np
import numpy.typing as npt

from .allocator import Allocator
from .clock import Clock, WallClock
from .compaction import Compaction
from .events import EventBus
from .eviction.policies import Policy, make_policy
from .eviction.tenants import Accounts, Tenant
from .histogram import Histogram
from .integrity import check_integrity
from .layout.layer_spec import PROMPT
from .layout.pool_layout import PoolLayout
from .loading.load_plan import LoadPlan, TierQuery, deciding_group, first_query
from .loading.reservation import Reservation, Reservations
from .lookup import Lookup, Match, Miss
from .pool.block_pages import BlockPages
from .pool.page_pool import Ids, PagePool
from .pool.pending_copies import CopyBatch
from .prefix.block_hash import TOKEN_BYTES, HashIndex, root_hash, token_bytes
from .prefix.multimodal import Media, MediaIds
from .prefix.node import Node
from .prefix.offload_batch import OffloadBatch, OffloadSource
from .prefix.publisher import EventPublisher
from .prefix.radix_tree import RadixTree
from .sequences.commit import Committer
from .sequences.extend import Extender
from .sequences.open import Opener
from .sequences.pins import Pin, Pins, QueuedPrefix
from .sequences.rollback import Rollback
from .sequences.sequence import BlockTables, CacheControl, CheckpointPolicy, Sequence
from .sequences.snapshot import Checkpointer
from .sequences.state import CacheState, Rows

__all__ = ["KVCache"]

_PLAIN = CacheControl()


class KVCache:
    """See the module. Not thread-safe: one scheduler calls it.

    The pool has `slabs` slabs (slab 0, which is never lent, among them) and can grow to `reserved`.
    Sequences are bounded by `max_sequences` open at once and `max_tokens` each; tables reserve
    address space for both, and memory only as it is used.
    """

    def __init__(
        self,
        layout: PoolLayout,
        slabs: int,
        *,
        reserved: int | None = None,
        model: str = "",
        policy: str | Policy = "lru",
        max_sequences: int = 256,
        max_tokens: int = 131072,
        tenants: Iterable[Tenant] = (),
        snapshots: CheckpointPolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        if max_sequences < 1 or max_tokens < 1:
            raise ValueError(f"max_sequences {max_sequences} and max_tokens {max_tokens} must be positive")
        self.layout = layout
        self.block_tokens = layout.block_tokens
        self.model = model
        self.max_tokens = max_tokens
        self.snapshots = snapshots or CheckpointPolicy()
        self.clock: Clock = clock or WallClock()
        self.events = EventBus()
        self.pool = PagePool([g.pages_per_slab for g in layout.groups], slabs, reserved)
        self.pages, self.states, self.media = (self._columns(n) for n in ("token", "state", "media"))
        self.media_ids = MediaIds()
        teller = EventPublisher(layout, self.events, self.media_ids.digest_of)
        self.tree = RadixTree(layout, self.pages, self.states, teller)
        self.accounts = Accounts(tenants, make_policy(policy), (slabs - 1) * layout.slab_bytes)
        lasts = any(group.spec.lifetime != PROMPT for group in layout.of("media"))
        self.allocator = Allocator(
            self.pool, self.tree, self.media, self.accounts, self.clock, layout.slab_bytes, lasts
        )
        self.lookup = Lookup(self.tree, self.allocator)
        self._deciding_group = deciding_group(layout)
        blocks, windows = -(-max_tokens // self.block_tokens), len(self.tree.windows)
        widths = self.pages.width, self.states.width
        self.block_tables = BlockTables(max_sequences, blocks, self.block_tokens, *widths, windows)
        self.has_states = bool(self.states.width)
        self._refuse_too_small()
        self.misses: Counter[str] = Counter()
        self.looked_up_tokens = 0
        self.hit_tokens = 0
        self._root_hashes: dict[tuple[str, str, bool], bytes] = {}
        self._parts = parts = CacheState(
            layout,
            self.pages,
            self.states,
            self.media,
            self.media_ids,
            self.tree,
            self.accounts,
            self.allocator,
            self.block_tables,
            self.snapshots,
            self.clock,
            max_tokens,
        )
        self._points = Checkpointer(parts)
        self._reserving = Extender(parts)
        self._committing = Committer(parts, self._points)
        self._rollback = Rollback(parts)
        self._opening = Opener(parts, self._points, self._reserving)
        self._hints = Pins(parts)
        self._arrivals = Reservations(parts)
        self._moving = Compaction(parts, self._hints, self._arrivals)
        if any(c.per_slab > 1 for c in self.pool.classes):
            self.allocator.compact = self._moving.compact_one_slab
        self.allocator.open_nodes = self._open_nodes
        self.allocator.release_expired = self._hints.release_expired

    def _refuse_too_small(self) -> None:
        least = [a + b for a, b in zip(self.pages.needs(1), self.states.needs(1), strict=True)]
        short = self.pool.missing_slabs(least)
        if short:
            slabs = self.pool.slabs
            raise ValueError(
                f"a pool of {slabs} slabs of {self.layout.slab_bytes} bytes cannot hold one block and one state of "
                f"this model; give it {slabs + short} or more"
            )

    def _columns(self, numbering: str) -> BlockPages:
        classes = [self.pool.class_of[g.index] for g in self.layout.of(numbering) for _ in range(g.runs)]
        return BlockPages(self.pool, classes, self.layout.slab_bytes)

    # -- looking up -----------------------------------------------------------------------------

    def root_hash(self, control: CacheControl) -> bytes:
        """Where the names of a request's tenant and adapter begin; apart, for those that allow for loss."""
        key = (control.tenant, control.adapter, control.lossy)
        name = self._root_hashes.get(key)
        if name is None:
            if len(self._root_hashes) > 4096:
                self._root_hashes.clear()
            model = f"{self.model}, near" if control.lossy else self.model
            name = self._root_hashes[key] = root_hash(model, control.tenant, control.adapter)
        return name

    def match(
        self, tokens: npt.ArrayLike, control: CacheControl | None = None, media: Many[Media] = ()
    ) -> Match:
        """How far the cache can take a prompt (its last token is always left to compute). Changes nothing."""
        return self._match(tokens, control or _PLAIN, media, spare_last=True)

    def _match(
        self, tokens: npt.ArrayLike, control: CacheControl, media: Many[Media], spare_last: bool
    ) -> Match:
        data = token_bytes(tokens)
        length = len(data) // TOKEN_BYTES
        if media:
            data = self.media_ids.place(np.frombuffer(data, np.int32), media).tobytes()
        if length > self.max_tokens:
            raise ValueError(f"a prompt of {length} tokens exceeds max_tokens {self.max_tokens}")
        limit = max(0, length - 1) if spare_last else length
        return self.lookup.find(self.root_hash(control), data, control, media, limit)

    def explain(self, match: Match, across_tenants: bool = True) -> Miss:
        """Why a prompt hit no further. `across_tenants` also looks at others' prefixes: for operators."""
        return self.lookup.explain(match, across_tenants)

    def resumable_with(self, match: Match, index: HashIndex) -> int:
        """The longest resume point that the pages a name index knows of would give this prompt."""
        return self.lookup.resumable_with(match, index)

    def _fresh(self, match: Match) -> Match:
        if match.version == self.tree.version:
            return match
        return self.lookup.find(match.root_hash, match.data, match.control, match.media, match.limit)

    # -- sequences ------------------------------------------------------------------------------

    def open(self, match: Match) -> Sequence:
        """A sequence that starts with what `match` found (looked up again if the cache has changed)."""
        match = self._fresh(match)
        seq = self._opening.open(self, match)
        self.looked_up_tokens += match.length
        self.hit_tokens += match.resume
        account = seq.root.account
        account.looked_up_tokens += match.length
        account.hit_tokens += match.resume
        self.misses[match.miss.reason] += 1
        return seq

    def extend(self, seq: Sequence, n: int) -> int:
        """Reserve pages for `n` more tokens. Returns how many pages are missing; 0 means it is done, and
        otherwise nothing has changed."""
        return self._reserving.extend(seq, n)

    def exceeds_quota(self, seq: Sequence, n: int) -> bool:
        """Whether what `n` more tokens need exceeds the quota of its tenant, whatever room others make: only what its own
        sequences hold can help."""
        return self._reserving.short_of_quota(seq, n)

    def extend_many(self, rows: Rows, n: int = 1) -> int:
        """`extend` for the sequences of many rows at once; costs by how many need a new block. Returns
        the pages missing for all of them together; then none was extended."""
        return self._reserving.extend_many(rows, n)

    def commit(self, seq: Sequence, tokens: npt.ArrayLike, state_length: int | None = None) -> None:
        """The next tokens are computed: their pages are real, and full blocks become findable.

        The live states stand at the new end, unless `state_length` says where the step left them. A step
        that verifies a draft keeps them before it, commits the accepted tokens, and the next step gives
        those to the recurrent layers again.
        """
        self._committing.commit(seq, tokens, state_length)

    def commit_many(self, rows: Rows, tokens: npt.ArrayLike) -> None:
        """One computed token for each of many rows (no row twice); costs by how many fill a block."""
        self._committing.commit_many(rows, tokens)

    def snapshot(self, seq: Sequence, position: int | None = None) -> bool:
        """Leave a resume point where the sequence stands, or at a `position` before that (without states) or ahead, when it
        gets there. False where there is no room for its states, or no use for one."""
        return self._points.snapshot(seq, position)

    def rollback(self, seq: Sequence, n: int) -> int:
        """Forget the last `n` computed tokens and every reserved page. Returns the length reached: less
        than asked for where states or windows can only resume earlier; compute the rest again."""
        return self._rollback.rollback(seq, n)

    def fork(self, seq: Sequence) -> Sequence | None:
        """A second sequence with the same past; pages are shared, a partial block is copied when written.
        None where there is no room for its states."""
        return self._opening.fork(seq)

    def close(self, seq: Sequence) -> None:
        """The sequence is done (or interrupted): what it published stays cached and can be evicted."""
        node = self._opening.close(seq)
        if seq.control.session is not None:
            self._hints.note_session(seq.control.session, node)
        if self.tree.offload_source is not None and self.tree.offload_source.ends:
            self.tree.offload_source.on_sequence_closed(node)

    # -- what lies below the pool ---------------------------------------------------------------

    def set_offload_listener(self, listener: Callable[[OffloadBatch], None], ends: bool) -> None:
        """Have pages offered to `listener` when they leave and, if `ends`, when a sequence that used them ends."""

        def where(numbering: str, rows: Ids) -> Ids:
            return self.allocator.copies.current_pages(
                self.states if numbering == "state" else self.pages, rows
            )

        self.tree.offload_source = OffloadSource(
            self.tree.publisher, self.block_tokens, where, listener, ends
        )

    def mark_step(self, moved: bool = False) -> None:
        """What is in the tree now is older in the parcels to come: see `Parcel`. `moved`: pages were copied inside the pool since
        the last mark."""
        if self.tree.offload_source is not None:
            self.tree.offload_source.mark(self.clock.now(), moved)

    def retain_batch(self, parcel: OffloadBatch) -> None:
        """Hold a parcel's pages where they are until `give_back`: someone reads them."""
        self._arrivals.retain_batch(parcel)

    def release_batch(self, parcel: OffloadBatch) -> None:
        """End a `lend`."""
        self._arrivals.release_batch(parcel)

    def plan_load(self, match: Match) -> LoadPlan:
        """What a prompt could find below: see `Prospect`. Looked up again if the cache has changed."""
        return LoadPlan(self.layout, self.lookup, self._fresh(match))

    def first_query(self, match: Match) -> TierQuery | None:
        """The one question whose "no" says that a prospect of `match` would find nothing; None where no one does."""
        group = self._deciding_group
        return None if group is None else first_query(group, self.lookup, self._fresh(match))

    def reserve(self, prospect: LoadPlan) -> Reservation | None:
        """Pages for what a prompt lacks, to be filled by the caller; None where there is no room. Its match must be of
        this moment: nothing may have changed since `prospect`."""
        if prospect.match.version != self.tree.version:
            raise ValueError("the cache has changed since this prospect was made: make it again")
        return self._arrivals.reserve(prospect)

    def publish_loaded(
        self, arrival: Reservation, came: npt.NDArray[np.bool_] | None = None, states_came: bool = True
    ) -> int:
        """What came (all, if None) is as good as computed. Returns where a prompt can resume on it, 0 for nowhere."""
        return self._arrivals.publish(arrival, came, states_came)

    def cancel_load(self, arrival: Reservation) -> None:
        """Give up an arrival. Nobody may write to its pages any more."""
        self._arrivals.cancel(arrival)

    # -- what users ask for ---------------------------------------------------------------------

    def pin(
        self, tokens: npt.ArrayLike, ttl: float, control: CacheControl | None = None, media: Many[Media] = ()
    ) -> Pin:
        """Keep what is cached of a prompt for `ttl` seconds, whatever the pressure. `Pin.length` says how
        many tokens that is."""
        if ttl <= 0:
            raise ValueError(f"ttl {ttl} is not positive")
        return self._hints.pin(self._match(tokens, control or _PLAIN, media, spare_last=False), ttl)

    def unpin(self, pin: Pin) -> None:
        """End a pin early. Ending it twice is harmless."""
        self._hints.unpin(pin)

    def protect_queued(self, match: Match, turn: tuple[int, int]) -> QueuedPrefix:
        """Somebody waits who will want what `match` found: until `forget`, it leaves after all that nobody waits for, and what is
        wanted last before what is wanted first."""
        return self._hints.protect_queued(match, turn)

    def unprotect(self, foreseen: QueuedPrefix) -> None:
        """End a `foresee`. Ending it twice is harmless."""
        self._hints.unprotect(foreseen)

    def pins(self) -> list[Pin]:
        """Those that have not ended."""
        return self._hints.pins()

    def end_session(self, session: str) -> int:
        """A hint that a session will not come back: what only it used leaves first. Returns the tokens
        that concerns."""
        return self._hints.end_session(session)

    def release_expired(self) -> None:
        """End the pins whose time is over; this also happens whenever room is short."""
        self._hints.release_expired()

    # -- the engine's side ----------------------------------------------------------------------

    def table(self, group: int) -> Ids:
        """The page tables of one token group over all rows: [runs, rows, blocks], a view that stays valid."""
        if not 0 <= group < len(self.layout.groups) or self.layout.groups[group] not in self.layout.of(
            "token"
        ):
            raise KeyError(
                f"{group} is not a token group; the layout has {[g.name for g in self.layout.groups]}"
            )
        return self.block_tables.tables[self.layout.groups[group].columns]

    def take_copies(self) -> list[CopyBatch]:
        """Page copies to run, batch after batch, before the next step. Call it once a step."""
        return self.allocator.copies.take()

    def unbacked_slabs(self, n: int) -> Ids:
        """`n` slabs that can come: give them memory, then `grow`. Changes nothing."""
        return self.pool.unbacked_slabs(n)

    def grow(self, slabs: Iterable[int]) -> None:
        """Absent slabs have memory now and may be lent; shares follow. What is in them does not matter."""
        self.pool.grow(slabs)
        self.accounts.set_pool_bytes((self.pool.slabs - 1) * self.layout.slab_bytes)

    def shrink(self, n: int) -> Ids:
        """Take up to `n` slabs out of the pool and return them: free ones, then what evicting by policy and
        moving pages together make free. Shares follow.

        Fewer come where held pages stand in the way, or where copies are pending: a slab that one of them
        touches can be had after `take_copies`. The engine takes the memory back when every copy and step
        before this call is done.
        """
        return self.allocator.shrink(n)

    def check(self) -> None:
        """Recount every page from scratch; raises AssertionError on the first lie. For tests and idle time."""
        check_integrity(
            self._parts, self._hints.pins(), self._arrivals.active(), self._arrivals.retained_batches()
        )

    def stats(self) -> dict[str, float | int | dict[str, int]]:
        """Counters for people and dashboards. O(1)."""
        total = self.pool.slabs - 1
        pools = self.pool.classes
        return {
            "slabs": total,
            "reserved_slabs": self.pool.reserved - 1,
            "free_slabs": self.pool.free_slabs,
            "in_use_pages": sum(c.in_use_pages for c in pools),
            "cached_pages": sum(c.cached_pages for c in pools),
            "free_pages_in_occupied_slabs": sum(c.free_pages for c in pools),
            "nodes": self.tree.nodes,
            "looked_up_tokens": self.looked_up_tokens,
            "hit_tokens": self.hit_tokens,
            "evictions": self.allocator.evictions,
            "evicted_bytes": self.allocator.evicted_bytes,
            "moved_pages": self.allocator.moved_pages,
            "miss_reasons": dict(self.misses),
        }

    @property
    def reused(self) -> Histogram:
        """Seconds between hits and the uses before."""
        return self._opening.reused

    def hit_pages(self) -> dict[str, int]:
        """Pages found in the cache so far, by the kind of layers they serve. O(groups)."""
        return self._opening.hit_pages()

    def unused_tokens(self) -> int:
        """Tokens that open sequences have reserved blocks for and not computed: waste that is there to grow into.
        O(max_sequences), in array operations."""
        rows = self.block_tables
        return int(rows.blocks.sum()) * self.block_tokens - int(rows.length.sum())

    def _open_nodes(self) -> list[Node]:
        """The nodes that open sequences and pins stand on."""
        nodes = [seq.node for seq in self.block_tables.sequences if seq is not None]
        nodes += [pin.node for pin in self._hints.pins() if pin.node is not None]
        return nodes + [arrival.node for arrival in self._arrivals.active()]

"""Loading: the part of the cache's interface for the offload manager."""

from __future__ import annotations

from collections.abc import Callable

from kvloom.core.pool.page_pool import Ids
from kvloom.core.prefix.in_transfer import Mask, Reservation
from kvloom.core.prefix.lookup import Match
from kvloom.core.prefix.offload_batch import OffloadBatch, OffloadSource
from kvloom.core.sequences.sequence import Sequence
from kvloom.core.state import CacheState

from .load_plan import LoadPlan, TierQuery, deciding_group, first_query
from .reserve import cancel, publish_loaded, reserve

__all__ = ["Loading"]


class Loading:
    """Load plans, reservations and offload batches of one cache. Not thread-safe, like the cache."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._deciding_group = deciding_group(state.layout)

    # -- loading --------------------------------------------------------------------------------

    def plan(self, match: Match) -> LoadPlan:
        """Return the load plan of a prompt. Repeats the lookup if the cache has changed. Does not modify the cache."""
        lookup = self._state.lookup
        return LoadPlan(self._state.layout, lookup, lookup.refreshed(match))

    def first_query(self, match: Match) -> TierQuery | None:
        """Return the query whose answer decides whether a load plan is useful. Return None if no single query
        decides. Computes one hash."""
        state, group = self._state, self._deciding_group
        if group is None:
            return None
        return first_query(state.layout, group, state.lookup, state.lookup.refreshed(match))

    def reserve(self, plan: LoadPlan) -> Reservation | None:
        """Allocate the missing pages of a plan, so that a load job can fill them. Evicts by policy. Return None if
        the pool has too few pages.

        Raises ValueError if the cache has changed since the plan was made.
        """
        if plan.match.version != self._state.tree.version:
            raise ValueError("the cache has changed since this load plan was made; make a new one")
        return reserve(self._state, plan)

    def publish(
        self, reservation: Reservation, loaded: Mask | None = None, states_loaded: bool = True
    ) -> int:
        """Publish the loaded pages like computed pages, and end the reservation. Return the length at which the
        prompt can now resume. Return 0 if too few pages were loaded.

        `loaded` marks the pages that were loaded, and None means all pages. `states_loaded` is true if the state
        snapshot was loaded. Pages that were not loaded become free.
        """
        return publish_loaded(self._state, reservation, loaded, states_loaded)

    def cancel(self, reservation: Reservation) -> None:
        """End a reservation and free its pages. The caller must ensure that no transfer still writes to the pages."""
        cancel(self._state, reservation)

    # -- offloading -----------------------------------------------------------------------------

    def set_listener(self, listener: Callable[[OffloadBatch], None], on_close: bool) -> None:
        """Register `listener`. The cache calls `listener` with an offload batch before pages are evicted. With
        `on_close`, the cache also calls `listener` when a sequence closes. The listener must not call the cache.
        Without a listener no page is hashed for offloading.
        """
        state = self._state

        def current_pages(numbering: str, rows: Ids) -> Ids:
            columns = state.states if numbering == "state" else state.pages
            return state.copies.current_pages(columns, rows)

        publisher = state.tree.publisher
        state.tree.set_offload_source(
            OffloadSource(publisher, state.block_tokens, current_pages, listener, on_close)
        )

    def offload_published(self, seq: Sequence, again: bool = False) -> None:
        """Pass the published pages of an open sequence to the listener. The pages stay in use. Pages that were
        passed before are skipped, unless `again` is set. Set `again` if tiers may have evicted these pages.
        """
        source = self._state.tree.offload_source
        if source is not None:
            source.offload_path(seq.node, again)

    def remove_listener(self) -> None:
        """Stop building offload batches."""
        self._state.tree.set_offload_source(None)

    def mark_step(self, moved: bool = False) -> None:
        """Set a step mark, which increases `OffloadBatch.age` of all cached pages. The engine calls this method before
        each step, and after copies inside the pool. `moved` states that pages were copied inside the pool."""
        source = self._state.tree.offload_source
        if source is not None:
            source.mark_step(self._state.clock.now(), moved)

    def retain_batch(self, batch: OffloadBatch) -> None:
        """Retain the pages of a batch and forbid moving them until `release_batch`, because a transfer reads them."""
        self._state.in_transfer.retain_batch(batch)

    def release_batch(self, batch: OffloadBatch) -> None:
        """Release the pages that `retain_batch` retained."""
        self._state.in_transfer.release_batch(batch)

    def evict_ahead(self) -> bool:
        """Evict a few pages before they are needed. Return whether a page was evicted. See `Allocator.evict_ahead`."""
        return self._state.allocator.evict_ahead()

    def page_changes(self) -> tuple[int, int, int]:
        """Return three counters: evictions, pages moved by compaction, and replaced partial blocks. While they are
        unchanged, no cached page was evicted, moved or replaced."""
        state = self._state
        return state.allocator.evictions, state.compaction.moved_pages, state.tree.replaced

"""Pages lent to what is on its way from below, and how it enters the tree when it has come, as if it had been computed.

    expect(prospect) → Arrival: pages to fill     land(arrival, came) → how far the prompt can resume now     drop(arrival)

Until it lands or is dropped an arrival holds its pages, its tenant pays for them, and none of them moves. It knows no
bytes: who fills the pages says which came.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvloom.core.layout.pool_layout import PageGroup
from kvloom.core.pool.page_pool import Ids
from kvloom.core.prefix.block_hash import TOKEN_BYTES
from kvloom.core.prefix.node import Node, Root
from kvloom.core.prefix.offload_batch import OffloadBatch
from kvloom.core.prefix.resume_rule import longest_resume
from kvloom.core.sequences.state import CacheState, SequenceOps

from .load_plan import LoadPlan

__all__ = ["Reservation", "Reservations"]

Mask = npt.NDArray[np.bool_]


class Reservation:
    """Pages on their way for one prompt: row b is block b's, `fresh` says which of them must be filled."""

    __slots__ = (
        "data",
        "end",
        "hashes",
        "node",
        "resume",
        "root",
        "rows",
        "state_hash",
        "states",
        "to_load",
    )

    def __init__(self, prospect: LoadPlan, root: Root, node: Node, rows: Ids, fresh: Mask) -> None:
        self.data, self.root, self.node = prospect.match.data, root, node
        self.resume, self.end = prospect.resume, prospect.end
        self.rows, self.to_load = rows, fresh
        self.hashes = [prospect.page_hash(b) for b in range(len(rows))]
        self.state_hash = prospect.hash_at(prospect.resume)
        self.states: Ids | None = None

    def pages(self, group: PageGroup) -> list[tuple[list[bytes], Ids]]:
        """The names and pages to fill of each run of a group."""
        if group.spec.unit == "state":
            if self.states is None:
                return []
            return [([self.state_hash], self.states[:, c].copy()) for c in _columns(group)]
        found = []
        for column in _columns(group):
            at = np.flatnonzero(self.to_load[:, column])
            found.append(([self.hashes[b] for b in at.tolist()], self.rows[at, column]))
        return found


def _columns(group: PageGroup) -> range:
    return range(group.columns.start, group.columns.stop)


class Reservations(SequenceOps):
    def __init__(self, parts: CacheState) -> None:
        super().__init__(parts)
        self._open: dict[int, Reservation] = {}
        self._retained: dict[int, OffloadBatch] = {}

    def active(self) -> list[Reservation]:
        return list(self._open.values())

    def retained_batches(self) -> list[OffloadBatch]:
        return list(self._retained.values())

    def retain_batch(self, parcel: OffloadBatch) -> None:
        """Hold the pages of a parcel, and keep them where they are."""
        columns = self.states if parcel.numbering == "state" else self.pages
        self.accounts[parcel.tenant].in_use += columns.retain(parcel.rows)
        for cls, ids in columns.by_class(parcel.rows):
            columns.pool.pin_in_place(cls, ids[ids > 0], 1)
        self._retained[id(parcel)] = parcel

    def release_batch(self, parcel: OffloadBatch) -> None:
        del self._retained[id(parcel)]
        columns = self.states if parcel.numbering == "state" else self.pages
        for cls, ids in columns.by_class(parcel.rows):
            columns.pool.pin_in_place(cls, ids[ids > 0], -1)
        self.release(self.accounts[parcel.tenant], columns, parcel.rows)

    def reserve(self, prospect: LoadPlan) -> Reservation | None:
        """Reserve the pages of `prospect.needs()`; None where there is no room for them and to go on. The match must be
        fresh."""
        match = prospect.match
        account = self.accounts[match.control.tenant]
        root = self.tree.root(match.root_hash, account, match.control.tenant)
        node = match.path[-1] if match.path else root
        self.tree.lock(node)  # what it hangs below must stay
        blocks = -(-prospect.end // self.block_tokens)
        rows = np.zeros((blocks, self.pages.width), np.int32)
        fresh = np.zeros(rows.shape, bool)
        here = self.tree.rows(match.path, match.matched)[:blocks]
        rows[: len(here)] = here
        if prospect.resume > match.matched:
            rows[match.matched // self.block_tokens :] = 0  # a block that only begins like the prompt's
        rows = self.visible_rows(rows, prospect.resume)
        states = 0
        for need in prospect.missing_pages():
            if need.group.spec.unit == "state":
                states = 1
            else:
                fresh[np.ix_(need.blocks, list(_columns(need.group)))] = True
        rows[fresh] = 0
        account.in_use += self.pages.retain(rows)
        arrival = Reservation(prospect, root, node, rows, fresh)
        self._open[id(arrival)] = arrival  # now: making room may move pages that it shares with the tree
        needs = self._needs(fresh, states)
        # And a block more: whom it is for begins with that, or what came leaves again before it was of use.
        begun = self.needs(1, int(self.has_states), 0)
        if self.allocator.make_room(account, [a + b for a, b in zip(needs, begun, strict=True)]):
            del self._open[id(arrival)]
            self.release(account, self.pages, rows)
            self.tree.unlock(node, self.clock.now())
            return None
        account.charge(self.allocator.bytes_of(needs))
        for cls in self.pages.classes:
            columns = self.pages.columns_of(cls)
            wanted = fresh[:, columns]
            part = rows[:, columns]
            ids = self.pages.pool.allocate(cls, int(wanted.sum()))
            assert ids is not None
            part[wanted] = ids
            rows[:, columns] = part
        if states:
            arrival.states = self.states.allocate(1)
        self._pin_in_place(arrival, 1)
        return arrival

    def _needs(self, fresh: Mask, states: int) -> list[int]:
        needs = self.states.needs(states)
        for cls in self.pages.classes:
            needs[cls] += int(fresh[:, self.pages.columns_of(cls)].sum())
        return needs

    def _pin_in_place(self, arrival: Reservation, count: int) -> None:
        """Pages that someone is writing to must not move."""
        pool = self.pages.pool
        for cls, ids in self.pages.by_class(np.where(arrival.to_load, arrival.rows, 0)):
            pool.pin_in_place(cls, ids[ids > 0], count)
        if arrival.states is not None:
            for cls, ids in self.states.by_class(arrival.states):
                pool.pin_in_place(cls, ids, count)

    def publish(self, arrival: Reservation, came: Mask | None, states_came: bool = True) -> int:
        """The pages of `arrival` that came (all of them if None) enter the tree as far as a prompt can resume on them;
        the others are free again. Returns that point, 0 for none."""
        now = self.clock.now()
        came = arrival.to_load if came is None else arrival.to_load & came
        for columns in self.tree.window_columns:  # a block's page of a window is there with all its runs
            some = arrival.to_load[:, columns] & ~came[:, columns]
            came[some.any(1), columns] = False
        rows = self._along(arrival, np.where(arrival.to_load & ~came, 0, arrival.rows))
        end, point = self._end(arrival, rows, came, states_came)
        if point:
            node, _ = self.tree.publish(
                arrival.root,
                arrival.data[: end * TOKEN_BYTES],
                rows[: -(-end // self.block_tokens)],
                now,
                standing=arrival.node,
                last=True,
            )
            self.tree.version += 1
            if self.tree.keeps_checkpoints:
                self.tree.checkpoint(node, end, arrival.states, now)
        self._release(arrival, now)
        return point

    def cancel(self, arrival: Reservation) -> None:
        """Nothing came, or nobody waits: the pages are free again. Nobody may write to them any more."""
        self._release(arrival, self.clock.now())

    def _end(self, arrival: Reservation, rows: Ids, came: Mask, states_came: bool) -> tuple[int, int]:
        """Where the text ends that `rows` have all pages for, and where one can resume on it."""
        block = self.block_tokens
        lost = arrival.to_load & ~came
        if not lost.any() and (arrival.states is None or states_came):
            return arrival.end, arrival.resume
        if self.has_states:
            return 0, 0
        windowed = {c for columns in self.tree.window_columns for c in range(columns.start, columns.stop)}
        full = [c for c in range(self.pages.width) if c not in windowed]
        lacking = (lost[:, full] & (rows[:, full] == 0)).any(1)
        reach = int(np.flatnonzero(lacking)[0]) if lacking.any() else len(rows)
        point = min(arrival.end, reach * block) // block * block
        while point:
            deepest = longest_resume(point, self.tree.presence(rows), block)[0] // block * block
            if deepest == point:
                break
            point = deepest
        return point, point

    def _along(self, arrival: Reservation, rows: Ids) -> Ids:
        """The rows of an arrival, and where it has none, those of the tree, which may have grown meanwhile."""
        path, matched = self.tree.walk(arrival.root, arrival.data, arrival.end)
        known = self.tree.rows(path, matched)[: matched // self.block_tokens]
        part = rows[: len(known)]
        np.copyto(part, known[: len(part)], where=part == 0)
        return rows

    def _release(self, arrival: Reservation, now: float) -> None:
        del self._open[id(arrival)]
        account = arrival.root.account
        self._pin_in_place(arrival, -1)
        self.release(account, self.pages, arrival.rows)
        if arrival.states is not None:
            self.release(account, self.states, arrival.states)
        for window in range(len(self.tree.windows)):
            last = max(0, arrival.node.end - 1) // self.block_tokens
            self.tree.queue_unneeded_range(arrival.node, window, 0, last)
        self.tree.unlock(arrival.node, now)

"""Making room: which pages leave, or move, so that others fit.

Everything cached competes under one policy: run tails, checkpoints, media runs; spare window pages
go before all of them. Where slabs hold several pages, live pages are moved together. Deciding
happens here; the tree and the pool carry it out, and byte copies are left in `copies`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from .clock import Clock
from .columns import Columns
from .media import MediaRun
from .names import NAME_BYTES, TOKEN_BYTES
from .nodes import Checkpoint, Node, Root
from .policies import Entry, Memo
from .pool import Ids, Index, PagePool
from .prefix import PrefixTree
from .spread import Spread
from .tenants import Account, Accounts

__all__ = ["Copies", "CopyBatch", "Ghost", "Ghosts", "Room"]


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Pages to copy inside the pool: page `source[i]` to page `target[i]`, ids of one page size.

    To run before the next step writes anything, batch after batch. Within a batch no page is both a
    source and a target, so its copies may run at once.
    """

    page_stride: int
    source: Ids
    target: Ids


class Copies:
    """Copies decided since the engine last took them. Their sources stay as they are until then, but
    for pages that were moved: a later copy into a slab that moved pages came from goes into a later
    batch."""

    def __init__(self, pool: PagePool, slab_bytes: int) -> None:
        self._per_slab = [c.per_slab for c in pool.classes]
        self._pool = pool
        self._slab_bytes = slab_bytes
        self._pending: list[dict[int, int]] = [{} for _ in pool.classes]
        self._batches: list[CopyBatch] = []
        self._vacated: set[int] = set()
        self._held: list[tuple[Columns, Ids, Account]] = []

    def add(self, cls: int, source: Ids, target: Ids) -> None:
        if self._vacated and not self._vacated.isdisjoint((target // self._per_slab[cls]).tolist()):
            self._close_batch()
        pending = self._pending[cls]
        sources = source.tolist()
        if not pending.keys().isdisjoint(sources):
            # A source that is itself still to be written is read where its bytes are now.
            sources = [pending.get(src, src) for src in sources]
        pending.update(zip(target.tolist(), sources, strict=True))

    def add_rows(self, columns: Columns, source: Ids, target: Ids) -> None:
        for cls in columns.classes:
            at = columns.columns_of(cls)
            self.add(cls, source[:, at].ravel(), target[:, at].ravel())

    def add_move(self, cls: int, source: Ids, target: Ids) -> None:
        """Pages leave a slab that may be lent again at once."""
        self.add(cls, source, target)
        self._vacated.update((source // self._per_slab[cls]).tolist())

    def hold(self, columns: Columns, rows: Ids, account: Account) -> None:
        """Take over a hold on source pages."""
        self._held.append((columns, rows, account))

    def held_rows(self) -> list[tuple[Columns, Ids]]:
        return [(columns, rows) for columns, rows, _ in self._held]

    def slabs(self) -> set[int]:
        """Slabs that copies yet to be taken may read or write, free ones among them. O(copies)."""
        pages = [
            (cls, page) for cls, pairs in enumerate(self._pending) for pair in pairs.items() for page in pair
        ]
        slabs = {page // self._per_slab[cls] for cls, page in pages}
        for batch in self._batches:
            per_slab = self._slab_bytes // batch.page_stride
            slabs.update((batch.source // per_slab).tolist(), (batch.target // per_slab).tolist())
        return slabs

    def where(self, columns: Columns, rows: Ids) -> Ids:
        """Where the bytes of pages are now, while copies are still to be made; 0 where that cannot be said. It holds until
        they are made, whatever is decided meanwhile."""
        if not self._batches and not any(self._pending):
            return rows
        now = rows.copy()
        for cls in columns.classes:
            stride, pending = self._slab_bytes // self._per_slab[cls], self._pending[cls]
            unsure = {t for b in self._batches if b.page_stride == stride for t in b.target.tolist()}
            at = columns.columns_of(cls)
            pages = now[:, at].ravel().tolist()
            found = [pending.get(page, 0 if page in unsure else page) for page in pages]
            now[:, at] = np.array(found, np.int32).reshape(len(rows), len(at))
        return now

    def _close_batch(self) -> None:
        for cls, pending in enumerate(self._pending):
            if pending:
                target = np.fromiter(pending.keys(), np.int32, len(pending))
                source = np.fromiter(pending.values(), np.int32, len(pending))
                # What was let go before it was written is not: its bytes may be someone else's now.
                counts = self._pool.classes[cls]
                live = (counts.held[target] > 0) | (counts.kept[target] > 0)
                stride = self._slab_bytes // self._per_slab[cls]
                self._batches.append(CopyBatch(stride, source[live], target[live]))
                pending.clear()
        self._vacated.clear()

    def take(self) -> list[CopyBatch]:
        self._close_batch()
        batches, self._batches = self._batches, []
        for columns, rows, account in self._held:
            account.returned(*columns.release(rows))
        self._held.clear()
        return batches


class Ghost(NamedTuple):
    """Something that left: when, by which policy, and what the policy remembers of it."""

    when: float
    why: str
    memo: Memo | None


class Ghosts:
    """What left lately, so that a miss can be explained and learned from. Bounded; the oldest are
    forgotten."""

    LIMIT = 1 << 16
    SEEN = 64  # bytes of text by which a run is known again

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int | bytes, int], Ghost] = OrderedDict()

    @staticmethod
    def place(node: Node) -> int | bytes:
        """What stands for the end of a node; for a root its name, which outlives it."""
        return node.name if isinstance(node, Root) else node.serial

    def add(self, place: int | bytes, text: bytes | bytearray, ghost: Ghost) -> None:
        """The run that began with `text` after `place` left."""
        self._seen[place, hash(bytes(text[: self.SEEN]))] = ghost
        if len(self._seen) > self.LIMIT:
            self._seen.popitem(last=False)

    def find(self, place: int | bytes, data: bytes, start: int) -> Ghost | None:
        return self._seen.get((place, hash(data[start : start + self.SEEN])))


_KINDS: dict[type[Entry], str] = {Node: "blocks", Checkpoint: "snapshot", MediaRun: "media"}


class Room:
    def __init__(
        self,
        pool: PagePool,
        tree: PrefixTree,
        media: Columns,
        accounts: Accounts,
        clock: Clock,
        slab_bytes: int,
        media_lasts: bool = True,
    ) -> None:
        self.pool = pool
        self.tree = tree
        self.media = media
        self.accounts = accounts
        self.clock = clock
        self.slab_bytes = slab_bytes
        self.copies = Copies(pool, slab_bytes)
        self.ghosts = Ghosts()
        self.runs: dict[bytes, MediaRun] = {}
        self.runs_last = media_lasts
        """Whether tokens behind an image need its run, too (cross attention)."""
        self.evictions = 0
        self.evicted: Counter[str] = Counter()
        """Evictions by what left: blocks, window (pages that left every window), snapshot, media."""
        self.idle = Spread()
        """Seconds that evicted entries had not been used for."""
        self.evicted_bytes = 0
        self.moves = 0
        self.renumber: Callable[[int, Ids, Ids], None] = lambda cls, old, new: None
        self.standing: Callable[[], Iterable[Node]] = lambda: ()
        self.release_expired: Callable[[], None] = lambda: None
        self._serials = count(1)

    def bytes_of(self, needs: Sequence[int]) -> int:
        return sum(n * self.slab_bytes // c.per_slab for n, c in zip(needs, self.pool.classes, strict=True))

    def make(self, account: Account, needs: Sequence[int]) -> int:
        """Make `needs[c]` pages of each class allocatable for `account`; returns how many pages are
        missing, and then nothing was evicted for it. (Shares are counted in bytes: where slabs hold several
        pages, a tenant's share may still stop it half way.)"""
        if not self.pool.lacking(needs) and account.tenant.quota is None:
            return 0
        self.release_expired()
        want = self.bytes_of(needs)
        beyond = account.beyond_quota(want)
        if beyond:
            return self._pages(beyond, needs)
        tight = self.tree.nodes * self.tree.pages.width  # no more pages than these can be stuck
        if self.pool.missing_slabs([n + tight for n in needs]):
            short = self.pool.missing_slabs(needs) or self.pool.missing_slabs(self._with_stuck(needs))
            if short:
                return self._pages(short * self.slab_bytes, needs)
        if len(self.accounts.accounts) > 1:
            protected = want - self._reachable(account)
            if protected > 0:
                return self._pages(protected, needs)
        now = self.clock.now()
        while account.over_quota(want):
            over = -(-account.over_quota(want) // self.slab_bytes)
            if not self._evict_from(account, over, now):
                return self._pages(account.over_quota(want), needs)
        lacking = self._free_slabs(account, partial(self.pool.lacking, needs), now)
        return self._pages(lacking * self.slab_bytes, needs) if lacking else 0

    def shrink(self, n: int) -> Ids:
        """Take up to `n` slabs out of the pool: free ones, and by evicting and moving as for a request;
        returns those taken. Held pages stay, and so do slabs that pending copies touch."""
        if n < 0:
            raise ValueError(f"cannot shrink by {n} slabs")
        self.release_expired()
        total = self.pool.slabs - 1
        goal = min(n, total - self.pool.fewest_slabs([0] * len(self.pool.classes)))
        self.accounts.share_out((total - goal) * self.slab_bytes)
        self._free_slabs(None, lambda: max(0, goal - self.pool.free_slabs), self.clock.now())
        taken = self.pool.shrink(goal, self.copies.slabs())
        self.accounts.share_out((self.pool.slabs - 1) * self.slab_bytes)
        return taken

    def _free_slabs(self, account: Account | None, lacking: Callable[[], int], now: float) -> int:
        """Evict and move for `account`, or for the pool itself, until no slab is lacking; returns how many
        still are when nothing more can leave."""
        while slabs := lacking():
            if self._gather(cheaply=True):
                continue
            victim = self.accounts.victim(account, now)
            if victim is not None:
                self._evict_from(victim, self._fair(account, victim, slabs), now)
            elif not self._gather(cheaply=False):
                break
        return slabs

    def _with_stuck(self, needs: Sequence[int]) -> list[int]:
        """`needs` and the cached pages that cannot leave: where a prompt that someone stands on parts from
        another inside a block, the part they share has a page of its own, and it leaves after them.
        Looked for only where the room is so tight that they could matter."""
        stuck: set[tuple[int, int]] = set()
        seen: set[int] = set()
        for standing in self.standing():
            node = standing.parent
            while node is not None and node.serial not in seen:
                seen.add(node.serial)
                if node.end % self.tree.block and node.parent is not None:
                    row = node.pages[node.count - 1 : node.count].copy()
                    for columns in self.tree.window_columns:
                        row[:, columns] = 0  # pages of windows leave one by one
                    for cls, ids in self.tree.pages.by_class(row):
                        held = self.pool.classes[cls].held
                        stuck.update((cls, page) for page in ids.tolist() if page and not held[page])
                node = node.parent
        total = list(needs)
        for cls, _ in stuck:
            total[cls] += 1
        return total

    def _reachable(self, account: Account) -> int:
        """Bytes that are free, or that `account` may evict: its own, and what others have above their shares."""
        free = self.pool.free_slabs * self.slab_bytes
        free += sum(c.free_pages * self.slab_bytes // c.per_slab for c in self.pool.classes)
        others = (a for a in self.accounts.accounts.values() if a is not account)
        given = (min(a.used - a.held, a.used - int(a.guaranteed)) for a in others)
        return free + account.used - account.held + sum(max(0, size) for size in given)

    def _fair(self, requester: Account | None, victim: Account, slabs: int) -> int:
        """How many of `slabs` another tenant can give without falling below its share."""
        if victim is requester or not victim.guaranteed:
            return slabs
        return max(1, min(slabs, int((victim.used - victim.guaranteed) // self.slab_bytes)))

    def _pages(self, size: int, needs: Sequence[int]) -> int:
        """Bytes as a number of pages of the size that is most asked for."""
        cls = max(range(len(needs)), key=lambda c: needs[c])
        return max(1, -(-size * self.pool.classes[cls].per_slab // self.slab_bytes))

    # -- evicting -------------------------------------------------------------------------------

    def _evict_from(self, account: Account, slabs: int, now: float) -> bool:
        """Let the next thing of `account` leave, about `slabs` slabs of it; False if there is none."""
        queue = account.queue
        before = account.used
        entry: Entry
        if queue.spares:
            entry, window = queue.spares.popleft()
            assert isinstance(entry, Node)
            kind = "window"
            self.tree.drop_spares(entry, window, self._rows(slabs), queue.policy.name)
            if account.used < before:
                self.tree.requeue(entry, now)
        else:
            found = queue.pop(now)
            if found is None:
                return False
            entry, kind = found, _KINDS[type(found)]
            queue.policy.on_evict(entry, now)
            rows = self._rows(slabs)
            if queue.learner is not None:
                rows = min(rows, max(1, queue.learner.portion(entry) // self.tree.block))
            self._evict(entry, rows, now, queue.policy.name)
        self.evictions += 1
        account.evictions += 1
        self.evicted[kind] += 1
        self.idle.add(now - entry.last_used)
        self.evicted_bytes += before - account.used
        return True

    def _rows(self, slabs: int) -> int:
        """Rows of token pages that fill so many slabs."""
        per_row = self.tree.pages.row_bytes
        return max(1, -(-slabs * self.slab_bytes // per_row)) if per_row else 1

    def _evict(self, entry: Entry, rows: int, now: float, why: str) -> None:
        if isinstance(entry, Node):
            if entry.leaf:
                resume = self.tree.last_resume(entry)
                if resume == entry.end:
                    last = (entry.end - 1) // self.tree.block
                    resume = max(entry.start, (last - rows + 1) * self.tree.block)
                self._cut(entry, resume, now, why)
        elif isinstance(entry, Checkpoint) and not entry.locks:
            node = entry.node
            self.tree.drop_checkpoint(entry, why)
            if node.leaf:
                self._cut(node, node.end, now, why)
        elif isinstance(entry, MediaRun) and not entry.holds:
            del self.runs[entry.key]
            self.tree.version += 1
            if self.tree.teller.listening:
                self.tree.teller.media_dropped(entry.key[:NAME_BYTES], entry.key[NAME_BYTES:], why)
            entry.account.used -= self.media.drop(entry.rows)

    def _cut(self, node: Node, end: int, now: float, why: str) -> None:
        """Trim a leaf to `end` and on to where someone can still resume; what becomes a leaf is queued."""
        while True:
            if end < node.end:
                parent = node.parent
                assert parent is not None
                start = max(0, end - node.start) * TOKEN_BYTES
                text = node.text[start : start + Ghosts.SEEN]
                place = self.ghosts.place(parent if end <= node.start else node)
                self.ghosts.add(place, text, Ghost(now, why, node.memo))
                self.tree.trim(node, end, why)
                if node.parent is None:
                    self.tree.requeue(parent, now)
                    return
            resume = self.tree.last_resume(node)
            if resume == node.end:
                self.tree.requeue(node, now)
                return
            end = resume

    # -- media runs -----------------------------------------------------------------------------

    def add_run(self, key: bytes, account: Account, rows: Ids, tokens: int, now: float) -> MediaRun:
        """The cache keeps the pages of one image; the caller holds them."""
        run = MediaRun(next(self._serials), now, key, account, rows, tokens, len(rows) * self.media.row_bytes)
        self.runs[key] = run
        self.media.keep(rows, run)
        account.queue.policy.on_insert(run, now)
        run.holds = 1
        if self.tree.teller.listening:
            self.tree.teller.media_stored(key[:NAME_BYTES], key[NAME_BYTES:])
        return run

    def hold_run(self, run: MediaRun, now: float) -> None:
        run.account.held += self.media.retain(run.rows)
        run.holds += 1
        run.hits += 1
        run.account.queue.policy.on_hit(run, now)
        run.last_used = now
        run.account.queue.remove(run)

    def let_run_go(self, run: MediaRun, now: float) -> None:
        run.account.returned(*self.media.release(run.rows))
        run.holds -= 1
        run.last_used = now
        if not run.holds:
            run.account.queue.push(run, now)

    # -- moving pages together ------------------------------------------------------------------

    def _gather(self, cheaply: bool) -> bool:
        """Empty one partly used slab by moving its pages to others. Cheaply: only if it is mostly free."""
        for c in self.pool.classes:
            if c.per_slab == 1 or not c.free_pages:
                continue
            slab = self.pool.movable(c.index)
            if slab is None or (cheaply and 2 * int(c.used[slab]) > c.per_slab):
                continue
            self.pool.move_out(c.index, slab, partial(self._moved, c.index))
            return True
        return False

    def _moved(self, cls: int, old: Ids, new: Ids) -> None:
        self.moves += old.size
        self.tree.version += 1
        self.copies.add_move(cls, old, new)
        new_of = dict(zip(old.tolist(), new.tolist(), strict=True))
        for columns in (self.tree.pages, self.tree.states, self.media):
            keepers = columns.keepers.get(cls)
            if keepers is None:
                continue
            for page, target in new_of.items():
                keeper = keepers[page]
                keepers[page], keepers[target] = None, keeper
                if isinstance(keeper, Node):
                    self._renumber_nodes(keeper, columns.columns_of(cls), page, target)
                elif isinstance(keeper, Checkpoint) and keeper.states is not None:
                    _renumber(keeper.states, columns.columns_of(cls), page, target)
                elif isinstance(keeper, MediaRun):
                    _renumber(keeper.rows, columns.columns_of(cls), page, target)
        self.renumber(cls, old, new)

    def _renumber_nodes(self, node: Node, columns: Index, page: int, target: int) -> None:
        """A page stands in one node, or in some of those that meet it inside a block."""
        for current in (node, *self.tree.meeting(node)):
            _renumber(current.pages[: current.count], columns, page, target)


def _renumber(rows: Ids, columns: Index, page: int, target: int) -> None:
    """Replace a page id in some columns; ids of other page sizes stand in the others."""
    part = rows[:, columns]
    hit = part == page
    if hit.any():
        part[hit] = target
        rows[:, columns] = part

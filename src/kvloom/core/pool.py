"""Slabs lent to page sizes, pages lent to holders: who may use which bytes.

A page is in one of three states, and the pool counts each in O(1):

| state  | held (by sequences and pins) | kept (by the cache) |
|--------|------------------------------|---------------------|
| free   | 0                            | 0                   |
| cached | 0                            | > 0                 |
| held   | > 0                          | any                 |

Groups whose pages have the same stride share one size class, so their slabs are interchangeable.
Slab 0 is never lent: page id 0 means "no page" in every table, and padding may point at it.
Of the `reserved` slabs those without memory are absent: never lent, until `grow` brings them in.
The pool knows no tokens, names or policies; it moves no bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from . import loops

__all__ = ["PagePool", "SizeClass"]

Ids = npt.NDArray[np.int32]
Index = npt.NDArray[np.intp]


class SizeClass:
    """All pages of one stride: `per_slab` of them in a slab."""

    __slots__ = (
        "cached_pages",
        "fixed",
        "free_pages",
        "freed",
        "held",
        "held_pages",
        "index",
        "kept",
        "lent_slabs",
        "partial",
        "per_slab",
        "used",
    )

    def __init__(self, index: int, per_slab: int, slabs: int) -> None:
        self.index = index
        self.per_slab = per_slab
        self.held: Ids = np.zeros(slabs * per_slab, np.int32)
        self.kept: Ids = np.zeros(slabs * per_slab, np.int32)
        self.freed: Ids = np.zeros(slabs * per_slab, np.int32)  # where the loops write what came free
        self.held_pages = 0
        self.cached_pages = 0
        self.free_pages = 0  # free pages inside lent slabs; always 0 where a slab is one page
        self.lent_slabs = 0
        # Only where a slab holds several pages: pages in use per slab, and partly used slabs by
        # their number of free pages.
        several = per_slab > 1
        self.used: Ids = np.zeros(slabs if several else 0, np.int32)
        self.partial: list[dict[int, None]] = [{} for _ in range(per_slab)] if several else []
        self.fixed: Counter[int] = Counter()  # slabs with pages that must not move: someone writes to them

    def free_in(self, slab: int) -> Ids:
        start = slab * self.per_slab
        stop = start + self.per_slab
        idle = (self.held[start:stop] == 0) & (self.kept[start:stop] == 0)
        return (np.flatnonzero(idle) + start).astype(np.int32)

    def file(self, slab: int, free: int, before: int) -> None:
        """Move a slab between the lists of partly used slabs as its free pages change."""
        if 0 < before < self.per_slab:
            del self.partial[before][slab]
        if 0 < free < self.per_slab:
            self.partial[free][slab] = None


class PagePool:
    """One pool of `slabs` slabs, which may become `reserved`, serving pages of several sizes.

    All calls are batched over int32 arrays of page ids, where 0 is no page; a call that fails raises
    before anything has changed. O(1) per page.
    """

    def __init__(self, pages_per_slab: Sequence[int], slabs: int, reserved: int | None = None) -> None:
        if slabs < 2:
            raise ValueError(
                f"a pool of {slabs} slabs cannot lend any: slab 0 is reserved, so give it 2 or more"
            )
        if not pages_per_slab or any(n < 1 for n in pages_per_slab):
            raise ValueError(f"pages_per_slab {tuple(pages_per_slab)} needs positive counts")
        reserved = slabs if reserved is None else reserved
        if reserved < slabs:
            raise ValueError(f"{slabs} slabs do not fit {reserved} reserved: reserve {slabs} or more")
        self.slabs = slabs
        self.reserved = reserved
        sizes = dict.fromkeys(pages_per_slab)
        self.classes = tuple(SizeClass(i, per_slab, reserved) for i, per_slab in enumerate(sizes))
        self.class_of = tuple(list(sizes).index(n) for n in pages_per_slab)
        self._plain = tuple(sizes) == (1,)  # slabs are pages, and all alike
        # |free slabs|unused: as many places as slabs are lent|absent slabs|; low slabs are lent first.
        ids = np.arange(reserved, dtype=np.int32)
        self._free: Ids = np.concatenate((ids[slabs - 1 : 0 : -1], ids[slabs:]))
        self.free_slabs = slabs - 1
        self._slack = 0

    # -- what fits ---------------------------------------------------------------------------

    def missing_slabs(self, needs: Sequence[int], more: int = 0) -> int:
        """Slabs lacking for `needs[c]` and `more` held pages of each class once everything cached is evicted
        and live pages are moved together. 0 means it can be done. Exact, O(classes)."""
        return max(0, self.fewest_slabs(needs, more) - (self.slabs - 1))

    def fewest_slabs(self, needs: Sequence[int], more: int = 0) -> int:
        """Slabs that the held pages, `needs[c]` and `more` of each class fill when they are moved together."""
        slabs = 0
        for c in self.classes:
            slabs -= -(c.held_pages + needs[c.index] + more) // c.per_slab
        return slabs

    def lacking(self, needs: Sequence[int]) -> int:
        """Slabs that must come free before `allocate` can serve `needs` as things stand. If none, the
        slabs left over may be spent on keeping the pages of a sequence together."""
        slack = self.free_slabs
        if self._plain:
            slack -= needs[0]
        else:
            for c in self.classes:
                more = needs[c.index] - c.free_pages
                if more > 0:
                    slack += -more // c.per_slab
        self._slack = slack
        return -slack if slack < 0 else 0

    # -- sequences ---------------------------------------------------------------------------

    def allocate(self, cls: int, n: int, near: int = 0) -> Ids | None:
        """Lend `n` free pages, held once each, or None (and nothing changed) if they are not free.

        Where slabs hold several pages, the slab of page `near` is filled first, then whole slabs.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        c = self.classes[cls]
        if c.per_slab == 1:
            free = self.free_slabs
            if n > free:
                return None
            self.free_slabs = free - n
            ids = self._free[free - n : free][::-1].copy()  # ascending: pages side by side are copied at once
            c.lent_slabs += n
            loops.lend(c.held, c.kept, ids)
        else:
            if n > c.free_pages + self.free_slabs * c.per_slab:
                return None
            ids = self._allocate_within(c, n, near)
            c.held[ids.astype(np.intp)] = 1
        c.held_pages += n
        return ids

    def _allocate_within(self, c: SizeClass, n: int, near: int) -> Ids:
        parts: list[Ids] = []
        slab = near // c.per_slab
        if near and 0 < c.used[slab] < c.per_slab:
            n -= self._take(c, slab, n, parts)
        while n:
            # Keep a sequence's pages together while slabs are plenty; pack when they run short.
            must = max(0, -(-(n - c.free_pages) // c.per_slab))
            spare = self._slack if self.free_slabs > self.slabs >> 3 else 0
            fresh = min(-(-n // c.per_slab), must + max(0, spare))
            self._slack -= max(0, fresh - must)
            whole = min(n // c.per_slab, fresh)
            if whole:
                n -= self._take_whole(c, whole, parts)
            elif fresh:
                n -= self._take(c, self._borrow(c), n, parts)
            else:
                found = next((p for p in c.partial[n:] if p), None) or next(
                    p for p in reversed(c.partial) if p
                )
                n -= self._take(c, next(iter(found)), n, parts)
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def _take_whole(self, c: SizeClass, whole: int, parts: list[Ids]) -> int:
        self.free_slabs -= whole
        slabs = self._free[self.free_slabs : self.free_slabs + whole][::-1]
        c.lent_slabs += whole
        c.used[slabs] = c.per_slab
        pages = np.arange(c.per_slab, dtype=np.int32)
        parts.append(np.add.outer(slabs * c.per_slab, pages).ravel().astype(np.int32))
        return whole * c.per_slab

    def _borrow(self, c: SizeClass) -> int:
        self.free_slabs -= 1
        c.lent_slabs += 1
        c.free_pages += c.per_slab
        return int(self._free[self.free_slabs])

    def _take(self, c: SizeClass, slab: int, n: int, parts: list[Ids]) -> int:
        free = c.free_in(slab)
        taken = free[:n]
        # The caller marks them held; until then they must not look free to the next `free_in`.
        c.held[taken] = 1
        c.file(slab, len(free) - len(taken), len(free))
        c.used[slab] += len(taken)
        c.free_pages -= len(taken)
        parts.append(taken)
        return len(taken)

    def retain(self, cls: int, ids: Ids) -> int:
        """Add one hold to each page; the pages must be cached or held. Returns how many nobody held."""
        c = self.classes[cls]
        fresh = loops.retain(c.held, c.kept, ids)
        c.cached_pages -= fresh
        c.held_pages += fresh
        return fresh

    def release(self, cls: int, ids: Ids) -> tuple[int, int]:
        """Drop one hold of each page. Returns how many pages nobody holds now, and how many of those
        are free again because the cache does not keep them."""
        c = self.classes[cls]
        idle, freed = loops.release(c.held, c.kept, ids, c.freed)
        c.held_pages -= idle
        c.cached_pages += idle - freed
        if freed:
            self._free_pages(c, c.freed[:freed])
        return idle, freed

    # -- the cache ---------------------------------------------------------------------------

    def keep(self, cls: int, ids: Ids) -> None:
        """The cache keeps each page once more; the pages must be held or kept already."""
        c = self.classes[cls]
        loops.keep(c.held, c.kept, ids)

    def drop(self, cls: int, ids: Ids) -> int:
        """The cache lets each page go once; returns how many became free."""
        c = self.classes[cls]
        freed = loops.drop(c.held, c.kept, ids, c.freed)
        if freed:
            c.cached_pages -= freed
            self._free_pages(c, c.freed[:freed])
        return freed

    def _free_pages(self, c: SizeClass, ids: Ids) -> None:
        if c.per_slab == 1:
            self._return_slabs(c, ids)
            return
        slabs, counts = np.unique(ids // c.per_slab, return_counts=True)
        used = c.used[slabs]
        left = used - counts
        c.used[slabs] = left
        emptied = slabs[left == 0]
        c.free_pages += ids.size - emptied.size * c.per_slab
        # A slab that was full and is empty now was in no list and goes to none.
        for k in np.flatnonzero((used < c.per_slab) | (left > 0)).tolist():
            c.file(int(slabs[k]), c.per_slab - int(left[k]), c.per_slab - int(used[k]))
        if emptied.size:
            self._return_slabs(c, emptied)

    def _return_slabs(self, c: SizeClass, slabs: Ids) -> None:
        free, n = self.free_slabs, len(slabs)
        self._free[free : free + n] = slabs[::-1]
        self.free_slabs = free + n
        c.lent_slabs -= n

    # -- moving pages together -----------------------------------------------------------------

    def movable(self, cls: int) -> int | None:
        """The partly used slab that is cheapest to empty into the class's other free pages, or None."""
        c = self.classes[cls]
        for free in range(c.per_slab - 1, 0, -1):
            slab = next((slab for slab in c.partial[free] if slab not in c.fixed), None)
            if slab is not None:
                return slab if c.free_pages - free >= c.per_slab - free else None
        return None

    def fix(self, cls: int, ids: Ids, count: int) -> None:
        """Pages that must not move (`count` 1), or may again (-1)."""
        c = self.classes[cls]
        if c.per_slab > 1:
            for slab in (ids // c.per_slab).tolist():
                c.fixed[slab] += count
                if not c.fixed[slab]:
                    del c.fixed[slab]

    def move_out(self, cls: int, slab: int, renumber: Callable[[Ids, Ids], None]) -> None:
        """Empty a slab: its pages get new ids elsewhere with the same holds, `renumber(old, new)` tells
        their owners, and the slab is free. The caller has the bytes copied."""
        c = self.classes[cls]
        start = slab * c.per_slab
        every = np.arange(start, start + c.per_slab, dtype=np.int32)
        old = every[(c.held[every] > 0) | (c.kept[every] > 0)]
        free = c.per_slab - old.size
        # Hide the slab from the search for room.
        c.file(slab, 0, free)
        c.free_pages -= free
        lent, self.free_slabs = self.free_slabs, 0
        new = self._allocate_within(c, old.size, 0)
        self.free_slabs = lent
        c.held[new], c.kept[new] = c.held[old], c.kept[old]
        renumber(old, new)
        c.held[old] = c.kept[old] = c.used[slab] = 0
        self._return_slabs(c, np.array([slab], np.int32))

    # -- growing and shrinking -----------------------------------------------------------------

    def absent(self, n: int) -> Ids:
        """`n` slabs to give memory to before they `grow` the pool, the lowest first. O(reserved), as are
        `grow` and `shrink`."""
        absent = np.sort(self._free[self.slabs - 1 :])
        if not 0 <= n <= absent.size:
            raise ValueError(
                f"cannot grow by {n} slabs: {self.slabs} of {self.reserved} reserved are in the pool, so ask for "
                f"{absent.size} at most or reserve more"
            )
        return absent[:n]

    def grow(self, slabs: Iterable[int]) -> None:
        """Absent slabs that have memory now may be lent from here on."""
        coming = np.unique(np.fromiter(slabs, np.int64))
        absent = self._free[self.slabs - 1 :]
        wrong = np.setdiff1d(coming, absent)
        if wrong.size:
            raise ValueError(f"slab {wrong[0]} is not absent: `absent` names slabs that can come")
        rest = absent[~np.isin(absent, coming)]
        self._free[self.free_slabs : self.free_slabs + coming.size] = coming[::-1]
        self.free_slabs += coming.size
        self.slabs += coming.size
        self._free[self.slabs - 1 :] = rest

    def shrink(self, n: int, spared: Collection[int] = ()) -> Ids:
        """Take out up to `n` free slabs, the highest first, but none of `spared`; returns those taken."""
        if n < 0:
            raise ValueError(f"cannot shrink by {n} slabs")
        free = self._free[: self.free_slabs]
        loose = np.setdiff1d(free, np.fromiter(spared, np.int32))
        taken = loose[max(0, loose.size - n) :]
        left = free[~np.isin(free, taken)]
        self.free_slabs = left.size
        self._free[: left.size] = left
        self.slabs -= taken.size
        self._free[self.slabs - 1 : self.slabs - 1 + taken.size] = taken
        self._slack = 0  # what `lacking` counted may be gone
        return taken

    # -- truth -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount everything; raises AssertionError on the first lie. Walks the pool: for tests and idle time."""
        owners = np.zeros(self.reserved, np.int32)
        for c in self.classes:
            held, cached = int((c.held > 0).sum()), int(((c.held == 0) & (c.kept > 0)).sum())
            assert (c.held >= 0).all() and (c.kept >= 0).all(), f"class {c.index}: negative count"
            assert held == c.held_pages, f"class {c.index}: {held} pages held, counted {c.held_pages}"
            assert cached == c.cached_pages, (
                f"class {c.index}: {cached} pages cached, counted {c.cached_pages}"
            )
            total = c.lent_slabs * c.per_slab
            assert held + cached + c.free_pages == total, f"class {c.index}: pages are not conserved"
            busy = ((c.held > 0) | (c.kept > 0)).reshape(self.reserved, c.per_slab).sum(1)
            assert int((busy > 0).sum()) == c.lent_slabs, f"class {c.index}: lent slabs are miscounted"
            owners += busy > 0
            if c.per_slab > 1:
                assert (busy == c.used).all(), f"class {c.index}: used counts are wrong"
                for free, slabs in enumerate(c.partial):
                    assert all(c.per_slab - int(c.used[s]) == free for s in slabs), (
                        f"class {c.index}: partial lists"
                    )
                assert sum(map(len, c.partial)) == int(((busy > 0) & (busy < c.per_slab)).sum())
        lent = int(owners.sum())
        assert lent + self.free_slabs == self.slabs - 1, "slabs are not conserved"
        np.add.at(owners, self._free[: self.free_slabs], 1)
        np.add.at(owners, self._free[self.slabs - 1 :], 1)
        assert not owners[0], "slab 0 is lent, free or absent"
        wrong = np.flatnonzero(owners[1:] != 1) + 1
        assert not wrong.size, f"slabs {wrong[:8]} are not one of lent, free and absent"

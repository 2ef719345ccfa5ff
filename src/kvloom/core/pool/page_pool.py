"""Page pool: slabs cut into pages of several sizes, with two reference counts per page.

`in_use` counts the references of sequences, pins and transfers. `cached` counts the entries of the prefix cache that
have the page. The two counts define the state of a page. The pool counts the pages in each state:

| state  | `in_use` (sequences, pins, transfers) | `cached` (entries of the prefix cache) |
|--------|---------------------------------------|----------------------------------------|
| free   | 0                                     | 0                                      |
| cached | 0                                     | > 0                                    |
| in use | > 0                                   | any                                    |

Groups whose pages have the same stride share one size class, so they can use each other's slabs. Slab 0 is never used.
Page id 0 means "no page" in every table, and padding may refer to it. Unbacked slabs have reserved addresses but no
memory. `grow` makes them usable. The pool does not depend on tokens, hashes or policies, and moves no bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from . import loops

__all__ = ["PagePool", "SizeClass"]

Ids = npt.NDArray[np.int32]
"""An array of page ids."""
Index = npt.NDArray[np.intp]


class SizeClass:
    """The pages of one size (stride). A slab has `per_slab` pages of this class."""

    __slots__ = (
        "cached",
        "cached_pages",
        "fixed",
        "free_pages",
        "freed",
        "in_use",
        "in_use_pages",
        "index",
        "partial",
        "per_slab",
        "slabs_in_use",
        "used",
    )

    def __init__(self, index: int, per_slab: int, slabs: int) -> None:
        self.index = index
        self.per_slab = per_slab
        self.in_use: Ids = np.zeros(slabs * per_slab, np.int32)
        self.cached: Ids = np.zeros(slabs * per_slab, np.int32)
        self.freed: Ids = np.zeros(slabs * per_slab, np.int32)  # output buffer of the loops
        self.in_use_pages = 0
        self.cached_pages = 0
        self.free_pages = 0  # free pages in partly used slabs; always 0 if a slab is one page
        self.slabs_in_use = 0
        # Only if a slab has several pages: used pages per slab, and lists of partly used slabs by their
        # number of free pages.
        several = per_slab > 1
        self.used: Ids = np.zeros(slabs if several else 0, np.int32)
        self.partial: list[dict[int, None]] = [{} for _ in range(per_slab)] if several else []
        self.fixed: Counter[int] = Counter()  # number of pages that compaction must not move, by slab

    def free_in(self, slab: int) -> Ids:
        """Return the free pages of a slab."""
        start = slab * self.per_slab
        stop = start + self.per_slab
        counts = self.in_use[start:stop] | self.cached[start:stop]
        free: Ids = ((counts == 0).nonzero()[0] + start).astype(np.int32)
        return free

    def file(self, slab: int, free: int, before: int) -> None:
        """Move a slab between the lists of partly used slabs. There is one list for each number of free pages.
        `before` is the slab's old number of free pages, and `free` the new number."""
        if 0 < before < self.per_slab:
            del self.partial[before][slab]
        if 0 < free < self.per_slab:
            self.partial[free][slab] = None


def _count_each(values: Ids) -> tuple[Ids, Index]:
    """Return the distinct values in ascending order, and how often each of them occurs. There must be at least one
    value. The slab numbers of freed pages are nearly sorted. For such values, a stable sort is faster than
    `np.unique`."""
    values = np.sort(values, kind="stable")
    is_last = np.ones(values.size, np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_last[:-1])
    last = is_last.nonzero()[0]
    counts = last.copy()
    counts[0] += 1
    counts[1:] -= last[:-1]
    return values[last], counts


class PagePool:
    """A pool of `slabs` slabs, which can grow to `reserved` slabs, with pages of several sizes. `pages_per_slab` has
    one number per layer group. All calls take int32 arrays of page ids. Id 0 is skipped. If a call raises, it has
    changed nothing. Unless stated otherwise, a call takes O(1) time per page.
    """

    def __init__(self, pages_per_slab: Sequence[int], slabs: int, reserved: int | None = None) -> None:
        if slabs < 2:
            raise ValueError(
                f"a pool of {slabs} slabs has none to use: slab 0 is reserved, so give it 2 or more"
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
        self._plain = tuple(sizes) == (1,)  # every slab is one page
        # |free slabs|gap, as long as the number of used slabs|unbacked slabs|. Low slabs are used first.
        ids = np.arange(reserved, dtype=np.int32)
        self._free: Ids = np.concatenate((ids[slabs - 1 : 0 : -1], ids[slabs:]))
        self.free_slabs = slabs - 1
        self._slack = 0

    # -- capacity ----------------------------------------------------------------------------

    def missing_slabs(self, needs: Sequence[int], more: int = 0) -> int:
        """Return how many slabs are missing for `needs[c]` + `more` pages of each class c. Return 0 if all pages fit.
        The calculation assumes that all cached pages are evicted and all slabs compacted. O(classes).
        """
        missing = self.fewest_slabs(needs, more) - (self.slabs - 1)
        return missing if missing > 0 else 0

    def fewest_slabs(self, needs: Sequence[int], more: int = 0) -> int:
        """Return the smallest number of slabs that can contain the pages in use and `needs[c]` + `more` further pages
        of each class c. The calculation assumes that all slabs are compacted."""
        slabs = 0
        for c in self.classes:
            slabs -= -(c.in_use_pages + needs[c.index] + more) // c.per_slab
        return slabs

    def slabs_short(self, needs: Sequence[int]) -> int:
        """Return the number of slabs that must become free before `allocate` can return `needs[c]` pages of each class
        c.

        Also records how many free slabs this allocation would leave. If it leaves some, `allocate` may use a whole free
        slab for one sequence, so that the pages of the sequence stay together.
        """
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
        """Return `n` free pages of the size class with index `cls`, each with one reference. If fewer pages are free,
        return None and change nothing.

        If slabs have several pages, free pages in the slab of page `near` are taken first. After that, while many slabs
        are free, pages come from free slabs. If few slabs are free, partly used slabs are filled.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages; give 0 or more")
        c = self.classes[cls]
        if c.per_slab == 1:
            free = self.free_slabs
            if n > free:
                return None
            self.free_slabs = free - n
            ids = self._free[free - n : free][
                ::-1
            ].copy()  # ascending, because adjacent pages are copied at once
            c.slabs_in_use += n
            loops.allocate(c.in_use, c.cached, ids)
        else:
            if n > c.free_pages + self.free_slabs * c.per_slab:
                return None
            ids = self._allocate_within(c, n, near)
        c.in_use_pages += n
        return ids

    def _allocate_within(self, c: SizeClass, n: int, near: int) -> Ids:
        """Return `n` free pages, each with one reference, for a size class whose slabs have several pages. The choice
        of slabs is that of `allocate`."""
        parts: list[Ids] = []
        slab = near // c.per_slab
        if near and 0 < c.used[slab] < c.per_slab:
            n -= self._take(c, slab, n, parts)
        while n:
            # While many slabs are free, keep the pages of a sequence together. Otherwise fill partly used
            # slabs.
            must = max(0, -(-(n - c.free_pages) // c.per_slab))
            spare = self._slack if self.free_slabs > self.slabs >> 3 else 0
            fresh = min(-(-n // c.per_slab), must + max(0, spare))
            self._slack -= max(0, fresh - must)
            whole = min(n // c.per_slab, fresh)
            if whole:
                n -= self._take_whole(c, whole, parts)
            elif fresh:
                n -= self._take(c, self._take_slab(c), n, parts)
            else:
                found = next((p for p in c.partial[n:] if p), None) or next(
                    p for p in reversed(c.partial) if p
                )
                n -= self._take(c, next(iter(found)), n, parts)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def _take_whole(self, c: SizeClass, whole: int, parts: list[Ids]) -> int:
        self.free_slabs -= whole
        slabs = self._free[self.free_slabs : self.free_slabs + whole][::-1]
        c.slabs_in_use += whole
        c.used[slabs] = c.per_slab
        c.in_use.reshape(-1, c.per_slab)[slabs] = 1
        pages = np.arange(c.per_slab, dtype=np.int32)
        parts.append(np.add.outer(slabs * c.per_slab, pages).ravel())
        return whole * c.per_slab

    def _take_slab(self, c: SizeClass) -> int:
        self.free_slabs -= 1
        c.slabs_in_use += 1
        c.free_pages += c.per_slab
        return int(self._free[self.free_slabs])

    def _take(self, c: SizeClass, slab: int, n: int, parts: list[Ids]) -> int:
        free = c.free_in(slab)
        taken = free[:n]
        c.in_use[taken] = 1
        c.file(slab, len(free) - len(taken), len(free))
        c.used[slab] += len(taken)
        c.free_pages -= len(taken)
        parts.append(taken)
        return len(taken)

    def retain(self, cls: int, ids: Ids) -> int:
        """Add one reference to each page. `cls` is the index of the size class of the pages. The pages must be cached
        or in use. Return how many of them were cached before, and are now in use."""
        c = self.classes[cls]
        fresh = loops.retain(c.in_use, c.cached, ids)
        c.cached_pages -= fresh
        c.in_use_pages += fresh
        return fresh

    def release(self, cls: int, ids: Ids) -> tuple[int, int]:
        """Remove one reference of a sequence, pin or transfer from each page. `cls` is the index of the size class of
        the pages. Return two numbers: the pages that were in use and are now cached or free, and how many of these
        pages are free."""
        c = self.classes[cls]
        idle, freed = loops.release(c.in_use, c.cached, ids, c.freed)
        c.in_use_pages -= idle
        c.cached_pages += idle - freed
        if freed:
            self._free_pages(c, c.freed[:freed])
        return idle, freed

    # -- the cache ---------------------------------------------------------------------------

    def add_cached(self, cls: int, ids: Ids) -> None:
        """Count one more prefix cache entry for each page of the size class with index `cls`. The pages must be in use
        or cached."""
        c = self.classes[cls]
        loops.add_cached(c.in_use, c.cached, ids)

    def drop_cached(self, cls: int, ids: Ids) -> int:
        """Count one prefix cache entry fewer for each page of the size class with index `cls`. Return how many pages
        became free."""
        c = self.classes[cls]
        freed = loops.drop_cached(c.in_use, c.cached, ids, c.freed)
        if freed:
            c.cached_pages -= freed
            self._free_pages(c, c.freed[:freed])
        return freed

    def _free_pages(self, c: SizeClass, ids: Ids) -> None:
        if c.per_slab == 1:
            self._return_slabs(c, ids)
            return
        slabs, counts = _count_each(ids // c.per_slab)
        used = c.used[slabs]
        left = used - counts
        c.used[slabs] = left
        emptied = slabs[left == 0]
        c.free_pages += ids.size - emptied.size * c.per_slab
        # A slab that was full and is now empty is in no list, before and after.
        for k in np.flatnonzero((used < c.per_slab) | (left > 0)).tolist():
            c.file(int(slabs[k]), c.per_slab - int(left[k]), c.per_slab - int(used[k]))
        if emptied.size:
            self._return_slabs(c, emptied)

    def _return_slabs(self, c: SizeClass, slabs: Ids) -> None:
        free, n = self.free_slabs, len(slabs)
        self._free[free : free + n] = slabs[::-1]
        self.free_slabs = free + n
        c.slabs_in_use -= n

    # -- compaction ----------------------------------------------------------------------------

    def movable(self, cls: int) -> int | None:
        """Return the slab that compaction should empty. This is the partly used slab of the size class with index `cls`
        that has the fewest pages to move. Return None if there is no such slab, or if its pages do not fit into the
        free pages of other slabs of the class."""
        c = self.classes[cls]
        for free in range(c.per_slab - 1, 0, -1):
            slab = next((slab for slab in c.partial[free] if slab not in c.fixed), None)
            if slab is not None:
                return slab if c.free_pages - free >= c.per_slab - free else None
        return None

    def pin_in_place(self, cls: int, ids: Ids, count: int) -> None:
        """Forbid compaction to move pages of the size class with index `cls` (`count` is 1), or allow the move again
        (`count` is -1)."""
        c = self.classes[cls]
        if c.per_slab > 1:
            for slab in (ids // c.per_slab).tolist():
                c.fixed[slab] += count
                if not c.fixed[slab]:
                    del c.fixed[slab]

    def numbers(self, cls: int, pages: Ids) -> list[int]:
        """Return a number for each page of size class `cls`. Pages of different classes have different numbers."""
        found: list[int] = (pages.astype(np.int64) * len(self.classes) + cls).tolist()
        return found

    def move_out(self, cls: int, slab: int, renumber: Callable[[Ids, Ids], None]) -> None:
        """Move all pages out of a slab of the size class with index `cls`, so that the slab becomes free. The pages get
        new ids and keep their counts. Calls `renumber(old, new)`, which must update all references and queue the
        copies."""
        c = self.classes[cls]
        start = slab * c.per_slab
        every = np.arange(start, start + c.per_slab, dtype=np.int32)
        old = every[(c.in_use[every] > 0) | (c.cached[every] > 0)]
        free = c.per_slab - old.size
        # Hide the slab from the search for free pages.
        c.file(slab, 0, free)
        c.free_pages -= free
        free_slabs, self.free_slabs = self.free_slabs, 0
        new = self._allocate_within(c, old.size, 0)
        self.free_slabs = free_slabs
        c.in_use[new], c.cached[new] = c.in_use[old], c.cached[old]
        renumber(old, new)
        c.in_use[old] = c.cached[old] = c.used[slab] = 0
        self._return_slabs(c, np.array([slab], np.int32))

    # -- growing and shrinking -----------------------------------------------------------------

    def unbacked_slabs(self, n: int) -> Ids:
        """Return the `n` lowest slabs without memory. O(reserved), like `grow` and `shrink`."""
        unbacked = np.sort(self._free[self.slabs - 1 :])
        if not 0 <= n <= unbacked.size:
            raise ValueError(
                f"cannot grow by {n} slabs: {self.slabs} of {self.reserved} reserved are in the pool, so ask for "
                f"{unbacked.size} at most or reserve more"
            )
        return unbacked[:n]

    def grow(self, slabs: Iterable[int]) -> None:
        """Add unbacked slabs that now have memory."""
        added = np.unique(np.fromiter(slabs, np.int64))
        unbacked = self._free[self.slabs - 1 :]
        wrong = np.setdiff1d(added, unbacked)
        if wrong.size:
            raise ValueError(
                f"slab {wrong[0]} is not unbacked; `unbacked_slabs` returns the slabs that can be added"
            )
        rest = unbacked[~np.isin(unbacked, added)]
        self._free[self.free_slabs : self.free_slabs + added.size] = added[::-1]
        self.free_slabs += added.size
        self.slabs += added.size
        self._free[self.slabs - 1 :] = rest

    def shrink(self, n: int, spared: Collection[int] = ()) -> Ids:
        """Remove up to `n` free slabs and return their numbers. The slabs with the highest numbers are removed first.
        Slabs in `spared` are not removed."""
        if n < 0:
            raise ValueError(f"cannot shrink by {n} slabs; give 0 or more")
        free = self._free[: self.free_slabs]
        loose = np.setdiff1d(free, np.fromiter(spared, np.int32))
        taken = loose[max(0, loose.size - n) :]
        left = free[~np.isin(free, taken)]
        self.free_slabs = left.size
        self._free[: left.size] = left
        self.slabs -= taken.size
        self._free[self.slabs - 1 : self.slabs - 1 + taken.size] = taken
        self._slack = 0  # the free slabs that `slabs_short` counted may be removed now
        return taken

    # -- checking ------------------------------------------------------------------------------

    def check(self) -> None:
        """Count every page again and compare with the pool's own counts. Raises AssertionError at the first difference.
        O(pool), so only for tests and idle time."""
        owners = np.zeros(self.reserved, np.int32)
        for c in self.classes:
            in_use, cached = int((c.in_use > 0).sum()), int(((c.in_use == 0) & (c.cached > 0)).sum())
            assert (c.in_use >= 0).all() and (c.cached >= 0).all(), f"class {c.index}: negative count"
            assert in_use == c.in_use_pages, (
                f"class {c.index}: {in_use} pages in use, counted {c.in_use_pages}"
            )
            assert cached == c.cached_pages, (
                f"class {c.index}: {cached} pages cached, counted {c.cached_pages}"
            )
            total = c.slabs_in_use * c.per_slab
            assert in_use + cached + c.free_pages == total, f"class {c.index}: pages are not conserved"
            busy = ((c.in_use > 0) | (c.cached > 0)).reshape(self.reserved, c.per_slab).sum(1)
            assert int((busy > 0).sum()) == c.slabs_in_use, f"class {c.index}: used slabs are miscounted"
            owners += busy > 0
            if c.per_slab > 1:
                assert (busy == c.used).all(), f"class {c.index}: used counts are wrong"
                for free, slabs in enumerate(c.partial):
                    assert all(c.per_slab - int(c.used[s]) == free for s in slabs), (
                        f"class {c.index}: partial lists"
                    )
                assert sum(map(len, c.partial)) == int(((busy > 0) & (busy < c.per_slab)).sum())
        used = int(owners.sum())
        assert used + self.free_slabs == self.slabs - 1, "slabs are not conserved"
        np.add.at(owners, self._free[: self.free_slabs], 1)
        np.add.at(owners, self._free[self.slabs - 1 :], 1)
        assert not owners[0], "slab 0 is used, free or unbacked"
        wrong = np.flatnonzero(owners[1:] != 1) + 1
        assert not wrong.size, f"slabs {wrong[:8]} are not one of used, free and unbacked"

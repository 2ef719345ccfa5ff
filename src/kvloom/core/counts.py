"""Counting holds and keeps of pages in arrays: the plain twin of the native loops, used without them.

All take `held` and `kept` (int32), one count a page, and int32 page ids, of which 0 means no
page. A call that would break a count raises ValueError naming the page, and changes nothing.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["any_negative", "drop", "keep", "lend", "plain_ids", "release", "retain", "unwatched", "wrong_row"]

Ids = npt.NDArray[np.int32]
At = npt.NDArray[np.intp]
Numbers = TypeVar("Numbers", list[int], tuple[int, ...])


def lend(held: Ids, kept: Ids, ids: Ids) -> None:
    """The first hold of each page, none of which may be in use or listed twice."""
    at, once = _real(ids)
    _refuse(at, (held[at] != 0) | (kept[at] != 0), "is not free and cannot be lent")
    if not once:
        listed = at.tolist()
        again = np.array([page in listed[:place] for place, page in enumerate(listed)])
        _refuse(at, again, "is not free and cannot be lent")
    held[at] = 1


def retain(held: Ids, kept: Ids, ids: Ids) -> int:
    """One more hold of each page; returns how many nobody held before."""
    at, once = _real(ids)
    idle = held[at] == 0
    _refuse(at, idle & (kept[at] == 0), "is free; only a live page can be held")
    fresh = _once(at[idle], once).size
    _add(held, at, 1, once)
    return fresh


def release(held: Ids, kept: Ids, ids: Ids, out: Ids) -> tuple[int, int]:
    """One hold less of each page; returns how many nobody holds now, and how many of those are free and
    written to `out`."""
    at, once = _real(ids)
    left = _less(held, at, once, "is released more often than it was held")
    idle = _once(at[left == 0], once)
    free = idle[kept[idle] == 0]
    out[: free.size] = free
    return idle.size, free.size


def keep(held: Ids, kept: Ids, ids: Ids) -> None:
    """The cache keeps each page once more."""
    at, once = _real(ids)
    _refuse(at, (held[at] == 0) & (kept[at] == 0), "is free and cannot be kept")
    _add(kept, at, 1, once)


def drop(held: Ids, kept: Ids, ids: Ids, out: Ids) -> int:
    """The cache lets each page go once; returns how many are free now and written to `out`."""
    at, once = _real(ids)
    left = _less(kept, at, once, "is dropped more often than it was kept")
    free = _once(at[(left == 0) & (held[at] == 0)], once)
    out[: free.size] = free
    return free.size


def any_negative(data: bytes) -> bool:
    """Whether a run of int32s has a negative one."""
    return len(data) > 0 and bool(np.frombuffer(data, "<i4").min() < 0)


def plain_ids(given: object) -> bytearray | None:
    """A list or tuple of plain ints from 0 on as int32s; None for anything else, or where one does not fit."""
    if type(given) not in (list, tuple) or not set(map(type, given)) <= {int}:  # type: ignore[call-overload]
        return None
    try:
        ids = np.fromiter(given, np.int64, len(given))  # type: ignore[call-overload, arg-type]
    except OverflowError:
        return None
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        return None
    return bytearray(ids.astype(np.int32).tobytes())


def unwatched(numbers: Numbers) -> Numbers:
    """A list or tuple that holds plain numbers for as long as it lives: the native twin spares the collector of cycles the
    walk through it, which for long prompts costs more than making them."""
    return numbers


def wrong_row(rows: npt.NDArray[np.int64], is_open: npt.NDArray[np.bool_]) -> int:
    """The place of the first row that is not open or was named before, or -1."""
    seen: set[int] = set()
    for place, row in enumerate(rows.tolist()):
        if not 0 <= row < is_open.size or not is_open[row] or row in seen:
            return place
        seen.add(row)
    return -1


def _real(ids: Ids) -> tuple[At, bool]:
    """The pages, and whether each is listed once: then adding to them all at once does."""
    at: At = ids.ravel().astype(np.intp)
    if not at.all():
        at = at[at != 0]
    return at, len(set(at.tolist())) == at.size


def _once(at: At, once: bool) -> At:
    """The pages in the order they are listed, each once."""
    if once:
        return at
    first: At = np.sort(np.unique(at, return_index=True)[1])
    return at[first]


def _add(counts: Ids, at: At, one: int, once: bool) -> None:
    if once:
        counts[at] += one
    else:
        np.add.at(counts, at, one)


def _less(counts: Ids, at: At, once: bool, why: str) -> Ids:
    """One less of each page; returns what is left of each, and changes nothing where that is below 0."""
    _add(counts, at, -1, once)
    left: Ids = counts[at]
    short = left < 0
    if short.any():
        _add(counts, at, 1, once)
        _refuse(at, short, why)
    return left


def _refuse(at: At, wrong: npt.NDArray[np.bool_], why: str) -> None:
    if wrong.any():
        raise ValueError(f"page {at[wrong][0]} {why}")

"""Page counts in numpy. Used if the native loops are not built. The results are the same.

All functions take two int32 arrays with one count per page. `in_use` counts references of sequences, pins and
transfers. `cached` counts entries of the prefix cache. The functions also take int32 page ids. Id 0 is skipped. A call
that the counts do not allow, such as the allocation of a page that is not free, raises ValueError. The error names the
page, and no count is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = [
    "add_cached",
    "allocate",
    "any_negative",
    "drop_cached",
    "leading",
    "plain_ids",
    "release",
    "retain",
    "unwatched",
    "wrong_row",
]

Ids = npt.NDArray[np.int32]
At = npt.NDArray[np.intp]
Numbers = TypeVar("Numbers", list[int], tuple[int, ...])


def allocate(in_use: Ids, cached: Ids, ids: Ids) -> None:
    """Give each page its first reference. No page may be in use, cached or listed twice."""
    at, once = _real(ids)
    _refuse(at, (in_use[at] != 0) | (cached[at] != 0), "is not free and cannot be allocated")
    if not once:
        listed = at.tolist()
        again = np.array([page in listed[:place] for place, page in enumerate(listed)])
        _refuse(at, again, "is not free and cannot be allocated")
    in_use[at] = 1


def retain(in_use: Ids, cached: Ids, ids: Ids) -> int:
    """Add one reference to each page. Return how many pages were cached before, and are now in use."""
    at, once = _real(ids)
    idle = in_use[at] == 0
    _refuse(at, idle & (cached[at] == 0), "is free; only a cached page or a page in use can be retained")
    fresh = _once(at[idle], once).size
    _add(in_use, at, 1, once)
    return fresh


def release(in_use: Ids, cached: Ids, ids: Ids, out: Ids) -> tuple[int, int]:
    """Remove one reference from each page. Return two numbers: the pages that were in use and are now cached or free,
    and how many of these pages are free. Writes the ids of the free pages to `out`."""
    at, once = _real(ids)
    left = _less(in_use, at, once, "is released more often than it was retained")
    idle = _once(at[left == 0], once)
    free = idle[cached[idle] == 0]
    out[: free.size] = free
    return idle.size, free.size


def add_cached(in_use: Ids, cached: Ids, ids: Ids) -> None:
    """Count one more prefix cache entry for each page."""
    at, once = _real(ids)
    _refuse(at, (in_use[at] == 0) & (cached[at] == 0), "is free and cannot be counted as cached")
    _add(cached, at, 1, once)


def drop_cached(in_use: Ids, cached: Ids, ids: Ids, out: Ids) -> int:
    """Count one prefix cache entry fewer for each page. Return how many pages are now free, and writes the ids of
    these pages to `out`."""
    at, once = _real(ids)
    left = _less(cached, at, once, "is dropped more often than it was cached")
    free = _once(at[(left == 0) & (in_use[at] == 0)], once)
    out[: free.size] = free
    return free.size


def any_negative(data: bytes) -> bool:
    """Return whether any of the int32 values in `data` is negative."""
    return len(data) > 0 and bool(np.frombuffer(data, "<i4").min() < 0)


def plain_ids(given: object) -> bytearray | None:
    """Return a list or tuple of non-negative ints as int32 bytes. Return None for any other object, or if a value
    does not fit into int32."""
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
    """Return `numbers` unchanged. The list must contain only plain numbers. The native version also removes the
    list from the garbage collector, so that a collection does not walk over long prompts.
    """
    return numbers


def wrong_row(rows: npt.NDArray[np.int64], is_open: npt.NDArray[np.bool_]) -> int:
    """Return the index in `rows` of the first row number that is not open or occurs twice, or -1 if there is none."""
    seen: set[int] = set()
    for place, row in enumerate(rows.tolist()):
        if not 0 <= row < is_open.size or not is_open[row] or row in seen:
            return place
        seen.add(row)
    return -1


def _real(ids: Ids) -> tuple[At, bool]:
    """Return the page ids without zeros, and whether all of them differ."""
    at: At = ids.ravel().astype(np.intp)
    if not at.all():
        at = at[at != 0]
    return at, len(set(at.tolist())) == at.size


def _once(at: At, once: bool) -> At:
    """Return each of the page ids `at` once, in the order of the first occurrence. `once` states that no id occurs
    twice."""
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
    """Reduce the count of each page in `at`, once for each time that the page is listed. Return the new counts of
    `at`. If a count would be negative, raises ValueError and changes nothing. `why` is the end of the error message."""
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


def leading(masks: list[int], places: int) -> list[int]:
    """Return, for each of the lowest `places` bits, how many masks at the start of `masks` have this bit set."""
    found = [len(masks)] * places
    alive = (1 << places) - 1
    for at, mask in enumerate(masks):
        gone = alive & ~mask
        if gone:
            alive ^= gone
            while gone:
                lowest = gone & -gone
                found[lowest.bit_length() - 1] = at
                gone ^= lowest
            if not alive:
                break
    return found


def leading_of(known: Mapping[Any, int], keys: Sequence[Any], places: int, scale: int) -> list[int]:
    """Look up the mask of each key in `known`, with 0 for a missing key. Return the result of `leading` for these
    masks, times `scale`."""
    return [count * scale for count in leading([known.get(key, 0) for key in keys], places)]

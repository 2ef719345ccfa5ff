"""Traffic for the simulator: arrival times, and the blocks of each request as numbers.

Two requests have the same block number if and only if all their tokens up to the end of that block are equal.
Traffic contains no tokens and no text.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

__all__ = ["Blocks", "Request", "Traffic", "number_blocks", "repeat"]

Blocks = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `blocks` are the block numbers of prompt and answer. The first `asked` of them belong to the prompt,
    and only these are looked up. `ending` is the finish reason.
    """

    at: float
    blocks: Blocks
    asked: int
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    session: str | None = None
    ending: str | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in order of arrival. Their blocks have the numbers 0 to `distinct` - 1, and `block_tokens` tokens each.
    `origin` names the files. `model` and `bytes_per_token` are from the recording, if it states them."""

    requests: tuple[Request, ...]
    block_tokens: int
    distinct: int
    origin: str = ""
    model: str = ""
    bytes_per_token: int | None = None
    _asked: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens {self.block_tokens} must be positive")
        object.__setattr__(self, "_asked", sum(r.asked for r in self.requests))

    @property
    def asked(self) -> int:
        """Number of blocks that all requests look up."""
        return self._asked

    @property
    def seconds(self) -> float:
        return self.requests[-1].at - self.requests[0].at if self.requests else 0.0

    @property
    def longest(self) -> int:
        """Number of blocks of the longest request."""
        return max((len(r.blocks) for r in self.requests), default=0)

    @classmethod
    def merged(cls, parts: Sequence[Traffic]) -> Traffic:
        """Return several recordings as one, as if all had run at the same time, each from time 0. Blocks of different
        recordings are never equal, so the blocks of each recording get new numbers."""
        if not parts:
            raise ValueError("no traffic: at least one trace is required")
        sizes = {part.block_tokens for part in parts}
        if len(sizes) > 1:
            named = ", ".join(f"{p.origin}: {p.block_tokens}" for p in parts)
            raise ValueError(f"traces with different block sizes cannot be merged ({named} tokens)")
        if len(parts) == 1:
            return parts[0]
        requests: list[Request] = []
        distinct = 0
        for part in parts:
            for r in part.requests:
                moved = (r.blocks + distinct).astype(np.int32)
                requests.append(
                    Request(
                        r.at,
                        moved,
                        r.asked,
                        r.prompt_tokens,
                        r.output_tokens,
                        r.tenant,
                        r.session,
                        r.ending,
                    )
                )
            distinct += part.distinct
        requests.sort(key=lambda r: r.at)
        origins = ", ".join(p.origin for p in parts)
        models = {(p.model, p.bytes_per_token) for p in parts}
        model, per_token = models.pop() if len(models) == 1 else ("", None)
        return cls(tuple(requests), sizes.pop(), distinct, origins, model, per_token)


def repeat(traffic: Traffic, times: int, seed: int = 0, seconds: float = 60.0) -> Traffic:
    """Return `times` copies of traffic that run at the same time, as if they came from different users. The copies
    share no blocks. Each further copy starts up to `seconds` later, at a random time drawn with `seed`.
    """
    draw = random.Random(seed)
    parts = [traffic]
    for _ in range(times - 1):
        later = draw.uniform(0.0, seconds)
        parts.append(
            replace(traffic, requests=tuple(replace(one, at=one.at + later) for one in traffic.requests))
        )
    return Traffic.merged(parts)


def number_blocks(rows: Iterable[Sequence[int] | npt.NDArray[np.integer]]) -> tuple[list[Blocks], int]:
    """Replace the block ids of each request (`rows`) by numbers from 0 on. Return the numbers of each request, and how
    many different numbers there are. Two blocks get the same number only if their ids, and all blocks before them in
    their requests, are equal. Raises ValueError for an invalid id.

    Usually an id determines all blocks before it, as with hashes of whole prefixes. The blocks are then numbered by
    array operations, in O(n log n). Otherwise a slower Python loop numbers them.
    """
    arrays = [_ids(row) for row in rows]
    ends = np.cumsum([len(a) for a in arrays])
    if not arrays or not ends[-1]:
        return [np.empty(0, np.int32) for _ in arrays], 0
    flat, inverse = np.unique(np.concatenate(arrays), return_inverse=True)
    parent = np.empty(len(inverse), np.int64)
    parent[1:] = inverse[:-1]
    parent[[0, *(e for e in ends[:-1].tolist() if e < len(inverse))]] = -1
    if len(np.unique((parent + 1) * len(flat) + inverse)) != len(flat):
        return _number_paths(arrays)
    numbers = inverse.astype(np.int32)
    return [np.ascontiguousarray(row) for row in np.split(numbers, ends[:-1])], len(flat)


def _ids(row: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    ids = np.asarray(row)
    if ids.ndim == 1 and ids.size == 0:
        return np.empty(0, np.uint64)
    if ids.ndim == 1 and ids.dtype.kind in "fO" and all(type(i) is int and 0 <= i < 2**64 for i in row):
        ids = np.array(row, np.uint64)  # numpy converts mixed sizes to floats
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0:
        raise ValueError(f"block ids must be whole numbers from 0 to 2^64 - 1, got {str(row)[:60]}")
    return ids.astype(np.uint64, copy=False)


def _number_paths(arrays: list[npt.NDArray[np.uint64]]) -> tuple[list[Blocks], int]:
    seen: dict[tuple[int, int], int] = {}
    rows: list[Blocks] = []
    for array in arrays:
        at, row = -1, []
        for block in array.tolist():
            at = seen.setdefault((at, block), len(seen))
            row.append(at)
        rows.append(np.array(row, np.int32))
    return rows, len(seen)

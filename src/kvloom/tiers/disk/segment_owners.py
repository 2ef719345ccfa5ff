"""Whose segments a disk tier has: how large each owner's are, which is written to, and which leaves next.

Pages of tenants without a share lie together in everybody's segments; a tenant with one has segments of its own, so that its
limit is kept by removing files of its own. Knows segments, no files. The appending thread's, but for `used`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping

from kvloom.tiers.aligned_memory import BLOCK
from kvloom.tiers.shares import Account, Share, Shares

from .segment import SHARED_OWNER, Segment, tenant_owner

__all__ = ["SegmentOwner", "SegmentOwners"]

_MAX_PIECES, _MIN_PIECES, _ALL_PIECES = 16, 4, 256
"""Segments that a share is cut into, and all of them together: each is an open file."""
_PIECE_BYTES = 64 << 20
"""A share's segments have this size or more where four of them fit."""


class SegmentOwner(Account):
    """`name` is what its segments say of it; `current` is written to. `used` are bytes of files."""

    __slots__ = ("current", "name", "segment_bytes")

    def __init__(self, name: bytes, share: Share, capacity: int, segment_bytes: int) -> None:
        super().__init__(share, capacity)
        self.name, self.segment_bytes = name, segment_bytes
        self.current: Segment | None = None

    def check_limit(self, segment_bytes: int) -> None:
        """OSError where the share does not hold three such segments: one to write, one to come, one to read."""
        if 3 * segment_bytes > self.limit:
            raise OSError(
                errno.EDQUOT, f"a share of {self.limit} bytes does not hold three segments of {segment_bytes}"
            )


class SegmentOwners:
    """`segments` is the shelf's own table, by number."""

    def __init__(self, segments: Mapping[int, Segment], capacity: int, segment_bytes: int) -> None:
        self._segments, self._capacity, self._segment_bytes = segments, capacity, segment_bytes
        self.shared = SegmentOwner(SHARED_OWNER, Share(), capacity, segment_bytes)
        self._own: dict[bytes, SegmentOwner] = {}

    def __iter__(self) -> Iterator[SegmentOwner]:
        yield self.shared
        yield from self._own.values()

    def set_shares(self, shares: Shares) -> None:
        """Owners as shares say, each with segments of its share's size."""
        pieces = max(_MIN_PIECES, min(_MAX_PIECES, _ALL_PIECES // max(1, len(shares))))
        for tenant, share in shares.items():
            owner = SegmentOwner(tenant_owner(tenant), share, self._capacity, self._segment_bytes)
            part = min(owner.limit, owner.guaranteed or owner.limit)
            piece = max(part // pieces, min(_PIECE_BYTES, part // 4)) // BLOCK * BLOCK
            owner.segment_bytes = max(2 * BLOCK, min(piece, self._segment_bytes))
            if tenant:
                self._own[owner.name] = owner
            else:
                owner.current, self.shared = self.shared.current, owner

    def of_tenant(self, tenant: str) -> SegmentOwner:
        return self._own.get(tenant_owner(tenant), self.shared) if self._own else self.shared

    def owner_of(self, segment: Segment) -> SegmentOwner:
        return self._own.get(segment.owner, self.shared)

    def used_bytes(self, owner: SegmentOwner) -> int:
        """Bytes of an owner's files. O(segments)."""
        owner.used = sum(
            segment.size for segment in self._segments.values() if self.owner_of(segment) is owner
        )
        return owner.used

    def newest_segment(self, owner: SegmentOwner) -> Segment | None:
        """The newest segment that says it is an owner's."""
        own = (segment for segment in self._segments.values() if segment.owner == owner.name)
        return max(own, key=lambda segment: segment.number, default=None)

    def victim(self, owner: SegmentOwner, own: bool, oldest: bool) -> Segment | None:
        """The segment that leaves so that `owner` gets room: the oldest, or the one least recently used, of its own and of
        those who have more than is sure to be theirs; where none of them has any, of all. One that is written to is the last
        choice, and the owner's current never leaves. O(segments)."""
        evictable = {one.name for one in self if one is owner or self.used_bytes(one) > one.guaranteed}

        def order(segment: Segment) -> tuple[bool, bool, int]:
            owning = self.owner_of(segment)
            last = segment.number if oldest else segment.last_used
            return owning.name not in evictable, segment is owning.current, last

        candidates = (
            segment
            for segment in self._segments.values()
            if segment is not owner.current and (not own or self.owner_of(segment) is owner)
        )
        return min(candidates, key=order, default=None)

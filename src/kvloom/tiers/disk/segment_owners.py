"""The owners of a disk tier's segments. Each owner has a segment size and a current segment, which receives
its writes.

A tenant with a share owns its own segments. If the tenant exceeds its limit, the tier evicts some of the
tenant's segments. All tenants without a share have one owner together. Only the appending thread calls
the methods of this module, except `used_bytes`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping

from kvloom.tiers.aligned_memory import BLOCK
from kvloom.tiers.shares import SHARED_OWNER, Account, Share, Shares, tenant_owner

from .segment import Segment

__all__ = ["SegmentOwner", "SegmentOwners"]

_MAX_PIECES, _MIN_PIECES, _ALL_PIECES = 16, 4, 256
"""Largest and smallest number of segments per share, and largest number of segments of all shares together. Each
segment is an open file."""
_PIECE_BYTES = 64 << 20
"""Smallest size of a share's segments in bytes. If a share is too small for four such segments, its segments are
smaller."""


class SegmentOwner(Account):
    """The segments and bytes of one owner: a tenant with a share, or all other tenants together.

    - `name` is the owner id in segment headers.
    - `current` is the segment that receives writes.
    - `used` is the size of all files.
    """

    __slots__ = ("current", "name", "segment_bytes")

    def __init__(self, name: bytes, share: Share, capacity: int, segment_bytes: int) -> None:
        super().__init__(share, capacity)
        self.name, self.segment_bytes = name, segment_bytes
        self.current: Segment | None = None

    def check_limit(self, segment_bytes: int) -> None:
        """Raises OSError if the limit of the share is too small for three segments of this size: the current segment,
        the next segment, and one segment to read."""
        if 3 * segment_bytes > self.limit:
            raise OSError(
                errno.EDQUOT, f"a share of {self.limit} bytes does not fit three segments of {segment_bytes}"
            )


class SegmentOwners:
    """The owners of the segments in a disk tier: one for each tenant with a share, and one for all other tenants.
    `segments` contains all segments of the store, by number."""

    def __init__(self, segments: Mapping[int, Segment], capacity: int, segment_bytes: int) -> None:
        self._segments, self._capacity, self._segment_bytes = segments, capacity, segment_bytes
        self.shared = SegmentOwner(SHARED_OWNER, Share(), capacity, segment_bytes)
        self._own: dict[bytes, SegmentOwner] = {}

    def __iter__(self) -> Iterator[SegmentOwner]:
        yield self.shared
        yield from self._own.values()

    def set_shares(self, shares: Shares) -> None:
        """Create one owner per share, with a segment size that fits the share."""
        pieces = max(_MIN_PIECES, min(_MAX_PIECES, _ALL_PIECES // max(1, len(shares))))
        for tenant, share in shares.items():
            owner = SegmentOwner(tenant_owner(tenant), share, self._capacity, self._segment_bytes)
            part = min(owner.limit, owner.guaranteed or owner.limit)
            piece = max(part // pieces, min(_PIECE_BYTES, part // 4)) // BLOCK * BLOCK
            owner.segment_bytes = max(3 * BLOCK, min(piece, self._segment_bytes))
            if tenant:
                self._own[owner.name] = owner
            else:
                owner.current, self.shared = self.shared.current, owner

    def of_tenant(self, tenant: str) -> SegmentOwner:
        return self._own.get(tenant_owner(tenant), self.shared) if self._own else self.shared

    def owner_of(self, segment: Segment) -> SegmentOwner:
        return self._own.get(segment.owner, self.shared)

    def used_bytes(self, owner: SegmentOwner) -> int:
        """Return the size of an owner's files. O(segments)."""
        owner.used = sum(
            segment.size for segment in self._segments.values() if self.owner_of(segment) is owner
        )
        return owner.used

    def newest_segment(self, owner: SegmentOwner) -> Segment | None:
        """Return the newest segment of this owner, or None."""
        own = (segment for segment in self._segments.values() if segment.owner == owner.name)
        return max(own, key=lambda segment: segment.number, default=None)

    def victim(self, owner: SegmentOwner, own: bool, oldest: bool) -> Segment | None:
        """Return the segment to evict so that `owner` gets space, or None. With `own`, only segments of `owner` are
        considered. The current segment of `owner` is never chosen. O(segments).

        The choice follows these rules, in this order:

        1. Segments of `owner`, and of owners that use more than their guaranteed bytes, come before all others.
        2. Segments to which their owner no longer writes come before current segments.
        3. With `oldest`, the oldest segment comes first, otherwise the least recently used segment.
        """
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

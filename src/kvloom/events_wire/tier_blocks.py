"""Converts the changes of one tier's pages to block events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from kvloom.core import BlockRemoved, BlockStored, Event, unit_hashes

__all__ = ["TierBlocks"]

Changes = Iterable[tuple[bool, bytes, int, bytes]]
"""Changes of pages. A change is a tuple: True if the page was stored or False if it was removed, block hash, layer
group, and fingerprint of the page's form (byte layout)."""


class TierBlocks:
    """The blocks of one tier. Converts changes of the tier's pages to events. Not thread-safe.

    A block may own several pages in a layer group. The block counts as stored in `medium` when the tier has all of
    these pages. Events contain one hash for each unit (HASH_TOKENS tokens) of a block. In a group of `state_groups`,
    a page is the state at the end of its block. Its event contains only the hash of the last unit.

    `take` returns the changes of pages since its last call. `forms` contains, for each group, one fingerprint for each
    page that a block owns. A fingerprint identifies the form (byte layout) of a page. Pages of other forms are ignored.
    """

    def __init__(
        self,
        medium: str,
        take: Callable[[], Changes],
        forms: Mapping[int, Iterable[bytes]],
        state_groups: Container[int] = (),
    ) -> None:
        self.medium, self._take, self._state_groups = medium, take, state_groups
        self._bits = {
            group: {form: 1 << place for place, form in enumerate(each)} for group, each in forms.items()
        }
        self._whole = {group: (1 << len(bits)) - 1 for group, bits in self._bits.items()}
        self._stored: dict[int, dict[bytes, int]] = {group: {} for group in self._bits}
        self._units: dict[
            tuple[int, bytes], tuple[bytes, ...]
        ] = {}  # units of complete blocks with several units
        self._counts: dict[int, Counter[bytes]] = {group: Counter() for group in self._bits}
        """Number of complete blocks that contain each unit. A unit may be part of two blocks: a partial block, and the
        full block that starts with the same tokens."""

    def poll(self) -> list[Event]:
        """Return events for the changes since the last call. Consecutive changes of the same group and kind (stored or
        removed) become one event."""
        events: list[Event] = []
        kind, hashes = (True, -1), list[bytes]()
        for is_stored, block_hash, group, form in self._take():
            bit = self._bits.get(group, {}).get(form)
            if bit is None or not self._apply(is_stored, block_hash, group, bit):
                continue
            if kind != (is_stored, group):
                events += self._event(*kind, hashes)
                kind, hashes = (is_stored, group), []
            hashes += self._count(block_hash, group, is_stored)
        return events + self._event(*kind, hashes)

    def _apply(self, is_stored: bool, block_hash: bytes, group: int, bit: int) -> bool:
        """Record that one page of a block was stored or removed. `bit` stands for the page in the bit mask of the
        block's pages. Return whether this change completes the block, or makes a complete block incomplete."""
        stored, whole = self._stored[group], self._whole[group]
        before = stored.get(block_hash, 0)
        after = before | bit if is_stored else before & ~bit
        if after:
            stored[bytes(block_hash)] = after
        elif before:
            del stored[block_hash]
        return (before == whole) != (after == whole)

    def _count(self, block_hash: bytes, group: int, is_stored: bool) -> list[bytes]:
        """Update the counts of units (HASH_TOKENS tokens each). With `is_stored`, all pages of a block were stored, and
        the result has the hashes of units that the tier did not have before. Without `is_stored`, a page of the block
        was removed, and the result has the hashes of units that the tier no longer has. Counts are needed because a
        full block and a partial block may contain the same unit."""
        name, counts = bytes(block_hash), self._counts[group]
        units: tuple[bytes, ...] = (name,)
        if is_stored:
            if group not in self._state_groups and len(unit_hashes(block_hash)) > 1:
                units = self._units[group, name] = unit_hashes(block_hash)
        else:
            units = self._units.pop((group, name), units)
        changed = []
        for unit in units:
            counts[unit] += 1 if is_stored else -1
            if counts[unit] == is_stored:
                changed.append(unit)
            if not counts[unit]:
                del counts[unit]
        return changed

    def _event(self, is_stored: bool, group: int, hashes: list[bytes]) -> list[Event]:
        if not hashes:
            return []
        if is_stored:
            return [BlockStored(b"", tuple(hashes), (group,), self.medium)]
        return [BlockRemoved(tuple(hashes), (group,), self.medium, "the tier removed the pages")]

    def blocks(self) -> Iterator[BlockStored]:
        """Yield all blocks that the tier has, one event per layer group."""
        for group, counts in self._counts.items():
            if counts:
                yield BlockStored(b"", tuple(counts), (group,), self.medium)

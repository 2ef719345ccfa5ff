"""Rules of tiers in a replay: when a tier gets a block, and which block it evicts.

| rule       | a block is written                              | a tier evicts first                       | as in                     |
|------------|-------------------------------------------------|-------------------------------------------|---------------------------|
| through    | to all tiers, when it is computed               | by the policy of the device               | vLLM and LMCache, if LRU  |
| second-use | to all tiers, when a second request contains it | the least recently used block             | vLLM, `store_threshold=2` |
| back       | to the next tier, when the one before evicts it | the least recently used block             | `host:SIZE?exclusive=0`   |
| exclusive  | like `back`                                     | the last loaded block that the device has | `host:SIZE`               |

The simulator applies `through` itself. This module has the other rules. A tier under these rules is an ordered set of
blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["TIER_RULES", "RuledTiers"]

TIER_RULES = ("through", "second-use", "back", "exclusive")


class _Contents:
    """The blocks of one tier, in the order of eviction."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.written = self.evicted = 0

    def put(self, blocks: Iterable[int]) -> list[int]:
        """Store blocks, or mark them as used if they are stored. Return the evicted blocks."""
        stored, gone = self.blocks, []
        for block in blocks:
            if block in stored:
                stored.move_to_end(block)
            else:
                stored[block] = None
                self.written += 1
        while len(stored) > self.capacity:
            gone.append(stored.popitem(last=False)[0])
        self.evicted += len(gone)
        return gone


class RuledTiers:
    """The tiers below a simulated device, fastest first. `capacities` are in blocks. Call `find` and then `end` for
    each request. Call `evict` when the device evicts blocks."""

    def __init__(self, capacities: Sequence[int], rule: str) -> None:
        if rule not in TIER_RULES[1:]:
            raise ValueError(f"unknown tier rule {rule!r}; known: {', '.join(TIER_RULES)}")
        self.tiers = [_Contents(capacity) for capacity in capacities]
        self.hits: list[list[int]] = [[] for _ in capacities]
        """For each tier and request, the number of blocks that were loaded from the tier."""
        self._rule = rule
        self._seen: set[int] = set()

    def find(self, blocks: Sequence[int]) -> None:
        """Load the leading blocks of a request that the device does not have. `blocks` are its prompt blocks after the
        hit on the device. Each block is loaded from the fastest tier that has it."""
        loaded: list[list[int]] = [[] for _ in self.tiers]
        for block in blocks:
            at = next((at for at, tier in enumerate(self.tiers) if block in tier.blocks), None)
            if at is None:
                break
            loaded[at].append(block)
        for tier, some, hits in zip(self.tiers, loaded, self.hits, strict=True):
            hits.append(len(some))
            for block in reversed(
                some
            ):  # later blocks first, so that the first block of a prompt stays longest
                tier.blocks.move_to_end(block, last=self._rule != "exclusive")

    def evict(self, blocks: Sequence[int]) -> None:
        """Record that the device evicted consecutive blocks of a prompt."""
        if self._rule == "second-use":
            return
        gone = list(reversed(blocks))
        for tier in self.tiers:
            gone = tier.put(gone)

    def end(self, blocks: Sequence[int]) -> None:
        """Record that the request with these blocks has ended."""
        if self._rule == "second-use":
            again = [block for block in reversed(blocks) if block in self._seen]
            for tier in self.tiers:
                tier.put(again[-tier.capacity :])
            self._seen.update(blocks)

"""Shadow LRU: estimates how many tokens LRU would have hit in a cache of the same size. The shadow owns no pages.

LRU keeps the most recently used tokens. One time, the cutoff, therefore describes its content: the tokens that were
used since the cutoff exactly fill the cache. A token would be a hit under LRU if its last use is after the cutoff. The
shadow counts the tokens by the time of their last use, in about a thousand buckets, and moves the cutoff.

    sizes    │ 12 │ 40 │  9 │ 31 │ 25 │ 38 │      tokens by last use, oldest left
              ·········├── fill the cache ──┤
                       cutoff              now

The shadow follows all traffic, not a sample. Tokens that the policy evicted are also counted: ghosts report their uses.
The number of these tokens is an estimate, because the cache no longer has them.

While the policy is off, the cache has the hits of LRU. The shadow then needs predictions: which used tokens would the
policy have kept? The policy is switched on again when the predictions show that it would win.
"""

from __future__ import annotations

import math
from bisect import bisect_right

__all__ = ["ShadowLRU"]

BUCKETS = 1024
"""Approximate number of buckets whose tokens together fill the cache."""
LIMIT = 0.005
"""Largest acceptable loss of hit rate against LRU. 0.005 is half a percentage point."""
OFF_LOSS, ON_LOSS = 0.6 * LIMIT, 0.2 * LIMIT
"""The policy is switched off at a loss of OFF_LOSS, and on again when the loss has faded to ON_LOSS. OFF_LOSS is below
LIMIT, because the loss may grow for a while after the policy is off: the pages that it chose are still cached."""
RETRY_LOSS, PROOF = 0.8 * LIMIT, 2.0
"""The policy is switched on earlier, at a loss of RETRY_LOSS, if it has a predicted gain. The gain must be PROOF times as
large as its standard deviation. The policy is then switched off again at a loss of LIMIT, and its next return needs a
loss of ON_LOSS."""
MEMORY = 32.0
"""The weight of past requests halves whenever later requests have looked up MEMORY times as many tokens as the cache
has."""
FIRST = 24.0
"""The number of lost tokens is divided by at least FIRST times the tokens of the cache. The policy is therefore not
switched off before it has lost OFF_LOSS * FIRST times the tokens of the cache. A policy that learns needs some traffic
before it can gain hits."""


class ShadowLRU:
    """Compares the hits of a policy with the hits of LRU. Every call takes O(log BUCKETS) time or less."""

    def __init__(self) -> None:
        self.capacity = 0
        """Number of tokens in the full cache. 0 until the cache is full."""
        self.is_off = False
        """Whether the policy has lost too much against LRU, and is off."""
        self.times_off = 0
        """How many times the policy was switched off."""
        self.gained_tokens = self.lost_tokens = self.looked_up_tokens = 0.0
        """Tokens that only the policy hit, tokens that only LRU would have hit, and tokens looked up, since the cache
        is full."""
        # Lost minus gained tokens, and tokens looked up; older requests count less.
        self._loss = self._looked_up = 0.0
        self._may_retry = True  # whether predictions may switch the policy on
        self._predicted = self._squares = 0.0  # sum of the predicted gains while off, and of their squares
        self._starts: list[float] = [0.0]
        self._sizes: list[float] = [0.0]
        self._latest = 0.0
        self._first = 0
        self._total = 0.0
        self._kept = 1.0  # share of the oldest bucket that LRU still has

    @property
    def loss(self) -> float:
        """Recent loss of hit rate against LRU, from 0 to 1. Negative if the policy is better than LRU."""
        return self._loss / max(self._looked_up, FIRST * self.capacity, 1.0)

    @property
    def cutoff(self) -> float:
        """LRU keeps all tokens that were used after this time."""
        return self._starts[self._first]

    def share(self, last_used: float) -> float:
        """Return the fraction, from 0 to 1, of the tokens last used at the time `last_used` that LRU would still have
        in the cache."""
        starts, first = self._starts, self._first
        if last_used < starts[first]:
            return 0.0
        return self._kept if first + 1 < len(starts) and last_used < starts[first + 1] else 1.0

    def use(self, tokens: float, last_used: float | None, now: float) -> None:
        """Record a use of tokens. `last_used` is the time of their previous use, or None for new tokens."""
        starts, sizes = self._starts, self._sizes
        if last_used is not None:
            self.drop(tokens, last_used)
        if now > self._latest:  # uses at one time stay in one bucket
            self._latest = now
            if sizes[-1] * BUCKETS >= self.capacity:
                starts.append(now)
                sizes.append(0.0)
        sizes[-1] += tokens
        self._total += tokens

    def drop(self, tokens: float, last_used: float) -> None:
        """Stop counting `tokens` tokens whose last use was at `last_used`, because they are used again or no longer
        exist."""
        starts, sizes = self._starts, self._sizes
        if last_used >= starts[self._first]:
            at = bisect_right(starts, last_used, self._first) - 1
            taken = min(tokens, sizes[at])
            sizes[at] -= taken
            self._total -= taken

    def count(self, gained: float, lost: float, looked_up: int, capacity: int) -> bool:
        """Count a request. Return whether the policy was switched on or off.

        - `gained` is the number of tokens that the policy hit and LRU would not have hit.
        - `lost` is the number of tokens that only LRU would have hit.
        - `looked_up` is the number of tokens looked up.
        - `capacity` is the number of tokens in the full cache. If the cache is not full, `capacity` is 0 and nothing is
          counted.
        """
        if not capacity:
            return False
        self.capacity = capacity
        self._move_cutoff()
        self.gained_tokens += gained
        self.lost_tokens += lost
        self.looked_up_tokens += looked_up
        fade = 0.5 ** (looked_up / (MEMORY * capacity))
        self._looked_up = self._looked_up * fade + looked_up
        self._loss = self._loss * fade + lost - gained
        loss = self.loss
        if loss <= ON_LOSS:
            self._may_retry = True
        if not self.is_off:
            is_off = loss > (OFF_LOSS if self._may_retry else LIMIT)
        elif self._may_retry and loss <= RETRY_LOSS and self._predicted > PROOF * math.sqrt(self._squares):
            is_off = self._may_retry = False
        else:
            is_off = loss > ON_LOSS
        if is_off == self.is_off:
            return False
        self.is_off = is_off
        self.times_off += is_off
        self._predicted = self._squares = 0.0
        return True

    def predict(self, gained: float) -> None:
        """Count tokens that were used while the policy is off. `gained` is positive if only the policy would have hit
        them, and negative if only LRU had them."""
        self._predicted += gained
        self._squares += gained * gained

    def _move_cutoff(self) -> None:
        sizes, first, last = self._sizes, self._first, len(self._sizes) - 1
        while first < last and self._total - sizes[first] >= self.capacity:
            self._total -= sizes[first]
            first += 1
        newer = self._total - sizes[first]
        self._kept = min(1.0, max(0.0, self.capacity - newer) / sizes[first]) if sizes[first] else 1.0
        self._first = first
        if first > 4 * BUCKETS:
            del self._starts[:first], self._sizes[:first]
            self._first = 0

"""Replays traffic through the real core (pool, prefix cache, policies, tenants) with a virtual clock.

Requests are processed one after the other. Each is looked up, opened, extended, committed and closed at its arrival
time. A block of the trace is one block of the cache. It has 16 equal tokens whose id is the block's number, so only
whole blocks match.

A tier with the rule `through` is simulated by another cache with its own size, which gets the same requests. The other
rules are in `tier_rules`. A block is read from the fastest tier that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvloom.core import (
    HASH_TOKENS,
    POLICIES,
    CacheControl,
    Field,
    KVCache,
    LayerSpec,
    OffloadBatch,
    PoolLayout,
    Tenant,
    VirtualClock,
    Visibility,
    make_policy,
)

from .bounds import ideal_hits, min_hits
from .tier_rules import TIER_RULES, RuledTiers
from .traffic import Traffic

__all__ = ["BOUNDS", "NAMES", "Hits", "Outcome", "Tier", "TierUse", "replay"]

BOUNDS = ("ideal", "min")
"""Names of the policies that are upper bounds. They are computed from the whole trace, including the future."""
NAMES = (*BOUNDS, *POLICIES)

_TICK = 1e-6
"""Seconds added between requests with equal times, so that the last of them is the most recently used."""
_END = np.int32(2**31 - 1)
"""A token that is appended to every prompt before a lookup. The last token of a prompt is never a hit, so without it
the last block could not be a hit."""
_LAYOUT = PoolLayout.build(
    {"block": LayerSpec("token", (Field("kv", (1,), "int8"),), Visibility("full"))}, HASH_TOKENS
)

Hits = list[int]


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier: its name and capacity in blocks."""

    name: str
    blocks: int

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"tier {self.name!r}: capacity {self.blocks} must be at least 1 block")


@dataclass(frozen=True, slots=True)
class TierUse:
    """Numbers about a tier.

    - `hit_blocks` counts blocks of prompts that this tier had and no faster tier had.
    - `written_blocks` counts blocks written to the tier.
    - `resident_blocks` counts blocks in the tier at the end.
    """

    name: str
    capacity_blocks: int
    hit_blocks: int
    written_blocks: int
    resident_blocks: int
    evictions: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a replay.

    - `hits` has, for each request, the number of leading blocks that the device had.
    - `tier_hits` has, for each tier and request, the number of further leading blocks that this tier had and no faster
      tier had.
    - `asked` is the number of looked-up blocks.
    - `evictions` counts blocks evicted from the device.
    """

    policy: str
    capacity_blocks: int
    hits: Hits
    asked: int
    evictions: int
    tiers: tuple[TierUse, ...] = ()
    tier_hits: tuple[Hits, ...] = ()
    tier_rule: str = "through"

    @property
    def hit_rate(self) -> float:
        """The share of looked-up blocks found on the device or in a tier."""
        found = sum(self.hits) + sum(sum(hits) for hits in self.tier_hits)
        return found / self.asked if self.asked else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            "hit_rate": self.hit_rate,
            "evictions": self.evictions,
        }


def replay(
    traffic: Traffic,
    capacity: int,
    policy: str = "lru",
    *,
    tiers: Sequence[Tier] = (),
    tier_rule: str = "through",
    tenants: Iterable[Tenant] = (),
    ended: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Replay `traffic` through a cache of `capacity` blocks under `policy`, one of NAMES. `tier_rule`, one of
    TIER_RULES, applies to all tiers. `min` and `ideal` ignore it.

    With `ended`, the replay calls `KVCache.end_session` after the last request of each session. In the simulated cache
    a block has 16 bytes, so a tenant's quota of 16 bytes is one block. If a request is longer than a cache, only its
    beginning is stored. For requests of 24 blocks, takes about 4 seconds per million blocks, or 8 to 9 with a learning
    policy.
    """
    if capacity < 1:
        raise ValueError(f"capacity {capacity} must be at least 1 block")
    if policy not in NAMES:
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(NAMES)}")
    if tier_rule not in TIER_RULES:
        raise ValueError(f"unknown tier rule {tier_rule!r}; known: {', '.join(TIER_RULES)}")
    if policy == "ideal":
        return Outcome(policy, capacity, ideal_hits(traffic), traffic.asked, 0)
    sizes = [Tier("device", capacity), *tiers]
    if policy == "min":
        bounds = [min_hits(traffic, tier.blocks) for tier in sizes]
        per_tier, evictions = [hits for hits, _ in bounds], [gone for _, gone in bounds]
        uses = [(0, 0) for _ in sizes]
    elif tier_rule != "through" and tiers:
        below = RuledTiers([tier.blocks for tier in tiers], tier_rule)
        device = _Cache(traffic, capacity, policy, tenants, below)
        _run(traffic, [device], _last_of_sessions(traffic) if ended else {}, progress)
        evictions = [device.evicted, *(tier.evicted for tier in below.tiers)]
        uses = [(device.written, device.resident), *((t.written, len(t.blocks)) for t in below.tiers)]
        found = _outcome(policy, traffic, sizes, [device.hits, *below.hits], uses, evictions)
        return replace(found, tier_rule=tier_rule)
    else:
        caches = [_Cache(traffic, tier.blocks, policy, tenants) for tier in sizes]
        _run(traffic, caches, _last_of_sessions(traffic) if ended else {}, progress)
        per_tier, evictions = [c.hits for c in caches], [c.evicted for c in caches]
        uses = [(c.written, c.resident) for c in caches]
    return _outcome(policy, traffic, sizes, _beyond(per_tier), uses, evictions)


def _outcome(
    policy: str,
    traffic: Traffic,
    sizes: list[Tier],
    found: list[Hits],
    uses: list[tuple[int, int]],
    evictions: list[int],
) -> Outcome:
    """Return the result of a replay. `found` has the hits of each tier that no faster tier has. `uses` has the numbers
    of written and resident blocks. The device is the first tier."""
    used = tuple(
        TierUse(tier.name, tier.blocks, sum(hits), *use, gone)
        for tier, hits, use, gone in zip(sizes, found, uses, evictions, strict=True)
    )
    return Outcome(policy, sizes[0].blocks, found[0], traffic.asked, evictions[0], used, tuple(found[1:]))


def _beyond(per_tier: list[Hits]) -> list[Hits]:
    """Return, for each tier and each request, the number of leading blocks of the request that this tier had and no
    faster tier had."""
    beyond = [per_tier[0]]
    best = per_tier[0]
    for hits in per_tier[1:]:
        beyond.append([max(0, here - above) for here, above in zip(hits, best, strict=True)])
        best = [max(here, above) for here, above in zip(hits, best, strict=True)]
    return beyond


def _last_of_sessions(traffic: Traffic) -> dict[int, str]:
    last = {r.session: number for number, r in enumerate(traffic.requests) if r.session is not None}
    return {number: session for session, number in last.items()}


def _run(
    traffic: Traffic, caches: list[_Cache], ends: dict[int, str], progress: Callable[[int], None]
) -> None:
    buffer = np.empty(traffic.longest * HASH_TOKENS + 1, np.int32)
    now = traffic.requests[0].at - 1.0 if traffic.requests else 0.0
    controls: dict[tuple[str, str | None], CacheControl] = {}
    for number, request in enumerate(traffic.requests):
        later = max(request.at, now + _TICK)
        step, now = later - now, later
        blocks = request.blocks
        size = len(blocks) * HASH_TOKENS
        buffer[:size].reshape(-1, HASH_TOKENS)[:] = blocks[:, None]
        key = (request.tenant, request.session)
        control = controls.get(key)
        if control is None:
            control = controls[key] = CacheControl(tenant=request.tenant, session=request.session)
        for cache in caches:
            cache.serve(buffer, len(blocks), request.asked, control, request.ending, step)
            if number in ends:
                cache.cache.end_session(ends[number])
        if number % 1024 == 1023:
            progress(number + 1)
    progress(len(traffic.requests))


class _Cache:
    """A real cache of `blocks` blocks that serves recorded requests, for the device or for one tier. The tiers `below`
    get the blocks that the cache evicts."""

    def __init__(
        self,
        traffic: Traffic,
        blocks: int,
        policy: str,
        tenants: Iterable[Tenant],
        below: RuledTiers | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.blocks = blocks
        self.hits: Hits = []
        self.written = 0
        self.cache = KVCache(
            _LAYOUT,
            blocks + 1,
            policy=make_policy(policy),
            max_sequences=1,
            max_tokens=max(1, traffic.longest) * HASH_TOKENS + 1,
            tenants=tenants,
            clock=self.clock,
        )
        self._below = below
        if below is not None:
            self._block_of_page = np.zeros(blocks + 1, np.int32)
            self.cache.loading.set_listener(self._on_evict, on_close=False)

    def _on_evict(self, batch: OffloadBatch) -> None:
        assert self._below is not None
        self._below.evict(self._block_of_page[batch.rows[:, 0]].tolist())

    @property
    def evicted(self) -> int:
        return self.cache.inspect.evicted_bytes // _LAYOUT.slab_bytes

    @property
    def resident(self) -> int:
        return self.cache.inspect.cached_pages

    def serve(
        self,
        buffer: np.ndarray,
        blocks: int,
        asked: int,
        control: CacheControl,
        ending: str | None,
        step: float,
    ) -> None:
        """Serve one request `step` seconds after the previous request. `buffer` has the tokens of the request's
        `blocks` blocks. The first `asked` of these blocks are looked up. `ending` is the finish reason.
        """
        self.clock.advance(step)
        cache, most = self.cache, self.blocks
        end = (blocks if blocks < most else most) * HASH_TOKENS
        looked = (asked if asked < most else most) * HASH_TOKENS
        after = int(buffer[looked])
        buffer[looked] = _END
        match = cache.match(buffer[: looked + 1], control)
        buffer[looked] = after
        seq = cache.open(match)
        resume = match.resume
        self.hits.append(resume // HASH_TOKENS)
        if self._below is not None:
            self._below.find(buffer[resume : asked * HASH_TOKENS : HASH_TOKENS].tolist())
        if not seq.extend(end - resume):  # the quota of the tenant may be too small
            seq.commit(buffer[resume:end])
            self.written += (end - resume) // HASH_TOKENS
            if self._below is not None:
                self._block_of_page[seq.table(0).ravel()[: end // HASH_TOKENS]] = buffer[:end:HASH_TOKENS]
        seq.finish_reason = ending
        seq.close()
        if self._below is not None:
            self._below.end(buffer[: blocks * HASH_TOKENS : HASH_TOKENS].tolist())

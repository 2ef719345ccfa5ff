"""Replays traffic through the real core (pool, prefix cache, policies, tenants) with a virtual clock.

Requests are processed one after the other. Each is looked up, opened, extended, committed and closed at its arrival
time. A block of the trace is one block of the cache. It has 16 equal tokens whose id is the block's number, so only
whole blocks match.

A tier is simulated by another cache with its own size, which gets the same requests (write-through). A block is read
from the fastest tier that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvloom.core import (
    HASH_TOKENS,
    POLICIES,
    CacheControl,
    Field,
    KVCache,
    LayerSpec,
    PoolLayout,
    Tenant,
    VirtualClock,
    Visibility,
    make_policy,
)

from .bounds import ideal_hits, min_hits
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
    """Numbers about a tier. `hit_blocks` counts blocks of prompts that this tier had and no faster tier had.
    `written_blocks` counts blocks written to the tier. `resident_blocks` counts blocks in the tier at the end."""

    name: str
    capacity_blocks: int
    hit_blocks: int
    written_blocks: int
    resident_blocks: int
    evictions: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a replay. `hits` has, for each request, the number of leading blocks that the device had. `tier_hits`
    has, for each tier and request, the number of further leading blocks that this tier had and no faster tier had.
    `asked` is the number of looked-up blocks. `evictions` counts blocks evicted from the device.
    """

    policy: str
    capacity_blocks: int
    hits: Hits
    asked: int
    evictions: int
    tiers: tuple[TierUse, ...] = ()
    tier_hits: tuple[Hits, ...] = ()

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
    tenants: Iterable[Tenant] = (),
    ended: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Replay `traffic` through a cache of `capacity` blocks under `policy`, one of NAMES.

    With `ended`, the replay calls `KVCache.end_session` after the last request of each session. In the simulated cache
    a block has 16 bytes, so a tenant's quota of 16 bytes is one block. If a request is longer than a cache, only its
    beginning is stored. For requests of 24 blocks, takes about 4 seconds per million blocks, or 8 to 9 with a learning
    policy.
    """
    if capacity < 1:
        raise ValueError(f"capacity {capacity} must be at least 1 block")
    if policy not in NAMES:
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(NAMES)}")
    if policy == "ideal":
        return Outcome(policy, capacity, ideal_hits(traffic), traffic.asked, 0)
    sizes = [Tier("device", capacity), *tiers]
    if policy == "min":
        found = [min_hits(traffic, tier.blocks) for tier in sizes]
        per_tier, evictions = [hits for hits, _ in found], [gone for _, gone in found]
        uses = [(0, 0) for _ in sizes]
    else:
        caches = [_Cache(traffic, tier.blocks, policy, tenants) for tier in sizes]
        _run(traffic, caches, _last_of_sessions(traffic) if ended else {}, progress)
        per_tier, evictions = [c.hits for c in caches], [c.evicted for c in caches]
        uses = [(c.written, c.resident) for c in caches]
    beyond = _beyond(per_tier)
    used = tuple(
        TierUse(tier.name, tier.blocks, sum(hits), *use, gone)
        for tier, hits, use, gone in zip(sizes, beyond, uses, evictions, strict=True)
    )
    return Outcome(policy, capacity, beyond[0], traffic.asked, evictions[0], used, tuple(beyond[1:]))


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
    """A real cache of `blocks` blocks that serves recorded requests, for the device or for one tier."""

    def __init__(self, traffic: Traffic, blocks: int, policy: str, tenants: Iterable[Tenant]) -> None:
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
        if not seq.extend(end - resume):  # the quota of the tenant may be too small
            seq.commit(buffer[resume:end])
            self.written += (end - resume) // HASH_TOKENS
        seq.finish_reason = ending
        seq.close()

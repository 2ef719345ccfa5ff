"""Replaying traffic through the real core: pool, tree, policies, tenants, on a virtual clock.

Every request is looked up, opened, extended, committed and closed at the time it came, one after the
other, as an engine would with nothing else to do. A block of the trace is one block of the cache: 16
equal tokens whose id is its number, so matching costs what it costs in service, and only whole blocks
match.

A lower tier is another cache of its own size that sees the same requests (what is computed is written
through to all of them); a block is read from the first that has it.
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
"""What is computed from the whole trace rather than replayed."""
NAMES = (*BOUNDS, *POLICIES)

_TICK = 1e-6
"""Requests of one instant come this far apart: the last of them is then the most recently used."""
_END = np.int32(2**31 - 1)
"""Follows every prompt when it is looked up, because its last token is never taken from the cache."""
_LAYOUT = PoolLayout.build(
    {"block": LayerSpec("token", (Field("kv", (1,), "int8"),), Visibility("full"))}, HASH_TOKENS
)

Hits = list[int]


@dataclass(frozen=True, slots=True)
class Tier:
    """A place for blocks below the device: its name and how many it holds."""

    name: str
    blocks: int

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"tier {self.name!r} of {self.blocks} blocks: it must hold one or more")


@dataclass(frozen=True, slots=True)
class TierUse:
    """What a tier did: blocks that prompts found in it and in no faster one, blocks written to it, blocks
    in it at the end."""

    name: str
    capacity_blocks: int
    hit_blocks: int
    written_blocks: int
    resident_blocks: int
    evictions: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """`hits` are the leading blocks of each request found in the device's cache, `tier_hits` those found
    beyond them in each lower tier. `evictions` counts blocks."""

    policy: str
    capacity_blocks: int
    hits: Hits
    asked: int
    evictions: int
    tiers: tuple[TierUse, ...] = ()
    tier_hits: tuple[Hits, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Of all blocks looked up, the share found on the device or in a tier."""
        found = sum(self.hits) + sum(sum(hits) for hits in self.tier_hits)
        return found / self.asked if self.asked else 0.0

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
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
    """Replay `traffic` through a cache of `capacity` blocks under `policy`: one of NAMES.

    With `ended` every session says after its last request that it will not come back; the bounds need no
    hint. A block takes 16 bytes of these caches: tenants' quotas are in those. About 4 seconds a million blocks
    where requests have 24 of them (8 to 9 under the policy that learns), less where they are longer. Of a request
    longer than a cache only the beginning is kept there.
    """
    if capacity < 1:
        raise ValueError(f"a cache of {capacity} blocks; it must hold one or more")
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
    """Of each request, the leading blocks each tier adds to those above it."""
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
    """One cache under replay."""

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
        """One request: `blocks` blocks of tokens in `buffer`, of which `asked` are looked up."""
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
        if not seq.extend(end - resume):  # a quota may refuse it
            seq.commit(buffer[resume:end])
            self.written += (end - resume) // HASH_TOKENS
        seq.finish_reason = ending
        seq.close()

"""Cache sizing: finds the capacity of each tier that a hit rate needs, and how much one more gigabyte would add to the
hit rate.

The traffic is replayed at several sizes. The hit rate is measured, not computed by a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .simulator import replay
from .traffic import Traffic

__all__ = ["Point", "Sizing", "TierSize", "size_cache", "sizes_to_try"]

GIGABYTE = 10**9


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the sizing curve: the hit rate at one cache size, and how much one more gigabyte would add to this
    hit rate (`next_gigabyte`). The sum of both never exceeds the hit rate of an unlimited cache.
    """

    capacity_blocks: int
    bytes: int
    hit_rate: float
    next_gigabyte: float


@dataclass(frozen=True, slots=True)
class TierSize:
    """The recommended size of one tier, in bytes. `limit` is the largest size that the tier may have, or None for no
    limit. `hit_rate` is the hit rate of a cache of the recommended size."""

    name: str
    bytes: int
    limit: int | None
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Sizing:
    """Result of sizing. `capacity_blocks` is the smallest capacity that reaches the target hit rate. `capacity_blocks`
    is None if even an unlimited cache, with the hit rate `ideal`, does not reach the target.

    `tiers` lists the bytes per tier, fastest first. `next_gigabyte` is how much one more gigabyte would add to the hit
    rate. `curve` has the hit rates at several sizes.
    """

    policy: str
    target: float
    ideal: float
    capacity_blocks: int | None
    bytes: int | None
    tiers: tuple[TierSize, ...]
    next_gigabyte: float
    curve: tuple[Point, ...]

    def to_dict(self) -> dict[str, object]:
        return {
            "policy": self.policy,
            "target": self.target,
            "ideal": self.ideal,
            "capacity_blocks": self.capacity_blocks,
            "bytes": self.bytes,
            "tiers": [
                {"tier": t.name, "bytes": t.bytes, "limit": t.limit, "hit_rate": t.hit_rate}
                for t in self.tiers
            ],
            "next_gigabyte": self.next_gigabyte,
            "curve": [
                {
                    "capacity_blocks": p.capacity_blocks,
                    "bytes": p.bytes,
                    "hit_rate": p.hit_rate,
                    "next_gigabyte": p.next_gigabyte,
                }
                for p in self.curve
            ],
        }


def sizes_to_try(traffic: Traffic, points: int = 8) -> list[int]:
    """Return cache sizes from a hundredth of the distinct blocks to all of them. The ratio of neighbouring sizes is
    constant."""
    least, most = max(1, traffic.distinct // 100), max(1, traffic.distinct)
    steps = max(1, points - 1)
    return sorted({round(least * (most / least) ** (i / steps)) for i in range(steps + 1)})


def size_cache(
    traffic: Traffic,
    block_bytes: int,
    *,
    policy: str = "lru",
    target: float | None = None,
    limits: Sequence[tuple[str, int | None]] = (("device", None),),
    precision: float = 0.03,
    progress: Callable[[int], None] = lambda blocks: None,
) -> Sizing:
    """Find the smallest capacity at which `policy` reaches the hit rate `target`. The capacity may be too large by the
    fraction `precision`. The default target is 0.9 of the hit rate of an unlimited cache.

    `limits` lists the tiers, fastest first, with their maximum bytes. A slower tier also stores copies of the pages in
    the faster tiers, so the slowest tier in use needs the whole capacity. A slower tier is used only if the limits of
    the faster tiers are too small. Takes about 15 replays."""
    if block_bytes < 1:
        raise ValueError(f"block_bytes {block_bytes} must be positive: use a model, or bytes per token")
    if not limits:
        raise ValueError("limits is empty: at least one tier is required")
    known: dict[int, float] = {}

    def rate(blocks: int) -> float:
        if blocks not in known:
            known[blocks] = replay(traffic, blocks, policy).hit_rate
            progress(blocks)
        return known[blocks]

    ideal = replay(traffic, max(1, traffic.distinct), "ideal").hit_rate
    wanted = 0.9 * ideal if target is None else target
    if not 0 <= wanted <= 1:
        raise ValueError(f"target hit rate {wanted} must be 0 to 1")
    grid = sizes_to_try(traffic)
    for blocks in grid:
        rate(blocks)
    found = _least(rate, wanted, sorted(known), precision)
    more = max(1, GIGABYTE // block_bytes)
    reach = found or max(known)
    gain = _gain(rate(reach + more) - rate(reach), more * block_bytes, ideal - rate(reach))
    tiers = _share(limits, reach * block_bytes, lambda size: rate(max(1, size // block_bytes)))
    curve = _curve({blocks: known[blocks] for blocks in {*grid, reach}}, block_bytes, ideal)
    size = None if found is None else found * block_bytes
    return Sizing(policy, wanted, ideal, found, size, tiers, gain, curve)


def _least(rate: Callable[[int], float], wanted: float, sizes: list[int], precision: float) -> int | None:
    reaching = [blocks for blocks in sizes if rate(blocks) >= wanted]
    if not reaching:
        return None
    high = reaching[0]
    low = max((blocks for blocks in sizes if blocks < high), default=0)
    while high - low > max(1, precision * high):
        middle = (low + high) // 2
        if rate(middle) >= wanted:
            high = middle
        else:
            low = middle
    return high


def _share(
    limits: Sequence[tuple[str, int | None]], need: int, rate: Callable[[int], float]
) -> tuple[TierSize, ...]:
    tiers = []
    for name, limit in limits:
        size = need if limit is None else min(limit, need)
        tiers.append(TierSize(name, size, limit, rate(size)))
        if size >= need:
            break
    return tuple(tiers)


def _gain(hit_rate: float, size: int, most: float) -> float:
    """Return how much one more gigabyte would add to the hit rate, at most `most`. The estimate is linear: `size` more
    bytes raise the hit rate by `hit_rate`.
    """
    return min(hit_rate * GIGABYTE / size, max(0.0, most))


def _curve(known: dict[int, float], block_bytes: int, ideal: float) -> tuple[Point, ...]:
    sizes = sorted(known)
    points = []
    for i, blocks in enumerate(sizes):
        nearby = sizes[min(i + 1, len(sizes) - 1)]
        gain = 0.0
        if nearby > blocks:
            size = (nearby - blocks) * block_bytes
            gain = _gain(known[nearby] - known[blocks], size, ideal - known[blocks])
        points.append(Point(blocks, blocks * block_bytes, known[blocks], gain))
    return tuple(points)

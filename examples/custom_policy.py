"""Write an eviction policy and replay traffic with it, beside LRU.

    python examples/custom_policy.py

As an entry point of `kvloom.policies` the class also serves `kvloom serve --eviction-policy` and `LLM(eviction_policy=...)`.

The traffic: many users share a long system prompt; each of them asks once. The policy keeps shallow entries, which many
prompts begin with, longer than deep ones.
"""

import numpy as np

from kvloom.core import CacheControl, Entry, KVCache, LayerSpec, PoolLayout, VirtualClock, attention_fields


class DeepestFirst:
    """Evicts the deepest entry first; of two entries at one depth, the least recently used one."""

    name = "deepest-first"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return -entry.depth, entry.last_used

    def on_insert(self, entry: Entry, now: float) -> None: ...

    def on_hit(self, entry: Entry, now: float) -> None: ...

    def on_evict(self, entry: Entry, now: float) -> None: ...


def hit_rate(policy: object) -> float:
    """Replay 400 requests on a small pool. Return the share of prompt tokens that were cached."""
    layer = LayerSpec("token", attention_fields(2, 64, "bf16"))
    clock = VirtualClock()
    cache = KVCache(PoolLayout.build({"layer": layer}), slabs=40, policy=policy, clock=clock)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    systems = [rng.integers(1, 1000, 192) for _ in range(3)]
    for _ in range(400):
        clock.advance(1.0)
        prompt = np.concatenate([systems[rng.integers(3)], rng.integers(1, 1000, 64)])
        sequence = cache.open(cache.match(prompt, CacheControl()))
        rest = prompt[sequence.length :]
        assert sequence.extend(len(rest)) == 0, "the pool is too small for one request"
        sequence.commit(rest)
        sequence.close()
    stats = cache.stats()
    return stats["hit_tokens"] / stats["looked_up_tokens"]  # type: ignore[operator]


def main() -> None:
    print(f"LRU:           {hit_rate('lru'):.1%} of prompt tokens cached")
    print(f"deepest first: {hit_rate(DeepestFirst()):.1%} of prompt tokens cached")


if __name__ == "__main__":
    main()

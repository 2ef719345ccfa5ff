"""The cache as a library: continuous batching in about 100 lines, without a model.

    python examples/toy_engine.py

`model` stands for a real one: it reads a sequence's pages and writes the K and V of new tokens to them. Here a page stores the
token ids themselves, so that the engine can check that every page it reads holds what was written.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvloom.core import Field, KVCache, LayerSpec, PoolLayout, Sequence

BUDGET = 64  # tokens that one step computes


@dataclass
class Request:
    prompt: list[int]
    new_tokens: int
    tokens: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    cached: int = 0


class ToyEngine:
    """Schedules requests, keeps their pages in one pool, and preempts the youngest request when the pool is full."""

    def __init__(self, slabs: int) -> None:
        spec = LayerSpec("token", (Field("id", (1,), "int32"),))
        self.layout = PoolLayout.build({"layer": spec})
        self.cache = KVCache(self.layout, slabs, max_sequences=8)
        self.pool = np.zeros(slabs * self.layout.slab_bytes, np.uint8)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        request.tokens = list(request.prompt)
        self.waiting.append(request)

    def run(self) -> None:
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Admit waiting requests, compute up to BUDGET tokens, and finish requests that have all their tokens."""
        while self.waiting and len(self.running) < 8:
            request = self.waiting.popleft()
            request.sequence = self.cache.open(self.cache.match(request.tokens))
            request.cached = max(request.cached, request.sequence.length)
            self.running.append(request)
        budget = BUDGET
        for request in list(self.running):
            if request.sequence is None:
                continue  # preempted in this step
            missing = len(request.tokens) - request.sequence.length
            count = min(missing, budget)
            if count and self.reserve(request, count):
                budget -= count
                self.compute(request, count)
        for batch in self.cache.take_copies():  # copies of shared partial blocks, before the next step writes
            pages = self.pool.reshape(-1, batch.page_stride)
            pages[batch.target] = pages[batch.source]

    def reserve(self, request: Request, count: int) -> bool:
        """Allocate pages for `count` tokens; preempt younger requests until they fit. False: not in this step."""
        assert request.sequence is not None
        while request.sequence.extend(count):
            victim = self.running[-1]
            if victim is request:
                return False
            self.running.remove(victim)
            assert victim.sequence is not None
            victim.sequence.close()  # its full blocks stay cached until their pages are needed
            victim.sequence = None
            self.waiting.appendleft(victim)
        return True

    def compute(self, request: Request, count: int) -> None:
        """Write the new tokens to their pages, then read all of them back, as attention would."""
        sequence = request.sequence
        assert sequence is not None
        for batch in self.cache.take_copies():
            pages = self.pool.reshape(-1, batch.page_stride)
            pages[batch.target] = pages[batch.source]
        group = self.layout.groups[0]
        pages = self.pool.reshape(-1, group.page_stride).view(np.int32)
        start, block = sequence.length, self.cache.block_tokens
        table = sequence.table(0)[0]
        new = request.tokens[start : start + count]
        for position, token in enumerate(new, start):
            pages[table[position // block], position % block] = token
        read = [int(pages[table[p // block], p % block]) for p in range(start + count)]
        assert read == request.tokens[: start + count], "a page holds other tokens than were written"
        sequence.commit(new)
        if sequence.length == len(request.tokens):
            if len(request.tokens) < len(request.prompt) + request.new_tokens:
                request.tokens.append(sum(request.tokens) % 997)  # the toy's next token
            else:
                self.running.remove(request)
                sequence.close()


def main() -> None:
    rng = np.random.default_rng(0)
    system = rng.integers(1, 1000, 100).tolist()
    requests = [Request(system + rng.integers(1, 1000, 20).tolist(), 30) for _ in range(12)]
    engine = ToyEngine(slabs=40)
    for request in requests:
        engine.add(request)
    engine.run()
    for request in requests:
        plain = list(request.prompt)
        for _ in range(request.new_tokens):
            plain.append(sum(plain) % 997)
        assert request.tokens == plain
    print(f"{len(requests)} requests; cached prompt tokens: {[request.cached for request in requests]}")
    print({name: engine.cache.stats()[name] for name in ("hit_tokens", "looked_up_tokens", "evictions")})


if __name__ == "__main__":
    main()

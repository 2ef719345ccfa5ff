"""The cache as a library: an engine with continuous batching, samples, drafts and tiers, without a model.

    python examples/toy_engine.py

`compute` stands for a real model: it reads a sequence's pages and writes the K and V of new tokens to them. Here a page
stores the token ids themselves, so that the engine can check that every page it reads holds what was written.
docs/library.md explains each call.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvloom.core import Field, KVCache, LayerSpec, Match, OffloadBatch, PoolLayout, Sequence
from kvloom.tiers import Form, Objects, Ranges, Tier, open_tier

BUDGET, DRAFT = 64, 3  # tokens that one step computes at most, and tokens of a draft


@dataclass
class Request:
    prompt: list[int]
    new_tokens: int
    samples: int = 1
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    cached: int = 0

    def next_token(self, tokens: list[int]) -> int:
        return (sum(tokens) + self.seed) % 997  # the toy's model


class ToyEngine:
    """Schedules requests, keeps their pages in one pool, and preempts the youngest request when the pool is full."""

    def __init__(self, slabs: int, tier: Tier) -> None:
        spec = LayerSpec("token", (Field("id", (1,), "int32"),))
        self.layout = PoolLayout.build({"layer": spec})
        self.group = self.layout.groups[0]
        self.cache = KVCache(self.layout, slabs, model="toy", max_sequences=8)
        self.pool = np.zeros(slabs * self.layout.slab_bytes, np.uint8)
        self.tier, self.form = tier, Form("int32", "token", self.group.page_bytes, self.group.page_bytes)
        self.cache.loading.set_listener(self.offload, on_close=False)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.done: list[Request] = []
        self.offloaded = self.loaded = self.accepted = 0

    def add(self, request: Request) -> None:
        request.tokens = list(request.prompt)
        self.waiting.append(request)

    def run(self) -> None:
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Admit waiting requests, then compute up to BUDGET tokens."""
        while self.waiting and len(self.running) < 8:
            request = self.waiting.popleft()
            match = self.load(request.tokens, self.cache.match(request.tokens))
            request.sequence = self.cache.open(match)
            request.cached = max(request.cached, request.sequence.length)
            self.running.append(request)
        budget = BUDGET
        for request in list(self.running):
            if request.sequence is None or not budget:
                continue  # preempted in this step, or no budget left
            new = request.tokens[request.sequence.length :][:budget]
            draft = self.draft(request) if len(new) == 1 else []
            if self.reserve(request, len(new) + len(draft)):
                budget -= min(budget, len(new) + len(draft))
                self.compute(request, new, draft)

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

    def draft(self, request: Request) -> list[int]:
        """Guess the next tokens. Every fifth guess is wrong."""
        tokens = list(request.tokens)
        for _ in range(min(DRAFT, len(request.prompt) + request.new_tokens - len(tokens))):
            tokens.append(request.next_token(tokens) + (len(tokens) % 5 == 0))
        return tokens[len(request.tokens) :]

    def compute(self, request: Request, new: list[int], draft: list[int]) -> None:
        """Write the new tokens and the draft to their pages, read all back, as attention would, and commit."""
        sequence = request.sequence
        assert sequence is not None
        self.run_copies()
        start, block = sequence.length, self.cache.block_tokens
        pages = self.pool.reshape(-1, self.group.page_stride).view(np.int32)
        table = sequence.table(self.group.index)[0]
        for position, token in enumerate(new + draft, start):
            pages[table[position // block], position % block] = token
        read = [int(pages[table[p // block], p % block]) for p in range(start + len(new))]
        assert read == request.tokens[: start + len(new)], "a page holds other tokens than were written"
        sequence.commit(new)
        if sequence.length < len(request.tokens):
            return  # the prompt is longer than the budget
        for sample in range(1, request.samples):
            twin = Request(request.prompt, request.new_tokens, seed=sample)
            twin.tokens = [*request.tokens, twin.next_token(request.tokens)]
            if len(self.running) < 8:  # shares all pages; the first write copies the partial block
                twin.sequence = sequence.fork()
            (self.waiting if twin.sequence is None else self.running).append(twin)
        request.samples = 1
        end = len(request.prompt) + request.new_tokens
        for guess in draft:
            if guess != request.next_token(request.tokens):
                break
            request.tokens.append(guess)
            sequence.commit([guess])  # its page is written already
            self.accepted += 1
        if len(request.tokens) < end:
            request.tokens.append(request.next_token(request.tokens))
        else:
            self.running.remove(request)
            self.done.append(request)
            sequence.close()

    def run_copies(self) -> None:
        """Run the page copies that the cache asks for, after `extend` and before the next write."""
        for batch in self.cache.take_copies():
            pages = self.pool.reshape(-1, batch.page_stride)
            pages[batch.target] = pages[batch.source]

    def ranges(self, pages: np.ndarray) -> Ranges:
        return Ranges(self.pool, pages.astype(np.int64) * self.group.page_stride)

    def offload(self, batch: OffloadBatch) -> None:
        """Copy pages to the tier before the cache evicts them. Must not call the cache."""
        column = self.group.columns.start
        keep = np.flatnonzero(batch.pages[:, column])
        objects = Objects([bytes(batch.hashes[i]) for i in keep], self.group.index, self.form)
        transfer = self.tier.write(objects, self.ranges(batch.pages[keep, column]))
        transfer.wait_released(60)  # a real engine stages the bytes, and does not wait
        self.offloaded += int(transfer.ok.sum())

    def load(self, tokens: list[int], match: Match) -> Match:
        """Load the pages that the tier has and the pool lacks. Return the longer match."""
        loading = self.cache.loading
        plan = loading.plan(match)
        while queries := plan.next_queries():
            plan.answer([self.tier.lookup(Objects(q.hashes, q.group, self.form)) for q in queries])
        if plan.resume <= match.resume or (reservation := loading.reserve(plan)) is None:
            return match  # nothing to load, or no free pages
        self.run_copies()
        ((hashes, pages),) = reservation.pages(self.group)
        transfer = self.tier.read(Objects(hashes, self.group.index, self.form), self.ranges(pages))
        transfer.wait_released(60)
        if transfer.failed:  # damaged, missing or late: compute these tokens instead
            loading.cancel(reservation)
            return match
        loading.publish(reservation)
        self.loaded += len(hashes)
        return self.cache.match(tokens)


def main() -> None:
    rng = np.random.default_rng(0)
    system = rng.integers(1, 1000, 100).tolist()
    prompts = [system + rng.integers(1, 1000, 20).tolist() for _ in range(12)]
    engine = ToyEngine(slabs=40, tier=open_tier("host:8MiB"))
    for prompt in [*prompts, *rng.integers(1, 1000, (12, 120)).tolist(), *prompts]:
        engine.add(Request(prompt, 30, samples=2))
    engine.run()
    for request in engine.done:
        plain = list(request.prompt)
        for _ in range(request.new_tokens):
            plain.append(request.next_token(plain))
        assert request.tokens == plain
    engine.cache.check()
    stats = engine.cache.stats()
    print(f"{len(engine.done)} requests; {engine.accepted} draft tokens accepted")
    print(f"{engine.offloaded} pages offloaded, {engine.loaded} pages loaded")
    print({name: stats[name] for name in ("hit_tokens", "looked_up_tokens", "evictions")})
    engine.tier.close()


if __name__ == "__main__":
    main()

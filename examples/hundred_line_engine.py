"""An engine in 100 lines: continuous batching, prefix cache, preemption and a tier, without a model.

A page stores token ids instead of K and V, so that the engine can check what it reads. `toy_engine.py` adds samples by
fork and drafts. docs/library.md explains each call.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvloom.core import Field, KVCache, LayerSpec, OffloadBatch, PoolLayout, Sequence
from kvloom.tiers import Form, Objects, Ranges, Tier, open_tier


@dataclass
class Request:
    tokens: list[int]
    length: int  # of prompt and answer
    sequence: Sequence | None = None


class Engine:
    def __init__(self, slabs: int, tier: Tier) -> None:
        layout = PoolLayout.build({"layer": LayerSpec("token", (Field("id", (1,), "int32"),))})
        (self.group,), self.tier = layout.groups, tier
        self.form = Form("int32", "token", self.group.page_bytes, self.group.page_bytes)
        self.cache = KVCache(layout, slabs, model="toy", max_sequences=8)
        self.pool = np.zeros(slabs * layout.slab_bytes, np.uint8)
        self.pages = self.pool.reshape(-1, self.group.page_stride)
        self.cache.loading.set_listener(self.offload, on_close=False)
        self.waiting, self.running, self.loaded = deque[Request](), list[Request](), 0

    def run(self) -> None:
        while self.waiting or self.running:
            while self.waiting and len(self.running) < 4:
                request = self.waiting.popleft()
                self.load(request.tokens)
                request.sequence = self.cache.open(self.cache.match(request.tokens))
                self.running.append(request)
            for request in list(self.running):
                if request.sequence is not None:  # not preempted in this step
                    self.compute(request, request.sequence)

    def compute(self, request: Request, sequence: Sequence) -> None:
        """Write at most 64 new tokens to their pages, read all tokens back as attention would, and sample."""
        new = request.tokens[sequence.length :][:64]
        while sequence.extend(len(new)):  # too few pages: preempt the youngest request
            if (victim := self.running[-1]) is request or victim.sequence is None:
                return  # the youngest waits for pages
            victim.sequence.close()  # its full blocks stay cached until their pages are needed
            victim.sequence = None
            self.waiting.appendleft(self.running.pop())
        self.run_copies()
        start, stop, block = sequence.length, sequence.length + len(new), self.cache.block_tokens
        at = np.arange(stop) % block, sequence.table(self.group.index)[0][np.arange(stop) // block]
        ids = self.pages.view(np.int32)
        ids[at[1][start:], at[0][start:]] = new
        assert ids[at[1], at[0]].tolist() == request.tokens[:stop], "a page has other tokens"
        sequence.commit(new)
        if sequence.length == request.length:
            self.running.remove(request)
            sequence.close()
        elif sequence.length == len(request.tokens):
            request.tokens.append(sum(request.tokens) % 997)

    def run_copies(self) -> None:
        for batch in self.cache.take_copies():
            self.pages[batch.target] = self.pages[batch.source]

    def offload(self, batch: OffloadBatch) -> None:  # before the cache evicts pages
        pages = batch.pages[:, self.group.columns.start]
        keep = np.flatnonzero(pages)
        objects = Objects([bytes(batch.hashes[i]) for i in keep], self.group.index, self.form)
        self.tier.write(objects, Ranges(self.pool, pages[keep] * self.group.page_stride)).wait_released(60)

    def load(self, tokens: list[int]) -> None:  # pages that the tier has and the pool lacks
        loading, match = self.cache.loading, self.cache.match(tokens)
        plan = loading.plan(match)
        while queries := plan.next_queries():
            plan.answer([self.tier.lookup(Objects(q.hashes, q.group, self.form)) for q in queries])
        if plan.resume > match.resume and (reservation := loading.reserve(plan)) is not None:
            self.run_copies()
            ((hashes, pages),) = reservation.pages(self.group)
            into = Ranges(self.pool, pages.astype(np.int64) * self.group.page_stride)
            transfer = self.tier.read(Objects(hashes, self.group.index, self.form), into)
            transfer.wait_released(60)
            (loading.cancel if transfer.failed else loading.publish)(reservation)
            self.loaded += len(hashes)


if __name__ == "__main__":
    engine = Engine(40, open_tier("host:8MiB"))
    prompts = np.random.default_rng(0).integers(1, 1000, (24, 120)).tolist()
    engine.waiting.extend(requests := [Request(list(p), 150) for p in prompts * 2])
    engine.run()
    assert all(one.tokens[i] == sum(one.tokens[:i]) % 997 for one in requests for i in range(120, 150))
    print(f"{len(requests)} requests; {engine.loaded} pages loaded from the tier")
    engine.tier.close()

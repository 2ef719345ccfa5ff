"""Any interleaving of a scheduler's calls: pages are conserved, nothing is read that was not written,
and without eviction the hits are exactly those of a plain list of prompts."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import TestCase

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloom.core import (
    POLICIES,
    BlockRemoved,
    BlockStored,
    CacheControl,
    CheckpointPolicy,
    HashIndex,
    Media,
    RetainRange,
    Tenant,
)

from .world import LAYOUTS, Open, World, make_world, prefix_hash

FUZZ = int(os.environ.get("KVLOOM_FUZZ_EXAMPLES", "400"))
QUICK = 100

segments = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 45)), min_size=1, max_size=4)
tenants = st.sampled_from(["", "", "", "gold", "free"])
controls = st.builds(
    CacheControl,
    tenant=tenants,
    adapter=st.sampled_from(["", "", "lora"]),
    salt=st.sampled_from(["", "", "lora"]),
    store=st.sampled_from([True, True, True, False]),
    read=st.sampled_from([True, True, True, False]),
    session=st.sampled_from([None, "s1", "s2"]),
    public_tokens=st.sampled_from([0, 0, 16, 40, 64]),
    retain=st.sampled_from([(), (), (RetainRange(0, 20, 2, 5.0),), (RetainRange(10, None, -1),)]),
)


def spell(parts: list[tuple[int, int]]) -> list[int]:
    return [token for token, n in parts for _ in range(n)]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Machine(RuleBasedStateMachine):
    world: World

    @initialize(
        kind=st.sampled_from(sorted(LAYOUTS)),
        slabs=st.sampled_from([12, 40, 90, 3000]),
        block=st.sampled_from([16, 16, 32]),
        policy=st.sampled_from(sorted(POLICIES)),
        every=st.sampled_from([0, 0, 2]),
        before_last=st.booleans(),
        shares=st.booleans(),
        quota=st.sampled_from([None, 30]),
        listen=st.booleans(),
        elastic=st.booleans(),
        public=st.sampled_from([0, 6, 1000]),
    )
    def start(
        self,
        kind: str,
        slabs: int,
        block: int,
        policy: str,
        every: int,
        before_last: bool,
        shares: bool,
        quota: int | None,
        listen: bool,
        elastic: bool,
        public: int,
    ) -> None:
        self.kind = kind
        names = ("", "gold", "free") if shares else ()
        slab = make_world(kind, 40, block).cache.layout.slab_bytes
        declared = [Tenant(n, None if quota is None else quota * slab, 1.0) for n in names]
        snapshots = CheckpointPolicy(every_blocks=every, before_last=before_last)
        self.elastic = elastic
        self.world = make_world(
            kind,
            slabs,
            block,
            policy=policy,
            tenants=declared,
            public_bytes=public * slab,
            checkpoint_policy=snapshots,
            reserved=slabs + 50 if elastic else None,
        )
        self.public = bool(public)
        self.shares = shares or self.public
        self.roomy = slabs == 3000 and quota is None and public != 6
        self.pins: list[object] = []
        self.index = HashIndex(self.cache.layout.groups) if listen else None
        if listen:
            self.cache.events.subscribe(self._tell)

    def _tell(self, event: BlockStored | BlockRemoved) -> None:
        assert self.index is not None
        if isinstance(event, BlockStored):
            self.index.stored(event.parent, event.hashes, event.groups, event.medium, event.tail_tokens)
        elif isinstance(event, BlockRemoved):
            self.index.dropped(event.hashes, event.groups, event.medium)

    @property
    def cache(self):  # type: ignore[no-untyped-def]
        return self.world.cache

    def _media(self, prompt: list[int], which: int | None) -> tuple[Media, ...]:
        if which is None:
            return ()
        start = min(5, len(prompt) - 1)
        return (Media(start, start + 1, bytes([which]) * 16, tokens=20),)

    def _allowed(self, control: CacheControl) -> CacheControl:
        return control if self.public else replace(control, public_tokens=0)

    @precondition(lambda self: len(self.world.opened) < 6)
    @rule(parts=segments, control=controls, image=st.sampled_from([None, None, 1, 2]))
    def open(self, parts: list[tuple[int, int]], control: CacheControl, image: int | None) -> None:
        prompt, control = spell(parts), self._allowed(control)
        media = self._media(prompt, image)
        match = self.cache.match(prompt, control, media)
        seen, root = np.frombuffer(match.data, np.int32).tolist(), match.root_hash
        known = max((common(seen, text) for name, text in self.world.stored if name == root), default=0)
        expected = min(known, len(prompt) - 1) if control.read else 0
        assert match.resume <= match.matched <= expected or not control.read
        if self.roomy and self.cache.state.allocator.evictions == 0:
            assert match.matched == expected
            if not self.cache.state.tree.needs_checkpoints and not media:
                assert match.resume == expected
        assert self.cache.explain(match).reason
        if self.index is not None and control.read and not media:
            named = self.cache.state.lookup.resumable_with(match, self.index)
            assert named <= match.resume, "the name index promises more than there is"
            if self.kind == "full":
                assert named == match.resume // 16 * 16
        sequence = self.cache.open(match)
        assert sequence.length == match.resume == sequence.resumed
        self.world.opened.append(Open(sequence, seen[: match.resume], seen, control, media))

    @precondition(lambda self: self.world.opened)
    @rule(
        pick=st.integers(0, 9),
        n=st.integers(1, 70),
        keep=st.integers(0, 70),
        token=st.integers(0, 2),
        squeeze=st.sampled_from([0, 0, 0, 0.2, 1.0]),
    )
    def step(self, pick: int, n: int, keep: int, token: int, squeeze: float) -> None:
        """Compute a chunk of prefill, a decoded token, or a draft of which some tokens are accepted."""
        item = self.world.opened[pick % len(self.world.opened)]
        seq = item.sequence
        left = item.prompt[len(item.tokens) :]
        tokens = (left or [token] * 70)[:n]
        before = (
            seq.length,
            seq.reserved_tokens,
            self.cache.block_tables.tables[:, seq.row].copy().tobytes(),
        )
        evicted = self.cache.state.allocator.evictions
        missing = seq.extend(len(tokens))
        if missing:
            assert self.shares or evicted == self.cache.state.allocator.evictions
            assert before == (
                seq.length,
                seq.reserved_tokens,
                self.cache.block_tables.tables[:, seq.row].tobytes(),
            )
            return
        if self.elastic:  # while copies are pending
            self.world.shrink(int(squeeze * self.cache.state.pool.slabs))
            self.cache.check()
        accepted = tokens if left else tokens[: max(1, keep)]
        if self.cache.has_states and seq.next_checkpoint is not None:
            accepted = accepted[: max(1, seq.next_checkpoint - seq.length)]
        wanted = seq.checkpoint_positions
        self.world.step(item, accepted, draft=not left and len(accepted) < len(tokens))
        self._note(item, wanted)

    @precondition(lambda self: self.world.opened)
    @rule(token=st.integers(0, 2))
    def decode(self, token: int) -> None:
        ready = [i for i in self.world.opened if len(i.tokens) >= len(i.prompt)]
        if not ready:
            return
        rows = np.array([i.sequence.row for i in ready])
        if self.cache.extend_many(rows, 1):
            return
        self.world.run_copies()
        for item in ready:
            self.world.verify(item)
            self._write_token(item, token)
        wanted = [item.sequence.checkpoint_positions for item in ready]
        self.cache.commit_many(rows, np.full(rows.size, token, np.int32))
        for item, points in zip(ready, wanted, strict=True):
            item.tokens.append(token)
            self._note(item, points)

    def _write_token(self, item: Open, token: int) -> None:
        seq, world = item.sequence, self.world
        value = prefix_hash([*item.tokens, token], seq.root.hash)
        block, slot = divmod(seq.length, self.cache.block_tokens)
        for column, cls, _ in world._columns("token"):
            world._write(
                cls, int(self.cache.block_tables.tables[column, seq.row, block]), (column, slot), value
            )
        for column, cls, _ in world._columns("state"):
            world._write(cls, int(self.cache.block_tables.states[column, seq.row]), "state", value)

    def _note(self, item: Open, wanted: tuple[int, ...]) -> None:
        """Record what other prompts may hit from now on: its full blocks, and its tail up to a checkpoint."""
        if item.control.store:
            length = len(item.tokens)
            points = [length // self.cache.block_tokens * self.cache.block_tokens]
            points += [p for p in self._checkpoints(item, wanted) if p <= length]
            self.world.stored.append((item.sequence.root.hash, item.tokens[: max(points)]))

    def _checkpoints(self, item: Open, wanted: tuple[int, ...]) -> list[int]:
        """Return where the last step took checkpoints: with states only at its end, else at every position it passed."""
        if not self.cache.state.tree.needs_checkpoints:
            return []
        every = self.cache.checkpoint_policy.every_blocks * self.cache.block_tokens
        points = list(wanted)
        if every:
            points += range(every, len(item.tokens) + 1, every)
        return [p for p in points if not self.cache.has_states or p == item.sequence.state_length]

    @precondition(lambda self: self.world.opened)
    @rule(pick=st.integers(0, 9), n=st.integers(0, 60), elsewhere=st.booleans())
    def rollback(self, pick: int, n: int, elsewhere: bool) -> None:
        item = self.world.opened[pick % len(self.world.opened)]
        n = min(n, len(item.tokens))
        reached = item.sequence.rollback(n)
        assert reached <= len(item.tokens) - n
        if not self.cache.state.tree.needs_checkpoints:
            assert reached == len(item.tokens) - n
        item.tokens = item.tokens[:reached]
        if elsewhere and all(m.stop <= reached for m in item.sequence.media):  # it goes on with other tokens
            item.prompt = item.prompt[:reached]

    @precondition(lambda self: 0 < len(self.world.opened) < 6)
    @rule(pick=st.integers(0, 9))
    def fork(self, pick: int) -> None:
        item = self.world.opened[pick % len(self.world.opened)]
        child = item.sequence.fork()
        if child is not None:
            self.world.opened.append(
                Open(child, list(item.tokens), list(item.prompt), item.control, item.media)
            )

    @precondition(lambda self: self.world.opened)
    @rule(pick=st.integers(0, 9))
    def close(self, pick: int) -> None:
        item = self.world.opened.pop(pick % len(self.world.opened))
        if item.control.store:
            whole = len(item.tokens) // self.cache.block_tokens * self.cache.block_tokens
            end = item.sequence.state_length if self.cache.has_states else len(item.tokens)
            self.world.stored.append((item.sequence.root.hash, item.tokens[: max(whole, end)]))
        item.sequence.close()

    @rule(parts=segments, ttl=st.sampled_from([0.5, 5.0]), control=controls)
    def pin(self, parts: list[tuple[int, int]], ttl: float, control: CacheControl) -> None:
        if len(self.pins) < 3:
            self.pins.append(self.cache.pin(spell(parts), ttl, self._allowed(control)))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.cache.unpin(self.pins.pop())

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @rule(session=st.sampled_from(["s1", "s2"]))
    def end_session(self, session: str) -> None:
        self.cache.end_session(session)

    @precondition(lambda self: self.elastic)
    @rule(share=st.sampled_from([0.1, 0.5, 1.0]))
    def grow(self, share: float) -> None:
        pool = self.cache.state.pool
        self.world.grow(int(share * (pool.reserved - pool.slabs)))

    @precondition(lambda self: self.elastic)
    @rule(share=st.sampled_from([0.02, 0.1, 0.5, 1.0]))
    def shrink(self, share: float) -> None:
        """Remove half of the slabs, or all; once the copies have run, only pages in use may remain."""
        pool, room = self.cache.state.pool, self.cache.state.allocator
        asked = int(share * pool.slabs)
        before = [item.sequence.length for item in self.world.opened]
        taken = self.world.shrink(asked)
        self.world.run_copies()
        taken += self.world.shrink(asked - taken)
        assert before == [item.sequence.length for item in self.world.opened]
        if taken < asked:
            stuck = room._with_stuck([0] * len(pool.classes))
            assert pool.slabs - 1 <= pool.fewest_slabs(stuck)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


def case(examples: int) -> type[TestCase]:
    """Return the machine as a test with this many examples."""
    test = type("Case", (Machine,), {}).TestCase
    test.settings = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return test


TestCacheMachine = case(min(QUICK, FUZZ))
TestCacheMachineLonger = pytest.mark.slow(case(FUZZ))

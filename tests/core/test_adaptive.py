"""The adaptive policy in a real cache: what it observes, what it evicts, what it costs."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from kvloom.core import CacheControl, KVCache, PoolLayout, VirtualClock
from kvloom.core.eviction.adaptive import Adaptive, Visit
from kvloom.core.prefix.node import Node

from .world import LAYOUTS, cached, finish, make_world, prompt_of, run, serve, slabs_for, start

BLOCK = 16


class Service:
    """A cache of `blocks` blocks that serves prompts made of block numbers."""

    def __init__(self, blocks: int, policy: str | Adaptive = "adaptive") -> None:
        self.clock = VirtualClock()
        self.policy = policy
        layout = PoolLayout.build(LAYOUTS["full"])
        self.cache = KVCache(layout, blocks + 1, policy=policy, clock=self.clock, max_tokens=1 << 14)
        self.hits = self.asked = 0

    def ask(self, *blocks: int, ending: str | None = None, session: str | None = None) -> int:
        """Serve a prompt; returns the blocks that were cached."""
        tokens = np.repeat(np.array(blocks, np.int32), BLOCK)
        match = self.cache.match(np.append(tokens, 2**31 - 1), CacheControl(session=session))
        seq = self.cache.open(match)
        assert seq.extend(len(tokens) - match.resume) == 0
        seq.commit(tokens[match.resume :])
        seq.finish_reason = ending
        seq.close()
        self.hits += match.resume // BLOCK
        self.asked += len(blocks)
        return match.resume // BLOCK

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def leaf(self, *blocks: int) -> Node:
        tokens = np.repeat(np.array(blocks, np.int32), BLOCK)
        return self.cache.match(np.append(tokens, 2**31 - 1)).path[-1]

    @property
    def rate(self) -> float:
        return self.hits / self.asked


def learner(service: Service) -> Adaptive:
    policy = service.cache.state.accounts[""].queue.policy
    assert isinstance(policy, Adaptive)
    return policy


# -- what it follows -------------------------------------------------------------------------------------------


def test_a_conversation_is_one_chain_of_visits() -> None:
    service = Service(100)
    service.ask(1, 2, 3)
    first = service.leaf(1, 2, 3).history
    assert isinstance(first, Visit)
    assert (first.turn, first.open, first.length) == (0, True, 48)
    service.wait(20)
    service.ask(1, 2, 3, 4, 5)
    second = service.leaf(1, 2, 3, 4, 5).history
    assert isinstance(second, Visit)
    assert (second.turn, second.since, second.open) == (1, 20.0, True)
    assert not first.open
    assert service.leaf(1, 2, 3).history is second


def test_a_prompt_that_shares_little_is_another_conversation() -> None:
    service = Service(100)
    service.ask(1, 2, 3, 4)
    service.wait(5)
    service.ask(1, 7, 8, 9)
    first, other = service.leaf(1, 2, 3, 4).history, service.leaf(1, 7, 8, 9).history
    assert isinstance(first, Visit)
    assert isinstance(other, Visit)
    assert first.open
    assert other.turn == 0
    assert service.leaf(1).value == 1.0  # used by another than before
    assert service.leaf(1, 7, 8, 9).value == 0.0


def test_superseded_entries_are_evicted_first() -> None:
    service = Service(12)
    service.ask(50, 51)
    service.wait(1)
    service.ask(1, 2, 3, 4)
    service.wait(1)
    service.ask(1, 2, 3, 5, 6)  # block 4 was a partial one: it is written anew
    tail = service.leaf(1, 2, 3, 4)
    assert isinstance(tail.history, Visit)
    assert not tail.history.open
    policy = learner(service)
    now = service.clock.now()
    assert policy.priority(tail, now) < policy.priority(service.leaf(50, 51), now)


def test_a_return_to_what_was_evicted_is_seen() -> None:
    service = Service(8)
    service.ask(1, 2, 3, 4)
    memo = service.leaf(1, 2, 3, 4).history
    service.wait(3)
    service.ask(10, 11, 12, 13, 14, 15, 16, 17)
    assert service.cache.match(np.repeat(np.array([1, 2], np.int32), BLOCK)).resume == 0
    service.wait(4)
    service.ask(1, 2, 3, 4, 5)
    assert isinstance(memo, Visit)
    assert not memo.open
    back = service.leaf(1, 2, 3, 4, 5).history
    assert isinstance(back, Visit)
    assert (back.turn, back.since) == (1, 7.0)


def test_both_parts_of_a_cut_have_the_visit_and_the_count() -> None:
    service = Service(100)
    for last in (4, 5, 6, 7):
        service.ask(1, 2, last, 8, 9, 10)
        service.wait(1)
    assert service.leaf(1, 2).value == 3.0
    service.ask(1, 20, 21, 22)
    assert service.leaf(1).value == 4.0
    assert service.leaf(1, 2).value == 3.0


def test_a_use_is_seen_where_it_happens_and_not_deeper() -> None:
    service = Service(100)
    service.ask(1, 2, 3, 4, 5, 6, 7, 8)
    visit = service.leaf(1, 2, 3, 4, 5, 6, 7, 8).history
    assert isinstance(visit, Visit)
    assert visit.watched == (64, 0)  # the middle of what was new
    service.wait(3)
    service.ask(1, 2, 3, 50)
    assert visit.watched
    service.wait(4)
    service.ask(1, 2, 3, 4, 5, 60)
    assert not visit.watched
    away = learner(service).model._away[0]
    assert away == 7.0


def test_an_unused_tail_is_evicted_first_and_alone() -> None:
    service = Service(400)
    for chat in range(1, 41):
        for turn in (1, 2, 3):
            history = [100 * chat + i for i in range(4 * turn)]
            service.ask(*history, 100 * chat + 50 + turn, 100 * chat + 60 + turn)  # and two that are not kept
            service.wait(2.0)
    policy = learner(service)
    last = service.leaf(*(4000 + i for i in range(12)), 4053, 4063)
    assert policy.tokens_to_evict(last) == 2 * BLOCK
    ends = {n: policy._wanted[n] for n in (0, (2 * BLOCK).bit_length())}
    assert ends[0] < -1.0 < -0.2 < ends[(2 * BLOCK).bit_length()]


# -- what it keeps ---------------------------------------------------------------------------------------------


def test_it_begins_as_least_recently_used() -> None:
    rng = np.random.default_rng(3)
    services = [Service(40, policy) for policy in ("lru", "adaptive")]
    for _ in range(25):
        chat = int(rng.integers(12))
        for service in services:
            service.ask(*(1000 * chat + i for i in range(8)))
            service.wait(1.0)
    assert services[0].hits == services[1].hits
    assert services[0].hits > 0


def chats(service: Service, seed: int, chats: int, hint: bool = False) -> None:
    """Serve conversations of 8 blocks a turn; most stop after one turn, the others continue."""
    rng = np.random.default_rng(seed)
    due: list[tuple[float, int, int]] = []
    start, number = 0.0, 0
    while number < chats or due:
        if number < chats and (not due or start <= min(due)[0]):
            when, chat, turn, start, number = (
                start,
                number,
                0,
                start + float(rng.exponential(2.0)),
                number + 1,
            )
        else:
            when, chat, turn = min(due)
            due.remove((when, chat, turn))
        more = turn < 6 and bool(rng.random() < (0.1 if turn == 0 else 0.9))
        if more:
            due.append((when + float(rng.uniform(20.0, 60.0)), chat, turn + 1))
        service.wait(max(0.0, when - service.clock.now()))
        service.ask(
            *(100 * chat + i for i in range(8 * (turn + 1))), ending="more" if more and hint else None
        )


def test_adaptive_keeps_conversations_that_returned_before() -> None:
    lru, adaptive = Service(250, "lru"), Service(250)
    chats(lru, 5, 900)
    chats(adaptive, 5, 900)
    assert adaptive.rate > lru.rate + 0.08
    adaptive.cache.check()


def test_how_answers_end_is_a_hint_it_learns_from() -> None:
    plain, hinted = Service(150), Service(150)
    chats(plain, 6, 900)
    chats(hinted, 6, 900, hint=True)
    assert hinted.rate > plain.rate + 0.02


def test_an_ended_session_is_evicted_first() -> None:
    service = Service(8)
    service.ask(1, 2, 3, session="a")
    service.wait(1)
    service.ask(5, 6, 7, session="b")
    service.cache.end_session("b")
    service.wait(1)
    service.ask(10, 11, 12, 13)
    assert service.ask(1, 2, 3) == 3


@pytest.mark.parametrize("traffic", ["zipf", "loop", "scan", "one shot"])
@pytest.mark.few(1)
def test_on_other_traffic_it_is_hardly_ever_behind_least_recently_used(traffic: str) -> None:
    rng = np.random.default_rng(11)
    services = [Service(120, policy) for policy in ("lru", "adaptive")]
    for i in range(2500):
        if traffic == "zipf":
            base = min(int(rng.zipf(1.3)), 500)
        elif traffic == "loop":
            base = i % 25
        elif traffic == "scan":
            base = int(rng.integers(10)) if i % 2 else 1000 + i
        else:
            base = i
        pause = float(rng.exponential(1.0))
        for service in services:
            service.ask(*(100 * base + b for b in range(6)))
            service.wait(pause)
    lru, adaptive = (service.rate for service in services)
    assert adaptive >= lru - 0.005
    services[1].cache.check()


# -- what it costs ---------------------------------------------------------------------------------------------


def test_two_caches_that_see_the_same_decide_the_same() -> None:
    twins = [Service(200), Service(200)]
    for twin in twins:
        chats(twin, 9, 300)
    assert twins[0].hits == twins[1].hits
    assert twins[0].cache.stats() == twins[1].cache.stats()


def test_what_it_remembers_takes_less_than_64_bytes_a_block() -> None:
    service = Service(400)
    chats(service, 2, 200)
    nodes: list[Node] = list(service.cache.state.tree.roots.values())
    memos: dict[int, object] = {}
    blocks = 0
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        blocks += node.count
        memos[id(node.history)] = node.history
    size = 8 * blocks  # the slot of each run, at the most
    for memo in memos.values():
        if memo is not None:
            assert isinstance(memo, Visit)
            parts = [getattr(memo, name) for name in Visit.__slots__]
            parts += memo.watched
            size += sys.getsizeof(memo) + sum(sys.getsizeof(p) for p in parts if p is not None)
    assert blocks > 300
    assert size < 64 * blocks


def test_the_queue_of_looks_stays_in_proportion_to_the_cache() -> None:
    service = Service(60)
    chats(service, 4, 600)
    queue = service.cache.state.accounts[""].queue
    assert len(queue._expiring) <= 64 + 8 * max(8, len(queue))


# -- restarts --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> Service:
    """A service that has seen conversations of five turns, and prompts that never come again."""
    service, rng = Service(60), np.random.default_rng(0)
    for number in range(400):
        base = 1000 * number
        for turn in range(1, 6 if number % 2 else 2):
            service.ask(*range(base, base + 2 * turn), ending="stop" if number % 2 else "length")
            service.wait(float(rng.uniform(5, 40)))
    return service


def test_what_was_learned_continues_after_a_restart(trained: Service) -> None:
    first = trained
    learned = first.cache.save_policy()
    assert learned is not None
    assert sum(len(value) for value in learned.values() if isinstance(value, bytes)) < 14 * 8192
    second = Service(60)
    second.cache.restore_policy(learned)
    old, new = learner(first), learner(second)
    old.model.fit(first.clock.now())
    assert np.allclose(new.model.factors, old.model.factors, atol=0.02)
    for stratum in range(4):
        for age in (1.0, 20.0, 300.0):
            there = old.model.index(stratum, 0.0, age)
            assert new.model.index(stratum, 0.0, age) == pytest.approx(there, abs=0.05)
    assert (new._tail, new._endings, new._tenants) == (old._tail, old._endings, old._tenants)
    untrained = learner(Service(60))
    assert untrained.model.factors != new.model.factors
    assert new.model.index(1, 0.0, 300.0) != pytest.approx(untrained.model.index(1, 0.0, 300.0), abs=0.05)


def test_a_restored_sample_does_not_age(trained: Service) -> None:
    """Nothing is observed while no engine runs."""
    learned = trained.cache.save_policy()
    second = Service(60)
    assert learned is not None
    second.cache.restore_policy(learned)
    before = learner(second).model.factors
    second.wait(50_000)
    learner(second).model.fit(second.clock.now())
    assert learner(second).model.factors == before


@pytest.mark.parametrize(
    "change",
    [
        {"away": b""},
        {"away": None},
        {"weight": b"\0\0\xc0\x7f"},
        {"stratum": b"\xff"},
        {"values": b"\xff"},
        {"stride": 0},
        {"stride": "1"},
        {"span": float("nan")},
        {"tenants": {"a": 3}},
        {"endings": ["stop"]},
        {"without": [-1.0] * 24},
    ],
    ids=lambda change: next(iter(change)),
)
def test_damaged_state_is_refused_and_changes_nothing(trained: Service, change: dict[str, object]) -> None:
    learned = trained.cache.save_policy()
    assert learned is not None
    for name, value in change.items():
        if isinstance(value, bytes) and value:
            value = learned[name][: -len(value)] + value
        learned[name] = value
    service = Service(60)
    with pytest.raises(ValueError, match=r"\w"):
        service.cache.restore_policy(learned)
    assert (learner(service).model.fits, learner(service)._tenants) == (1, {})


def test_a_policy_that_does_not_learn_has_nothing_to_save() -> None:
    cache = Service(60, "lru").cache
    assert cache.save_policy() is None
    cache.restore_policy({"away": b""})


# -- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["state", "state+full"])
def test_a_checkpoint_that_open_sequences_use_is_evicted_last(kind: str) -> None:
    """Nodes of an open sequence cannot be evicted, but its checkpoints can."""
    world = make_world(kind, slabs_for(kind, 800, 16), policy="adaptive")
    prefix = prompt_of(64, seed=1)
    first = start(world, prefix + prompt_of(32, seed=2))
    assert world.cache.checkpoint(first.sequence, 64)
    run(world, first)
    checkpoint = first.sequence.used_checkpoints[0]
    assert checkpoint.position == 64
    for seed in range(10, 40):
        world.clock.advance(1)
        cached(world, prompt_of(48, seed))
    assert cached(world, prompt_of(48, seed=10)) == 0, "the cache is full, and older entries were evicted"
    second = serve(world, prefix + prompt_of(16, seed=3))
    assert second.sequence.resumed == 64
    assert checkpoint.users == 2
    finish(world, first)
    finish(world, second)
    assert checkpoint.users == 0
    for seed in range(40, 90):
        world.clock.advance(1)
        cached(world, prompt_of(48, seed))
    assert cached(world, prefix + prompt_of(16, seed=4)) == 0, "without users, it is evicted like others"

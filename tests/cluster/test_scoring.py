"""The index of a fleet and the choice of a worker."""

from __future__ import annotations

import random

import msgspec
import pytest

pytest.importorskip("msgspec")

from kvloom.cluster.router import FleetIndex, Group, Scorer, ScoringOptions, SpeedModel, WorkerLoad
from kvloom.cluster.router.fleet import Fleet, Offer
from kvloom.core import (
    CacheControl,
    KVCache,
    LayerSpec,
    PoolLayout,
    attention_fields,
    hash_chain,
    root_hash,
    token_bytes,
)
from kvloom.events_wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, wire_hashes

TOKENS = list(range(1, 161))
ROOT = root_hash("m")
HASHES = wire_hashes(hash_chain(ROOT, token_bytes(TOKENS)))
NONE = msgspec.Raw(b"\x90")


def stored(count: int, medium: str = "GPU", group: int = 0, first: int = 0) -> BlockStored:
    return BlockStored(list(HASHES[first:count]), None, NONE, 16, medium=medium, group_idx=group)


def batch(*events: BlockStored | BlockRemoved | AllBlocksCleared) -> EventBatch:
    return EventBatch(1.0, list(events))


def index_of(*workers: str, groups: tuple[Group, ...] = (Group(),)) -> FleetIndex:
    index = FleetIndex(groups)
    for worker in workers:
        index.add(worker)
    return index


def test_counts_follow_events_of_any_order() -> None:
    """The counts of blocks equal a recount after stored, stored again, removed, cleared and added workers."""
    import random

    rng = random.Random(1)
    groups = (Group(0), Group(1, "sliding", 32))
    index = index_of("a", "b", groups=groups)
    have: dict[tuple[str, str, int], set[int]] = {}
    for _ in range(600):
        worker, medium, group = rng.choice("ab"), rng.choice(["GPU", "CPU"]), rng.choice([0, 1])
        some = rng.sample(range(len(HASHES)), rng.randint(1, 5))
        mine = have.setdefault((worker, medium, group), set())
        what = rng.random()
        if what < 0.5:
            index.apply(
                worker,
                batch(BlockStored([HASHES[i] for i in some], None, NONE, 16, medium=medium, group_idx=group)),
            )
            mine.update(some)
        elif what < 0.97:
            index.apply(worker, batch(BlockRemoved([HASHES[i] for i in some], medium, group)))
            mine.difference_update(some)
        else:
            index.apply(worker, batch(AllBlocksCleared()))
            for (name, *_), blocks in have.items():
                if name == worker:
                    blocks.clear()
        for name in "ab":
            found = index.counts(name)
            for one in ("GPU", "CPU"):
                assert found[one] == len(have.get((name, one, 0), set()) | have.get((name, one, 1), set()))
    for _ in index.remove("a"):
        pass
    assert set(index.counts("a").values()) == {0}


def test_lengths_follow_events_by_medium() -> None:
    index = index_of("a", "b", "c")
    index.apply("a", batch(stored(4), stored(8, "CPU"), stored(9, "DISK", first=8)))
    index.apply("b", batch(stored(10)))
    assert index.lengths(HASHES) == {
        "a": (64, 128, 144, 144),
        "b": (160, 160, 160, 160),
        "c": (0, 0, 0, 0),
    }
    index.apply("b", batch(BlockRemoved(list(HASHES[5:6]), "GPU", 0)))
    assert index.lengths(HASHES)["b"][0] == 80
    index.apply("b", batch(AllBlocksCleared()))
    assert index.lengths(HASHES)["b"] == (0, 0, 0, 0)
    assert index.lengths(HASHES)["a"][0] == 64


def test_windows_and_states_bound_what_can_be_resumed() -> None:
    groups = (Group(0, "full"), Group(1, "sliding", 33), Group(2, "state"))
    index = index_of("a", groups=groups)
    index.apply("a", batch(stored(10), stored(10, group=1), stored(7, group=2, first=6)))
    assert index.lengths(HASHES)["a"][0] == 112, "the only state snapshot"
    index.apply("a", batch(BlockRemoved(list(HASHES[5:6]), "GPU", 1)))
    assert index.lengths(HASHES)["a"][0] == 0, "the window before the snapshot is gone"


def test_a_removed_workers_place_is_reused_without_its_blocks() -> None:
    index = index_of("a", "b")
    index.apply("a", batch(stored(10)))
    index.expect("a", HASHES)
    for _ in index.remove("a"):
        pass
    index.add("c")
    assert index.lengths(HASHES) == {"b": (0,) * 4, "c": (0,) * 4}


def test_requests_on_their_way_count_until_events_decide() -> None:
    index = index_of("a", "b")
    index.expect("a", HASHES[:5])
    assert index.lengths(HASHES)["a"][0] == 80
    index.arrived("a", HASHES[:5])
    assert index.lengths(HASHES)["a"][0] == 80, "without events the request itself is all that is known"
    index.apply("a", batch(stored(3)))
    index.arrived("a", HASHES[:5])
    assert index.lengths(HASHES)["a"][0] == 48


def test_foreign_hashes_are_names_and_tokens_are_hashed_here() -> None:
    index = FleetIndex()
    index.add("vllm", trusts_hashes=False, root=ROOT)
    tokens = msgspec.Raw(msgspec.msgpack.encode(TOKENS[:64]))
    more = msgspec.Raw(msgspec.msgpack.encode(TOKENS[64:128]))
    index.apply("vllm", batch(BlockStored([b"x" * 32, 77], None, tokens, 32, medium="GPU")))
    index.apply(
        "vllm", batch(BlockStored([78], 77, more, 64, medium="GPU", kv_cache_spec_kind="full_attention"))
    )
    index.apply(
        "vllm", batch(BlockStored([99], 77, more, 64, medium="GPU", kv_cache_spec_kind="sliding_window"))
    )
    assert index.lengths(HASHES)["vllm"][0] == 128
    index.apply("vllm", batch(BlockRemoved([78], "GPU")))
    assert index.lengths(HASHES)["vllm"][0] == 64
    index.apply("vllm", batch(BlockStored([5], 1234, more, 64, medium="GPU")))
    assert index.lengths(HASHES)["vllm"][0] == 64, "a block of an unknown parent is left out"


def scorer_of(*names: str, options: ScoringOptions | None = None, capacity: int = 100_000) -> Scorer:
    scorer = Scorer(options)
    speed = SpeedModel(0.02, 2e-5)
    scorer.loads = {name: WorkerLoad(capacity, speed) for name in names}
    return scorer


def full(tokens: int) -> tuple[int, ...]:
    return (tokens,) * 4


def test_the_longest_prefix_wins_until_its_worker_is_busy() -> None:
    scorer = scorer_of("a", "b")
    lengths = {"a": full(8000), "b": full(0)}
    choice = scorer.choose(10_000, lengths, ["a", "b"], 0.0)
    assert choice is not None
    assert (choice.worker, choice.cached) == ("a", 8000)
    scorer.loads["a"].sent("r", 40_000, 40_000, 0.0)
    busy = scorer.choose(10_000, lengths, ["a", "b"], 0.0)
    assert busy is not None
    assert busy.worker == "b"
    scorer.loads["a"].first_token("r", 0.9)
    scorer.loads["a"].ended("r", 1.0)
    again = scorer.choose(10_000, lengths, ["a", "b"], 1.0)
    assert again is not None
    assert again.worker == "a"


def test_pages_of_a_tier_count_less_than_pages_of_the_gpu_and_more_than_none() -> None:
    scorer = scorer_of("gpu", "cpu", "none")
    have = {"gpu": full(8000), "cpu": (0, 8000, 8000, 8000), "none": full(0)}
    seconds = {}
    for name in have:
        choice = scorer.choose(10_000, have, [name], 0.0)
        assert choice is not None
        seconds[name] = choice.seconds
    assert seconds["gpu"] < seconds["cpu"] < seconds["none"]
    slow = scorer_of("disk", options=ScoringOptions(load_rates=(1e5, 100.0, 100.0)))
    choice = slow.choose(10_000, {"disk": (0, 0, 8000, 8000)}, ["disk"], 0.0)
    assert choice is not None
    assert choice.cached == 0, "recomputing is faster than this disk"


def test_affinity_holds_and_yields_under_overload() -> None:
    scorer = scorer_of("a", "b", options=ScoringOptions(overload_seconds=0.5, affinity_seconds=10.0))
    first = scorer.choose(100, {}, ["a", "b"], 0.0, session="s")
    assert first is not None
    home = first.worker
    scorer.loads[home].sent(1, 10_000, 10_000, 0.0)
    second = scorer.choose(100, {}, ["a", "b"], 0.0, session="s")
    assert second is not None
    assert second.worker == home
    scorer.loads[home].sent(2, 50_000, 50_000, 0.0)
    third = scorer.choose(100, {}, ["a", "b"], 0.0, session="s")
    assert third is not None
    assert third.worker != home


def test_a_resident_adapter_and_free_memory_are_preferred() -> None:
    scorer = scorer_of("a", "b")
    scorer.loads["b"].adapters.add("sql")
    choice = scorer.choose(100, {}, ["a", "b"], 0.0, adapter="sql")
    assert choice is not None
    assert choice.worker == "b"
    scorer.loads["b"].sent(1, 10, 99_000, 0.0)
    scorer.loads["b"].first_token(1, 0.1)
    choice = scorer.choose(2000, {}, ["a", "b"], 1.0)
    assert choice is not None
    assert choice.worker == "a"


def test_the_speed_is_learned() -> None:
    speed = SpeedModel(0.02, 2e-5)
    for _ in range(200):
        speed.observe(10_000, 0.02 + 10_000 * 1e-4)
    assert speed.prefill(10_000) == pytest.approx(1.02, rel=0.05)


def test_no_candidate_no_choice() -> None:
    assert scorer_of("a").choose(10, {}, [], 0.0) is None


def test_the_router_computes_the_root_hash_of_a_worker() -> None:
    layout = PoolLayout.build({"0": LayerSpec("token", attention_fields(2, 16, "fp32"))})
    cache, offer = KVCache(layout, slabs=4, model="m"), Offer(hash_model="m")
    for tenant, salt, lossy in (("", "", False), ("red", "", False), ("red", "s", False), ("", "s", True)):
        control = CacheControl(tenant=tenant, salt=salt, lossy=lossy)
        assert Fleet.root("m", offer, tenant, salt, lossy) == cache.root_hash(control)


def test_a_full_pool_costs_the_pages_that_a_prompt_evicts() -> None:
    """A prompt whose beginning is cached on a full worker goes to a worker with free pages if it would evict many pages
    there. A long hit still wins."""
    scorer = scorer_of("full", "empty", options=ScoringOptions(delay_weight=0.0), capacity=10_000)
    scorer.loads["full"].cached_tokens = 9_500
    short, long = {"full": full(400)}, {"full": full(800)}
    for lengths, expected in ((short, "empty"), (long, "full")):
        choice = scorer.choose(1000, lengths, ["full", "empty"], 0.0)
        assert choice is not None
        assert choice.worker == expected
    scorer.loads["full"].cached_tokens = 2_000
    choice = scorer.choose(1000, short, ["full", "empty"], 0.0)
    assert choice is not None
    assert choice.worker == "full", "a pool with free pages evicts nothing"


def test_the_choice_has_the_smallest_cost() -> None:
    draw, options = random.Random(0), ScoringOptions(affinity_seconds=0.3)
    for number in range(300):
        scorer, names = Scorer(options), [f"w{i}" for i in range(draw.randint(1, 8))]
        lengths, now = {}, draw.uniform(0, 2)
        for name in names:
            speed = SpeedModel(draw.uniform(0, 0.1), draw.choice([1e-5, 1e-4, 1e-3]))
            scorer.loads[name] = load = WorkerLoad(draw.choice([0, 4000]), speed)
            for key in range(draw.randint(0, 3)):
                tokens = draw.randint(1, 2000)
                load.sent(key, draw.randint(1, tokens), tokens, 0.0)
            load.foreign, load.cached_tokens = draw.randint(0, 5), draw.randint(0, 4000)
            if draw.random() < 0.8:
                lengths[name] = tuple(sorted(draw.randint(0, 1200) for _ in range(4)))
        home = draw.choice(names)
        assert scorer.choose(1000, {}, [home], now, session="s") is not None
        costs = {
            name: scorer._cost(scorer.loads[name], 1000, lengths.get(name, (0, 0, 0, 0)), now)
            for name in names
        }
        least = max(now, min(load.busy_until for load in scorer.loads.values()))
        reduced = scorer.loads[home].busy_until - least <= options.overload_seconds
        total = {name: cost[0] - 0.3 * (reduced and name == home) for name, cost in costs.items()}
        found = scorer.choose(1000, lengths, names, now, session="s")
        assert found is not None
        assert total[found.worker] == pytest.approx(min(total.values())), number
        assert found[1:] == costs[found.worker][1:]

"""Events on the wire: encoding, publishing, gaps, replays, snapshots and restarts, over real ZMQ sockets on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("zmq")

from kvloom.core import (
    HASH_TOKENS,
    BlockRemoved as Removed,
    BlockStored as Stored,
    Field,
    HashIndex,
    KVCache,
    LayerSpec,
    PoolLayout,
    Visibility,
    hash_chain,
    token_bytes,
)
from kvloom.events_wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventDecoder,
    EventSettings,
    Subscriber,
    WirePublisher,
    block_tokens,
    offset_port,
    publisher as publisher_module,
    subscriber as subscriber_module,
    wire_hash,
    wire_hashes,
)
from kvloom.events_wire.block_tokens import BlockTokens
from kvloom.serve.server_options import with_own_events

FULL = LayerSpec("token", (Field("kv", (1,), "int8"),), Visibility("full"))
SLIDING = LayerSpec("token", (Field("kv", (1,), "int8"),), Visibility("sliding", 40))
STATE = LayerSpec("state", (Field("s", (16,), "int8"),))


def cache_of(slabs: int = 65, **layers: LayerSpec) -> KVCache:
    layout = PoolLayout.build(layers or {"a": FULL}, HASH_TOKENS)
    return KVCache(layout, slabs, max_sequences=4, max_tokens=4096, model="m")


def compute(cache: KVCache, tokens: list[int]) -> None:
    seq = cache.open(cache.match(tokens))
    start = int(cache.lengths[seq.row])
    assert not seq.extend(len(tokens) - start)
    seq.commit(np.array(tokens[start:], np.int32))
    seq.close()


@pytest.fixture
def addresses(tmp_path: Path) -> EventSettings:
    return EventSettings(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")


@pytest.fixture
def opened() -> Iterator[Callable[[KVCache, EventSettings], WirePublisher]]:
    """Open publishers, and close them at the end."""
    made: list[WirePublisher] = []

    def open_(cache: KVCache, settings: EventSettings) -> WirePublisher:
        made.append(WirePublisher(cache, settings))
        return made[-1]

    yield open_
    for one in made:
        one.close()


class Index:
    """What a router keeps: all hashes by medium and group."""

    def __init__(self) -> None:
        self.pages: set[tuple[int, str, int]] = set()
        self.batches: list[EventBatch] = []

    def apply(self, batch: EventBatch) -> None:
        self.batches.append(batch)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.pages.clear()
            else:
                named = {(h, event.medium or "", event.group_idx or 0) for h in event.block_hashes}
                self.pages = self.pages | named if isinstance(event, BlockStored) else self.pages - named


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def published(cache: KVCache, publisher: WirePublisher) -> set[tuple[int, str, int]]:
    """All that the publisher's mirror has."""
    return {
        (wire_hash(h), "GPU", group)
        for _, hashes, groups, _, _ in publisher._mirror.chains(publisher._mirror.entries())
        for h in hashes
        for group in groups
    }


def test_a_stored_event_has_vllms_fields(addresses: EventSettings, opened) -> None:
    cache = cache_of(a=FULL, b=SLIDING)
    publisher, heard = opened(cache, addresses), Index()

    async def run() -> None:
        follower = Subscriber(addresses.endpoint, addresses.replay, heard.apply)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.counts.is_synced)
        compute(cache, list(range(1, 50)))
        publisher.flush()
        await until(lambda: bool(heard.pages))
        task.cancel()

    asyncio.run(run())
    first, second = [e for batch in heard.batches for e in batch.events if isinstance(e, BlockStored)][:2]
    assert first.kv_cache_spec_kind == "full_attention"
    assert first.kv_cache_spec_sliding_window is None
    assert second.kv_cache_spec_kind == "sliding_window"
    assert second.kv_cache_spec_sliding_window == 40
    hashes = hash_chain(cache.root_hash(cache_control()), token_bytes(list(range(1, 49))))
    assert first.block_hashes == wire_hashes(hashes)
    assert all(-(2**63) <= h < 2**63 for h in first.block_hashes)
    assert first.parent_block_hash is None
    assert first.tokens == list(range(1, 49))
    assert (first.block_size, first.medium) == (16, "GPU")


def cache_control():
    from kvloom.core import CacheControl

    return CacheControl()


def test_events_are_maps_as_vllm_032_writes_them_and_arrays_are_read_too() -> None:
    event = {
        "type": "BlockStored", "block_hashes": [1, b"\x02" * 32], "parent_block_hash": None, "token_ids": [5] * 32,
        "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": "x", "group_idx": 0,
    }  # fmt: skip
    array = ["BlockStored", [1, b"\x02" * 32], None, [5] * 32, 16, None, "GPU", "x"]
    for events in ([event], [array]):
        decoder = EventDecoder()
        batch = decoder.decode(msgspec.msgpack.encode([1.5, events, 0]))
        (stored,) = batch.events
        assert isinstance(stored, BlockStored)
        assert stored.block_hashes == [1, b"\x02" * 32]
        assert stored.tokens == [5] * 32
        assert stored.lora_name == "x"
        removed = (
            {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
            if events == [event]
            else ["BlockRemoved", [1], "GPU"]
        )
        (gone,) = decoder.decode(msgspec.msgpack.encode([2.0, [removed]])).events
        assert gone == BlockRemoved([1], "GPU")
    with pytest.raises(msgspec.DecodeError):
        EventDecoder().decode(msgspec.msgpack.encode({"no": "batch"}))


def test_arrays_and_topic_as_llm_d_reads_them(tmp_path: Path, opened) -> None:
    """llm-d subscribes to `kv@`, takes pod and model from the topic, and reads the fields of an event by position."""
    import zmq

    settings = EventSettings(
        f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", topic="kv@10.0.0.7:8000@m", encoding="array"
    )
    cache = cache_of(slabs=17, a=FULL, b=SLIDING)
    publisher = opened(cache, settings)
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.setsockopt(zmq.SUBSCRIBE, b"kv@")
        listener.connect(settings.endpoint)
        frames: list[bytes] = []
        for number in range(200):  # a subscription takes a moment
            compute(cache, list(range(number * 100 + 1, number * 100 + 50)))
            publisher.flush()
            if listener.poll(100):
                frames = listener.recv_multipart()
                break
    topic, sequence, payload = frames
    assert topic.decode().split("@") == ["kv", "10.0.0.7:8000", "m"]
    assert len(sequence) == 8
    _, events, rank = msgspec.msgpack.decode(payload)
    assert rank == 0
    stored = [event for event in events if event[0] == "BlockStored"]
    for event, kind, window in zip(stored[:2], ("full_attention", "sliding_window"), (None, 40), strict=True):
        _, hashes, parent, tokens, size, lora, medium, name, keys, group, found_kind, found_window, *_ = event
        assert (len(hashes), parent, len(tokens), size, medium) == (3, None, 48, 16, "GPU")
        assert (lora, name, keys, group) == (None, None, None, event is stored[1])
        assert (found_kind, found_window) == (kind, window)
    decoded = [one for one in EventDecoder().decode(payload).events if isinstance(one, BlockStored)]
    assert decoded[0].block_hashes == stored[0][1]


def test_arrays_are_followed_with_replays_and_snapshots(tmp_path: Path, opened) -> None:
    settings = EventSettings(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", encoding="array")
    cache, heard = cache_of(slabs=17, a=FULL, b=SLIDING), Index()
    publisher = opened(cache, settings)
    compute(cache, list(range(1, 50)))
    publisher.flush()

    async def run() -> None:
        task = asyncio.create_task(Subscriber(settings.endpoint, settings.replay, heard.apply).run())
        await until(lambda: bool(heard.pages))
        for start in range(100, 2000, 100):  # evicts blocks, too
            compute(cache, list(range(start, start + 90)))
            publisher.flush()
        await until(lambda: heard.pages == published(cache, publisher))
        task.cancel()

    asyncio.run(run())
    assert any(isinstance(event, BlockRemoved) for batch in heard.batches for event in batch.events)


def test_events_of_tiers_get_parents_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_tokens, "MOST_REMOVED", 1)
    known = BlockTokens(group=0)
    a, b, c = (bytes([n]) * 16 for n in (1, 2, 3))
    root, tokens = bytes(16), token_bytes(list(range(48)))
    on_device = Stored(root, (a, b, c), (0, 1), "device", tokens=tokens)
    assert known.stored(on_device, True) == [(on_device, True)]

    offloaded = known.stored(Stored(b"", (b, c, a), (0,), "host"), True)
    assert [(one.parent, one.hashes, one.tokens, first) for one, first in offloaded] == [
        (a, (b, c), token_bytes(list(range(16, 48))), False),
        (root, (a,), token_bytes(list(range(16))), True),
    ]
    other_group = Stored(b"", (b,), (1,), "host")
    assert known.stored(other_group, True) == [(other_group, True)]
    ((unknown, first),) = known.stored(Stored(b"", (b"u" * 16,), (0,), "disk"), True)
    assert (unknown.tokens, first) == (b"", True)

    known.removed(Removed((a, b, c), (0, 1), "device", "evicted"))
    assert len(known) == 3, "host memory still has the blocks"
    known.removed(Removed((a, b, c), (1,), "host", "evicted"))
    known.removed(Removed((a, b), (0,), "host", "evicted"))
    assert len(known) == 2, "c is in host memory, b may be on its way to another tier"
    ((moved, _),) = known.stored(Stored(b"", (b,), (0,), "disk"), True)
    assert moved.tokens == token_bytes(list(range(16, 32)))
    known.removed(Removed((b,), (0,), "disk", "evicted"))
    known.removed(Removed((c,), (0,), "host", "evicted"))
    assert len(known) == 1


def test_the_topic_of_a_served_model() -> None:
    settings = {"kv_events": "tcp://127.0.0.1:5557", "kv_events_topic": "kv@{host}:8000@{model}"}
    own = with_own_events(settings, 1, "my/model")
    assert own["kv_events"] == "tcp://127.0.0.1:5558"
    assert own["kv_events_topic"] == f"kv@{socket.gethostname()}:8000@my/model"
    with pytest.raises(ValueError, match=r"\{pod\}.* may contain \{model\} and \{host\}"):
        with_own_events({**settings, "kv_events_topic": "kv@{pod}"}, 0, "m")
    with pytest.raises(ValueError, match="kv_events_encoding 'json' is not one of map, array"):
        EventSettings("tcp://127.0.0.1:5557", encoding="json")


def test_a_late_subscriber_gets_a_snapshot_and_then_follows(addresses: EventSettings, opened) -> None:
    cache = cache_of(slabs=41, a=FULL, b=SLIDING, c=STATE)
    publisher, heard = opened(cache, addresses), Index()
    for start in range(1, 2000, 200):  # more than fit, so that pages are evicted
        compute(cache, list(range(start, start + 150)))
        publisher.flush()
    assert cache.inspect.evicted.total()

    async def run() -> None:
        follower = Subscriber(addresses.endpoint, addresses.replay, heard.apply)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.counts.snapshots == 1)
        assert heard.pages == published(cache, publisher)
        compute(cache, list(range(5000, 5100)))
        publisher.flush()
        await until(lambda: heard.pages == published(cache, publisher))
        task.cancel()

    asyncio.run(run())


def test_a_gap_is_filled_by_replay(addresses: EventSettings, opened) -> None:
    cache = cache_of()
    publisher, heard = opened(cache, addresses), Index()

    async def run() -> None:
        follower = Subscriber(addresses.endpoint, addresses.replay, heard.apply)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.counts.is_synced)
        for start in (1, 100):
            compute(cache, list(range(start, start + 40)))
            publisher.flush()
        await until(lambda: follower.counts.batches >= 2)
        follower._last = 0  # as if the second batch had been lost
        compute(cache, list(range(500, 540)))
        publisher.flush()
        await until(lambda: follower.counts.replays == 1)
        await until(lambda: heard.pages == published(cache, publisher))
        task.cancel()

    asyncio.run(run())


def test_a_snapshot_is_requested_again_if_the_worker_did_not_answer(
    addresses: EventSettings, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "REPLAY_SECONDS", 0.2)
    monkeypatch.setattr(subscriber_module, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(subscriber_module, "LONGEST_RETRY", 0.5)
    cache, heard = cache_of(), Index()
    publisher = opened(cache, addresses)
    compute(cache, list(range(1, 50)))
    publisher.flush()
    answer, requests = publisher._answer, []
    monkeypatch.setattr(publisher, "_answer", requests.append)  # as if the worker hung

    async def run() -> None:
        follower = Subscriber(addresses.endpoint, addresses.replay, heard.apply)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.counts.retries >= 2)
        assert not follower.counts.is_synced
        assert len(requests) >= 2
        monkeypatch.setattr(publisher, "_answer", answer)
        await until(lambda: follower.counts.is_synced)
        assert heard.pages == published(cache, publisher) != set()
        compute(cache, list(range(500, 540)))
        publisher.flush()
        await until(lambda: heard.pages == published(cache, publisher))
        retries = follower.counts.retries
        await asyncio.sleep(0.7)
        assert follower.counts.retries == retries, "no request after the answer"
        task.cancel()

    asyncio.run(run())


def test_a_full_queue_drops_a_batch_and_the_snapshot_repairs_it(
    addresses: EventSettings, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of()
    publisher, heard = opened(cache, addresses), Index()

    async def run() -> None:
        follower = Subscriber(addresses.endpoint, addresses.replay, heard.apply)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.counts.is_synced)
        compute(cache, list(range(1, 40)))
        publisher.flush()
        await until(lambda: bool(heard.pages))
        monkeypatch.setattr(publisher_module, "MAX_QUEUED_BATCHES", 0)
        compute(cache, list(range(100, 140)))
        publisher.flush()
        assert publisher.dropped == 1
        monkeypatch.undo()
        before = follower.counts.snapshots
        compute(cache, list(range(200, 240)))
        publisher.flush()
        await until(lambda: follower.counts.snapshots > before)
        await until(lambda: heard.pages == published(cache, publisher))
        task.cancel()

    asyncio.run(run())


def test_a_restarted_worker_replaces_its_old_pages(addresses: EventSettings) -> None:
    heard = Index()

    async def run() -> None:
        follower = Subscriber(addresses.endpoint, addresses.replay, heard.apply)
        old = cache_of()
        first = WirePublisher(old, addresses)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.counts.is_synced)
        for start in range(1, 400, 40):
            compute(old, list(range(start, start + 40)))
            first.flush()
        await until(lambda: follower.counts.batches >= 10)
        await asyncio.to_thread(first.close)
        await asyncio.sleep(0.01)
        new = cache_of()
        second = WirePublisher(new, addresses)
        try:
            for start in range(1000, 1200, 40):
                compute(new, list(range(start, start + 40)))
                second.flush()
                await asyncio.sleep(0.3)  # the subscriber may still be reconnecting
            await until(lambda: heard.pages == published(new, second))
        finally:
            second.close()
            task.cancel()

    asyncio.run(run())


def test_lengths_equal_match_in_each_place() -> None:
    rng = np.random.default_rng(0)
    for layers in ({"a": FULL}, {"a": FULL, "b": SLIDING}, {"a": FULL, "b": SLIDING, "c": STATE}):
        groups = PoolLayout.build(layers, HASH_TOKENS).groups
        index: HashIndex[int] = HashIndex(groups)
        hashes = list(range(1, 41))
        for place in ("x", "y", "z"):
            index.add_place(place)
            for group in groups:
                reach = int(rng.integers(0, 41))
                kept = [h for h in hashes[:reach] if rng.random() < 0.95 or group.index == 0]
                for h in kept:
                    index.stored(h - 1, [h], [group.index], place)
        expected = [index.match(hashes, 40 * HASH_TOKENS, places=[place]) for place in ("x", "y", "z")]
        assert index.lengths(index.bits(hashes)) == [n // HASH_TOKENS * HASH_TOKENS for n in expected]


def test_ports_of_further_models() -> None:
    assert offset_port("tcp://127.0.0.1:5557", 2) == "tcp://127.0.0.1:5559"
    assert offset_port("ipc:///run/e", 1) == "ipc:///run/e_1"
    assert offset_port(None, 1) is None
    with pytest.raises(ValueError, match="not an address"):
        EventSettings("127.0.0.1:5557")

"""Block events of host memory and disk tiers, from a real engine over real ZMQ sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("zmq")

from kvloom.core import HASH_TOKENS, CacheControl, hash_chain, token_bytes, unit_hashes
from kvloom.engine import Engine, SamplingParams
from kvloom.events_wire import BlockStored, Subscriber, TierBlocks, wire_hash, wire_hashes
from kvloom.tiers import Objects
from tests.engines import make_engine
from tests.events_wire.test_events_wire import Index, until
from tests.models.zoo import config_of, prompts_of

Pages = set[tuple[int, str, int]]


def made(family: str, folder: Path, tiers: list[str], block_tokens: int, **settings: Any) -> Engine:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32).eval()
    addresses = {"kv_events": f"ipc://{folder}/events", "kv_events_replay": f"ipc://{folder}/replay"}
    return make_engine(
        model, block_tokens << 14, tiers=tiers, block_tokens=block_tokens, **addresses, **settings
    )


def ran(engine: Engine, seed: int) -> None:
    for prompt in prompts_of(seed, (110, 90, 120)):
        engine.add(prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        engine.run()
    assert engine.offload is not None
    engine.offload.flush()
    while engine.offload.is_retaining_pages:
        engine.offload.wait(0.01)
        engine.offload.poll()


def in_host(engine: Engine, known: dict[bytes, bytes]) -> Pages:
    """The pages that host memory has, by asking it about all block hashes that it ever had."""
    assert engine.offload is not None
    found: Pages = set()
    states = {group.index for group in engine.layout.of("state")}
    for group, forms in engine.offload.forms.items():
        names = list(known.values())
        stored = [engine.offload.host.lookup(Objects(names, group, form)) for form in forms]
        for place, name in enumerate(names):
            if all(one[place] for one in stored):
                units = (name,) if group in states else unit_hashes(name)
                found |= {(wire_hash(unit), "CPU", group) for unit in units}
    return found


def remember(engine: Engine) -> dict[bytes, bytes]:
    """Collect the block hashes of all pages that are offloaded."""
    assert engine.offload is not None
    known: dict[bytes, bytes] = {}
    store = engine.offload._store
    offload = store._offload

    def noting(batch: Any, is_unchanged: bool) -> None:
        for name in batch.hashes:  # a state's block hash may come without its units
            if len(unit_hashes(name)) >= len(unit_hashes(known.get(name, name))):
                known[bytes(name)] = name
        offload(batch, is_unchanged)

    store._offload = noting  # type: ignore[method-assign]
    return known


@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.few(1)
def test_events_of_host_memory_are_its_pages(family: str, block_tokens: int, tmp_path: Path) -> None:
    engine = made(family, tmp_path, [f"host:{8 * block_tokens}KiB"], block_tokens)
    known, heard = remember(engine), Index()

    def of_host() -> Pages:
        return {page for page in heard.pages if page[1] == "CPU"}

    async def follow() -> None:
        follower = Subscriber(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", heard.apply)
        task = asyncio.create_task(follower.run())
        for seed in range(1, 10):  # more than host memory has space for
            await asyncio.to_thread(ran, engine, seed)
            assert engine.events is not None
            engine.events.flush()
            await until(lambda: of_host() == in_host(engine, known))
        late = Index()
        other = Subscriber(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", late.apply)
        second = asyncio.create_task(other.run())
        await until(lambda: late.pages == heard.pages)  # by a snapshot
        task.cancel()
        second.cancel()

    try:
        asyncio.run(follow())
        assert engine.offload is not None
        assert engine.offload.host.index.evicted > 0
        assert of_host()
        assert {page[1] for page in heard.pages} == {"GPU", "CPU"}
    finally:
        engine.close()


@pytest.mark.parametrize(("family", "block_tokens"), [("llama", 16), ("gemma3_text", 64), ("qwen3_next", 16)])
@pytest.mark.few(2)
def test_events_of_host_memory_have_the_tokens_of_their_hashes(
    family: str, block_tokens: int, tmp_path: Path
) -> None:
    """With `kv_events_tier_tokens`, a subscriber can compute hashes of its own for the blocks of tiers."""
    tiers = [f"host:{8 * block_tokens}KiB"]
    engine = made(family, tmp_path, tiers, block_tokens, kv_events_tier_tokens=True)
    heard = Index()

    async def follow() -> None:
        follower = Subscriber(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", heard.apply)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.counts.is_synced)
        for seed in range(1, 10):  # more than the pool and host memory have space for
            await asyncio.to_thread(ran, engine, seed)
            assert engine.events is not None
            engine.events.flush()
        await until(lambda: engine.events is not None and follower.counts.batches == engine.events.published)
        task.cancel()

    try:
        asyncio.run(follow())
        root = engine.cache.root_hash(CacheControl())
    finally:
        engine.close()
    stored = [event for batch in heard.batches for event in batch.events if isinstance(event, BlockStored)]
    whole = {None: root}  # all 16 bytes of the hashes, by the hashes that are sent
    seen = 0
    for event in (one for one in stored if one.token_ids and one.block_size == HASH_TOKENS and one.tokens):
        hashes = hash_chain(whole[event.parent_block_hash], token_bytes(event.tokens))
        assert wire_hashes(hashes) == event.block_hashes
        whole |= dict(zip(event.block_hashes, hashes, strict=True))
        seen += event.medium == "CPU"
    assert seen > 10
    for event in stored:  # partial last blocks have no tokens
        if event.kv_cache_spec_kind == "full_attention" and not event.tokens:
            assert not set(event.block_hashes) & set(whole)


def test_pages_of_a_disk_tier_are_published_after_a_restart(tmp_path: Path) -> None:
    tiers = ["host:1MiB", f"disk:{tmp_path / 'pages'}:4MiB"]
    first = made("llama", tmp_path, tiers, 64)
    ran(first, 1)
    first.close()
    engine, heard = made("llama", tmp_path, tiers, 64), Index()

    async def follow() -> None:
        follower = Subscriber(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", heard.apply)
        task = asyncio.create_task(follower.run())
        assert engine.events is not None
        engine.events.flush()
        await until(lambda: any(page[1] == "DISK" for page in heard.pages))
        task.cancel()

    try:
        asyncio.run(follow())
        assert len({page for page in heard.pages if page[1] == "DISK"}) >= 16  # units of 16 tokens
    finally:
        engine.close()


def test_a_block_counts_when_all_its_runs_are_stored() -> None:
    changes: list[tuple[bool, bytes, int, bytes]] = []

    def take() -> list[tuple[bool, bytes, int, bytes]]:
        taken, changes[:] = list(changes), []
        return taken

    blocks = TierBlocks("host", take, {0: [b"f", b"g"], 1: [b"h"]})
    one, two = bytes(32), bytes([1]) * 32
    changes += [(True, one, 0, b"f"), (True, two, 0, b"f"), (True, two, 0, b"other"), (True, one, 1, b"h")]
    assert [(event.groups, event.hashes) for event in blocks.poll()] == [((1,), (one,))]
    changes += [(True, one, 0, b"g"), (True, two, 0, b"g"), (False, one, 0, b"f"), (False, one, 0, b"g")]
    stored, removed = blocks.poll()
    assert (stored.hashes, removed.hashes) == ((one, two), (one,))
    assert [(event.groups, event.hashes) for event in blocks.blocks()] == [((0,), (two,)), ((1,), (one,))]
    assert blocks.poll() == []

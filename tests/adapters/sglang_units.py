"""kvloom's storage backend below SGLang's own classes. test_sglang.py runs this file in the environment of SGLang."""

from __future__ import annotations

import inspect
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tools.sglang_import import define_operators

define_operators()

from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    count_pool_hits,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.storage.sim_storage import SimHiCacheStorage  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from kvloom.adapters.sglang import KvloomStorage  # noqa: E402
from kvloom.adapters.sglang.identity import model_identity  # noqa: E402
from kvloom.adapters.sglang.pool_pages import PoolPages  # noqa: E402
from kvloom.adapters.sglang.settings import Settings  # noqa: E402
from kvloom.adapters.sglang.version import VERSION  # noqa: E402
from kvloom.tiers import OpenTier, open_tier  # noqa: E402
from kvloom.tiers.testing import Faults, FaultyTier  # noqa: E402

PAGE, PAGES, LAYERS, HEADS, SIZE = 16, 8, 3, 2, 16
CAPACITY = PAGE * PAGES
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


# --- SGLang's pools, on the CPU


def mha_device(dtype: torch.dtype = torch.bfloat16) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=CAPACITY,
        page_size=PAGE,
        dtype=dtype,
        head_num=HEADS,
        head_dim=SIZE,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def mha(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16) -> MHATokenToKVPoolHost:
    pool = MHATokenToKVPoolHost(
        mha_device(dtype)._mha_buffer_info(),
        4.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=CAPACITY,
        start_layer=0,
        end_layer=LAYERS,
    )
    pool.kv_buffer.normal_()
    return pool


def mla(layout: str = "page_first") -> MLATokenToKVPoolHost:
    device = MLATokenToKVPool(
        size=CAPACITY,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    pool = MLATokenToKVPoolHost(
        device._mla_buffer_info(),
        4.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=CAPACITY,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )
    pool.kv_buffer.normal_()
    return pool


def mamba(extra: bool = False) -> MambaPoolHost:
    """States of a hybrid model. With `extra` the pool states no addresses, so its pages are flat."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, PAGES, 4, 8),
        conv=(torch.zeros(2, PAGES, 6, 3, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(torch.zeros(PAGES, 5),) if extra else (),
    )
    pool = MambaPoolHost(
        info, 4.0, 0, device_capacity=PAGES, pin_memory=False, device="cpu", layout="page_first"
    )
    for buffer in pool.get_hybrid_pool_buffer():
        buffer.normal_()
    return pool


def zero(pool: Any) -> None:
    for buffer in pool.get_hybrid_pool_buffer() if isinstance(pool, MambaPoolHost) else [pool.kv_buffer]:
        buffer.zero_()


def page_data(pool: Any, indices: torch.Tensor) -> list[torch.Tensor]:
    return [pool.get_data_page(i).clone() for i in indices[:: pool.page_size].tolist()]


def shuffled(pool: Any, pages: int, seed: int = 0) -> torch.Tensor:
    """Token slots of pages in any order, as after many allocations."""
    order = random.Random(seed).sample(range(pool.page_num), pages)
    return torch.cat([torch.arange(p * pool.page_size, (p + 1) * pool.page_size) for p in order])


# --- the storage


def config(*tiers: str, interface: int = 1, **changes: Any) -> HiCacheStorageConfig:
    extra: dict[str, Any] = {
        "backend_name": "kvloom",
        "module_path": "kvloom.adapters.sglang",
        "class_name": "KvloomStorage",
        "interface_v1": interface,
        "tiers": list(tiers) or ["host:4MiB"],
        **changes.pop("extra", {}),
    }
    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "model",
        **changes,
    }
    return HiCacheStorageConfig(**fields, extra_config=extra)


@contextmanager
def opened(
    given: HiCacheStorageConfig,
    pool: Any,
    pools: dict[PoolName, Any] | None = None,
    tier: OpenTier | None = None,
) -> Iterator[KvloomStorage]:
    """The storage as SGLang's controllers open it."""
    if tier is not None:
        storage: Any = KvloomStorage(given, {}, others=[tier])
    else:
        storage = StorageBackendFactory.create_backend("dynamic", given, pool)
    storage.register_mem_pool_host(pool)
    for name, other in (pools or {}).items():
        storage.register_mem_host_pool_v2(other, name)
    storage.on_host_pools_registered()
    try:
        yield storage
    finally:
        storage.close()


def hashes(pages: int, first: int = 0) -> list[str]:
    found = get_storage_hash_str(list(range(first, first + pages * PAGE)), None, page_size=PAGE)
    assert isinstance(found, list)
    return found


def disk(folder: Path) -> str:
    return f"disk:{folder / 'kv'}:64MiB"


def transfer(
    name: PoolName, keys: list[str], indices: Any = None, policy: Any = PoolHitPolicy.ALL_PAGES
) -> Any:
    return PoolTransfer(name=name, keys=keys, host_indices=indices, hit_policy=policy)


def damage(folder: Path) -> None:
    """Change bytes in every page of an open disk tier."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 14:
            with path.open("r+b") as file:
                data = bytearray(file.read())
                for at in range(4096, len(data), 64):
                    data[at] ^= 0x55
                file.seek(0)
                file.write(data)


def wait_for(is_true: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.005)


# --- the interface that this adapter is written for


def test_the_interface_of_sglang_is_the_tested_one() -> None:
    """If this test fails, SGLang changed its storage interface: adapt the adapter, then these values."""
    assert sorted(HiCacheStorage.__abstractmethods__) == ["batch_get", "batch_set", "exists", "get", "set"]
    for name in vars(HiCacheStorage):
        if name.startswith("_") or not callable(getattr(HiCacheStorage, name)):
            continue
        theirs = list(inspect.signature(getattr(HiCacheStorage, name)).parameters)
        ours = list(inspect.signature(getattr(KvloomStorage, name)).parameters)
        assert ours == theirs, f"{name} has other parameters in SGLang {VERSION.installed()}"
        assert name in vars(KvloomStorage), f"{name} is new in SGLang {VERSION.installed()}"
    assert [policy.value for policy in PoolHitPolicy] == ["all_pages", "trailing_pages", "block_groups"]
    needed = {"name", "host_indices", "keys", "hit_policy"}
    assert needed <= set(PoolTransfer.__dataclass_fields__)
    assert list(PoolTransferResult.__dataclass_fields__) == [
        "kv_hit_pages",
        "extra_pool_hit_pages",
        "restorable_prefix_pages",
    ]
    found = VERSION.installed()
    assert found == VERSION.tested, f"the interface of SGLang {found} is the tested one: raise VERSION.tested"


# --- pages of every pool


@pytest.mark.parametrize(
    "make",
    [
        *(lambda layout=layout: mha(layout) for layout in MHA_LAYOUTS),
        *(lambda layout=layout: mla(layout) for layout in MLA_LAYOUTS),
    ],
    ids=[*(f"mha {x}" for x in MHA_LAYOUTS), *(f"mla {x}" for x in MLA_LAYOUTS)],
)
@pytest.mark.parametrize("interface", [1, 0])
def test_another_process_loads_stored_pages(make: Any, interface: int, tmp_path: Path) -> None:
    given = config("host:4MiB", disk(tmp_path), interface=interface)
    pool, keys = make(), hashes(6)
    at = shuffled(pool, 6)
    want = page_data(pool, at)
    with opened(given, pool) as storage:
        assert storage.batch_exists(keys) == 0
        if interface:
            assert storage.batch_set_v1(keys, at) == [True] * 6
        else:
            assert storage.batch_set(keys, page_data(pool, at))
        assert storage.batch_exists(keys) == 6
    pool = make()
    zero(pool)
    to = shuffled(pool, 7, seed=1)
    with opened(given, pool) as storage:
        assert storage.batch_exists([*keys, "00"]) == 6
        if interface:
            assert storage.batch_get_v1([*keys, "00"], to) == [True] * 6 + [False]
        else:
            pages = storage.batch_get([*keys, "00"], [pool.get_dummy_flat_data_page() for _ in range(7)])
            assert pages[6] is None
            for index, page in zip(to[::PAGE].tolist(), pages[:6], strict=False):
                pool.set_from_flat_data_page(index, page)
        assert storage.faults == 0
    assert all(torch.equal(a, b) for a, b in zip(page_data(pool, to), want, strict=False))
    used = set(to[: 6 * PAGE].tolist())
    others = [p * PAGE for p in range(pool.page_num) if p * PAGE not in used]
    assert all(not pool.get_data_page(i).any() for i in others)  # no other page was changed


@pytest.mark.parametrize("extra", [False, True])
def test_states_of_hybrid_models(extra: bool, tmp_path: Path) -> None:
    given, keys = config("host:4MiB", disk(tmp_path)), hashes(5)
    pool, states = mha(), mamba(extra)
    assert PoolPages("mamba", states, "").is_flat == extra
    at, slots = shuffled(pool, 5), shuffled(states, 2)
    want = page_data(states, slots)
    with opened(given, pool, {PoolName.MAMBA: states}) as storage:
        assert all(storage.batch_set_v1(keys, at))
        found = storage.batch_set_v2([transfer(PoolName.MAMBA, [keys[1], keys[3]], slots)])
        assert count_pool_hits(found) == {PoolName.MAMBA: 2}
    states = mamba(extra)
    zero(states)
    with opened(given, pool, {PoolName.MAMBA: states}) as storage:
        trailing = transfer(PoolName.MAMBA, [keys[4]], policy=PoolHitPolicy.TRAILING_PAGES)
        result = storage.batch_exists_v2(keys, [trailing])
        assert result.kv_hit_pages == 4
        assert result.restorable_prefix_pages == [2, 4]
        assert result.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.MAMBA: 4}
        to = shuffled(states, 3, seed=1)
        answer = storage.batch_get_v2([transfer(PoolName.MAMBA, [keys[1], keys[3], keys[4]], to)])
        assert answer == {PoolName.MAMBA: [True, True, False]}
    assert all(torch.equal(a, b) for a, b in zip(page_data(states, to), want, strict=False))


def test_a_pool_without_bytes_has_every_page(tmp_path: Path) -> None:
    """DeepSeek V4's anchor only numbers pages. Its other pools decide about hits."""
    anchor, indexer, keys = LogicalHostPool(CAPACITY, PAGE), mla(), hashes(4)
    with opened(config(disk(tmp_path)), anchor, {PoolName.INDEXER: indexer}) as storage:
        assert storage.batch_set_v1(keys, torch.arange(4 * PAGE)) == [True] * 4
        assert storage.batch_get_v1(keys, torch.arange(4 * PAGE)) == [True] * 4
        assert storage.batch_exists_v2(keys, [transfer(PoolName.INDEXER, keys)]).kv_hit_pages == 0
        storage.batch_set_v2([transfer(PoolName.INDEXER, keys[:3], shuffled(indexer, 3))])
        assert storage.batch_exists_v2(keys, [transfer(PoolName.INDEXER, keys)]).kv_hit_pages == 3


@pytest.mark.parametrize("seed", range(20))
def test_restorable_prefixes_are_those_of_sglangs_backends(seed: int, tmp_path: Path) -> None:
    """Random pages in three pools: the same answer as SGLang's `file` backend, and the longest one of `sim`."""
    choose, keys = random.Random(seed), hashes(7)
    pool, draft, states = mha(), mla(), mamba()
    pools = {PoolName.DRAFT: draft, PoolName.MAMBA: states}
    with opened(config(), pool, pools) as ours:
        theirs = HiCacheFile(config(), file_path=str(tmp_path / "files"))
        sim = SimHiCacheStorage(config(extra={"sim_write_gbps": 0, "sim_op_latency_us": 0}))
        for other in (theirs, sim):
            other.register_mem_pool_host(pool)
            other.register_mem_host_pool_v2(pool, PoolName.KV)
            for name, one in pools.items():
                other.register_mem_host_pool_v2(one, name)
        for name, one in {PoolName.KV: pool, **pools}.items():
            for key in keys:
                if choose.random() < 0.8:
                    for storage in (ours, theirs, sim):
                        stored = storage.batch_set_v2([transfer(name, [key], shuffled(one, 1))])
                        assert stored == {name: [True]}
        asked = [
            transfer(PoolName.DRAFT, keys),
            transfer(PoolName.MAMBA, keys[: choose.choice([0, 1, 2])], None, PoolHitPolicy.TRAILING_PAGES),
        ]
        for some in (asked, asked[:1], asked[1:], []):
            want = theirs.batch_exists_v2(keys, some)
            found = ours.batch_exists_v2(keys, some)
            assert found.kv_hit_pages == want.kv_hit_pages
            assert found.restorable_prefix_pages == want.restorable_prefix_pages
            assert {
                k: v for k, v in found.extra_pool_hit_pages.items() if k in want.extra_pool_hit_pages
            } == (want.extra_pool_hit_pages)
            # `sim` takes the shortest pool, which may be a length that another pool cannot restore
            assert found.kv_hit_pages <= sim.batch_exists_v2(keys, some).kv_hit_pages


# --- keys


def test_keys_contain_the_model_and_the_layout(tmp_path: Path) -> None:
    keys = hashes(2)
    urls = ["host:4MiB", f"disk:{tmp_path}/kv:64MiB"]
    with opened(config(*urls), mha()) as storage:
        assert all(storage.batch_set_v1(keys, torch.arange(2 * PAGE)))
    with opened(config(*urls), mha()) as storage:
        assert storage.batch_exists(keys) == 2
    for given, pool in (
        (config(*urls, model_name="other"), mha()),
        (config(*urls, extra={"model": str(Path("src/kvloom/models/embedded/llama").resolve())}), mha()),
        (config(*urls), mha(dtype=torch.float16)),
        (config(*urls), mha("page_first_direct")),
        (config(*urls), mla()),
        (config(*urls, interface=0), mha()),
    ):
        with opened(given, pool) as storage:
            assert storage.batch_exists(keys) == 0
            assert storage.batch_get_v1(keys, torch.arange(2 * PAGE)) == [False, False]


@pytest.mark.parametrize(
    "changes",
    [
        {"tp_size": 2},
        {"tp_size": 2, "tp_rank": 1},
        {"pp_size": 2, "pp_rank": 1},
        {"attn_cp_size": 2, "attn_cp_rank": 1},
    ],
)
def test_other_ranks_have_other_keys(changes: dict[str, int], tmp_path: Path) -> None:
    keys, url = hashes(2), disk(tmp_path)
    with opened(config(), mha(), tier=OpenTier(open_tier(url))) as storage:
        assert all(storage.batch_set_v1(keys, torch.arange(2 * PAGE)))
    with opened(config(**changes), mha(), tier=OpenTier(open_tier(url))) as storage:
        assert storage.batch_exists(keys) == 0


def test_latent_pages_are_shared_by_tensor_parallel_ranks_but_states_are_not(tmp_path: Path) -> None:
    keys, url, shared = hashes(2), disk(tmp_path), "redis://127.0.0.1:1?capacity=1MiB"

    def rank(number: int) -> HiCacheStorageConfig:
        return config(shared, is_mla_model=True, tp_size=2, tp_rank=number)

    states = mamba()
    with opened(rank(0), mla(), {PoolName.MAMBA: states}, OpenTier(open_tier(url))) as storage:
        assert all(storage.batch_set_v1(keys, torch.arange(2 * PAGE)))
        storage.batch_set_v2([transfer(PoolName.MAMBA, keys, torch.arange(2))])
    with opened(rank(1), mla(), {PoolName.MAMBA: states}, OpenTier(open_tier(url))) as storage:
        assert storage.batch_exists(keys) == 2
        assert storage.batch_get_v2([transfer(PoolName.MAMBA, keys, torch.arange(2))]) == {
            PoolName.MAMBA: [False, False]
        }


def test_the_identity_covers_weights_and_config(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    (tmp_path / "config.json").write_text("{}")
    seen = {model_identity("name", str(tmp_path))}
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    seen.add(model_identity("name", str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(bytes(99) + b"\1")
    seen.add(model_identity("name", str(tmp_path)))
    seen.add(model_identity("other", str(tmp_path)))
    assert len(seen) == 4


def test_a_cleared_storage_has_no_pages(tmp_path: Path) -> None:
    keys, at = hashes(2), torch.arange(2 * PAGE)
    with opened(config(disk(tmp_path)), mha()) as storage:
        storage.batch_set_v1(keys, at)
        assert storage.clear()
        assert storage.batch_exists(keys) == 0
        assert all(storage.batch_set_v1(keys, at))
        assert storage.batch_exists(keys) == 2
    shared = config("redis://127.0.0.1:1?capacity=1MiB", is_mla_model=True, tp_size=2)
    with opened(shared, mla(), tier=OpenTier(open_tier(disk(tmp_path)))) as storage:
        assert all(storage.batch_set_v1(keys, at))
        storage.clear()
        assert storage.batch_exists(keys) == 0
        assert storage.batch_set_v1(keys, at) == [False, False]  # other ranks have other keys


# --- settings


@pytest.mark.parametrize(
    ("extra", "changes", "message"),
    [
        ({"tiers": []}, {}, "needs tiers"),
        ({"tires": []}, {}, "unknown setting 'tires'"),
        ({"load_seconds": -1}, {}, "load_seconds"),
        ({"model": 1}, {}, "folder or hub id"),
        ({"tiers": ["int8:disk:/kv:1GiB"]}, {}, "SGLang's pages are stored exactly"),
        ({"tiers": ["disk:/kv:1GiB"]}, {"tp_size": 2}, "write {rank} into the path"),
        ({"tiers": ["disk:/kv{rank}:1GiB"]}, {"tp_size": 2, "is_mla_model": True}, "use a shared tier"),
    ],
)
def test_wrong_settings_are_refused(extra: Any, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KvloomStorage(config(extra=extra, **changes))


def test_sglangs_own_fields_are_accepted() -> None:
    assert Settings.parse(config().extra_config or {}).tiers == ("host:4MiB",)


def test_a_tier_that_cannot_be_opened_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(ValueError, match="cannot be used"), opened(config(disk(tmp_path)), mha()):
        pass


# --- faults


@pytest.mark.parametrize("fault", ["failing", "hung", "slow", "corrupt", "full"])
def test_a_faulty_tier_is_a_miss_and_never_raises(fault: str, tmp_path: Path) -> None:
    keys, at, pool = hashes(6), torch.arange(6 * PAGE), mha()
    states = mamba()
    pools = {PoolName.MAMBA: states}
    with opened(config(), pool, pools, OpenTier(open_tier(disk(tmp_path)))) as storage:
        assert all(storage.batch_set_v1(keys, at))
        assert all(storage.batch_set_v2([transfer(PoolName.MAMBA, keys, torch.arange(6))])[PoolName.MAMBA])
    faults = Faults(**{"slow": {"slow": 3.0}, "corrupt": {}}.get(fault, {fault: True}))
    tier = OpenTier(FaultyTier(open_tier(disk(tmp_path)), faults))
    if fault == "corrupt":
        damage(tmp_path / "kv")
    pool = mha()
    before = pool.kv_buffer.clone()
    with opened(config(extra={"load_seconds": 0.4}), pool, pools, tier) as storage:
        storage.batch_exists(keys)
        if fault != "full":
            assert storage.batch_get_v1(keys, at) == [False] * 6
            found = storage.batch_get_v2([transfer(PoolName.MAMBA, keys, torch.arange(6))])
            assert found == {PoolName.MAMBA: [False] * 6}
            assert torch.equal(pool.kv_buffer, before)  # a miss changes no byte
            assert storage.pages is not None
            pages = storage.pages
            wait_for(lambda: sum(pages.tiers.manager.fault_log.counts.values()) > 0)
            outcomes = {outcome for _, _, outcome in pages.tiers.manager.fault_log.counts}
            assert fault != "corrupt" or "corrupt" in outcomes
        assert storage.batch_set_v1(hashes(4, 1000), torch.arange(4 * PAGE)) == [True] * 4  # in host memory
        assert storage.batch_exists(hashes(4, 1000)) == 4
        assert storage.faults == 0
        faults.release()


def test_unexpected_calls_are_misses() -> None:
    keys, at = hashes(3), torch.arange(3 * PAGE)
    pool = mha()
    with opened(config(), pool) as storage:
        assert storage.batch_get_v1(keys, at[:-1]) == [False] * 3
        assert storage.batch_set_v1(keys, at[:PAGE]) == [False] * 3
        assert storage.batch_set_v2([transfer(PoolName.SWA, keys, at)]) == {PoolName.SWA: [False] * 3}
        assert storage.batch_exists_v2(keys, [transfer(PoolName.SWA, keys)]).kv_hit_pages == 0
        assert storage.get("x") is None
        assert not storage.set("x", torch.zeros(3))
        assert not storage.exists("x")
        assert storage.batch_get_v1([], at[:0]) == []
        assert storage.batch_exists([]) == 0
        assert storage.faults == 5
        pool.get_page_buffer_meta = lambda _: 1 / 0
        assert storage.batch_set_v1(keys, at) == [False] * 3
        assert storage.faults == 6
        del pool.get_page_buffer_meta
        assert storage.batch_set_v1(keys, at) == [True] * 3  # the failed store left nothing behind
    early = KvloomStorage(config())
    assert early.batch_exists(keys) == 0
    assert early.batch_get_v1(keys, at) == [False] * 3
    assert storage.batch_get_v1(keys, at) == [False] * 3  # after close


def test_single_tensors() -> None:
    with opened(config(), mha()) as storage:
        page = mha().get_data_page(0)
        assert not storage.exists("a")
        assert storage.set("a", page)
        assert storage.exists("a")
        target = torch.zeros_like(page)
        assert storage.get("a", target) is target
        assert torch.equal(target, page)
        assert storage.get("b", target) is None


def test_blocks_in_groups_limit_no_prefix() -> None:
    keys = hashes(3)
    with opened(config(), mha(), {PoolName.DEEPSEEK_V4_C4: mla()}) as storage:
        storage.batch_set_v1(keys, torch.arange(3 * PAGE))
        groups = transfer(PoolName.DEEPSEEK_V4_C4, keys, None, PoolHitPolicy.BLOCK_GROUPS)
        assert storage.batch_exists_v2(keys, [groups]).kv_hit_pages == 3


def test_a_pool_that_comes_later_and_has_no_pages_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    closed = SimpleNamespace(page_size=1, layout="page_first")

    def refuse() -> None:
        raise NotImplementedError("no pages")

    closed.get_dummy_flat_data_page = refuse
    with opened(config(), mha()) as storage:
        storage.register_mem_host_pool_v2(closed, PoolName.DRAFT)
        assert "no pages" in caplog.text
        assert storage.batch_exists_v2(hashes(1), [transfer(PoolName.DRAFT, hashes(1))]).kv_hit_pages == 0
    with pytest.raises(ValueError, match="gives no access"), opened(config(), closed):
        pass


def test_metrics() -> None:
    keys, at = hashes(3), torch.arange(3 * PAGE)
    with opened(config(enable_storage_metrics=True), mha()) as storage:
        storage.batch_set_v1(keys, at)
        storage.batch_get_v1(keys, at)
        stats: Any = storage.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3])
        assert stats.backup_bandwidth[0] > 0
        assert not storage.get_stats().backup_pgs  # type: ignore[union-attr]
    with opened(config(), mha()) as storage:
        assert storage.get_stats() is None


# --- SGLang's cache controller and failure injector


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@contextmanager
def controller(
    pool: Any, device: Any, given: HiCacheStorageConfig, kind: type[HiCacheController] = HiCacheController
) -> Iterator[Any]:
    """SGLang's controller with its own prefetch, I/O and backup threads."""
    with ExitStack() as stack:
        stack.enter_context(
            get_parallel().override(
                attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1
            )
        )
        allocator: Any = SimpleNamespace(get_kvcache=lambda: device)
        found = kind(
            allocator,
            pool,
            PAGE,
            torch.distributed.group.WORLD,
            threading.Event(),
            io_backend="kernel",
            storage_backend="dynamic",
            model_name="model",
            storage_backend_extra_config=dict(given.extra_config or {}),
        )
        stack.callback(found.detach_storage_backend)
        yield found


def backup(one: HiCacheController, pool: Any, tokens: list[int]) -> tuple[int, list[torch.Tensor]]:
    """Store the pages of tokens. Return the number of stored tokens, and the pages."""
    indices = pool.alloc(len(tokens))
    pages = page_data(pool, indices)
    one.write_storage(indices, tokens, get_storage_hash_str(tokens, None, page_size=PAGE))
    done = one.ack_backup_queue.get(timeout=60)
    pool.free(indices)
    return done.completed_tokens, pages


def prefetch(one: HiCacheController, pool: Any, tokens: list[int]) -> tuple[int, int, list[torch.Tensor]]:
    """Load the pages of tokens. Return the tokens of the lookup's hit, the loaded tokens, and the loaded pages."""
    one.prefetch("request", tokens, None)
    operation = one.prefetch_hit_queue.get(timeout=60)
    hit = operation.storage_hit_count
    operation.host_indices = pool.alloc(hit)
    one.prefetch_buffer.put(operation)
    loaded = 0
    while not (ack := one.ack_prefetch_queue.get(timeout=60)).completed_req:
        loaded = ack.completed_tokens
    pages = page_data(pool, operation.host_indices[:loaded])
    pool.free(operation.host_indices)
    return hit, loaded, pages


@pytest.mark.parametrize("interface", [1, 0])
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_sglangs_controller_stores_and_prefetches(layout: str, interface: int, tmp_path: Path) -> None:
    given, tokens = config("host:4MiB", disk(tmp_path), interface=interface), list(range(20 * PAGE))
    pool = mha(layout)
    with controller(pool, mha_device(), given) as one:
        stored, want = backup(one, pool, tokens)
        assert stored == len(tokens)
    pool = mha(layout)
    zero(pool)
    with controller(pool, mha_device(), given) as one:
        hit, loaded, pages = prefetch(one, pool, [*tokens, *range(PAGE)])
    assert (hit, loaded) == (len(tokens), len(tokens))
    assert all(torch.equal(a, b) for a, b in zip(pages, want, strict=True))


def test_sglangs_hybrid_controller_stores_and_prefetches(tmp_path: Path) -> None:
    """Pages of a hybrid model: KV of every page, draft KV at the same slots, and states at two positions."""
    given, tokens = config("host:4MiB", disk(tmp_path)), list(range(6 * PAGE))
    keys = get_storage_hash_str(tokens, None, page_size=PAGE)

    def group() -> HostPoolGroup:
        entries = {PoolName.KV: mha(), PoolName.DRAFT: mla(), PoolName.MAMBA: mamba()}
        return HostPoolGroup(
            [
                PoolEntry(name, pool, None, lambda layer: layer, is_primary_index_anchor=name == PoolName.KV)
                for name, pool in entries.items()
            ]
        )

    def draft() -> PoolTransfer:
        return PoolTransfer(name=PoolName.DRAFT, indices_from_pool=PoolName.KV)

    pools = group()
    kv, states = pools.get_pool(PoolName.KV), pools.get_pool(PoolName.MAMBA)
    indices, slots = kv.alloc(len(tokens)), states.alloc(2)
    want = [page_data(pool, indices) for pool in (kv, pools.get_pool(PoolName.DRAFT))]
    want_state = page_data(states, slots)
    with controller(pools, mha_device(), given, HybridCacheController) as one:
        state = transfer(PoolName.MAMBA, [keys[1], keys[3]], slots, PoolHitPolicy.TRAILING_PAGES)
        one.write_storage(indices, tokens, keys, extra_pools=[draft(), state])
        done = one.ack_backup_queue.get(timeout=60)
        assert done.completed_tokens == len(tokens)
        assert done.pool_storage_result.extra_pool_hit_pages == {PoolName.DRAFT: 6, PoolName.MAMBA: 2}
    pools = group()
    for entry in pools.entries:
        zero(entry.host_pool)
    kv, states = pools.get_pool(PoolName.KV), pools.get_pool(PoolName.MAMBA)
    with controller(pools, mha_device(), given, HybridCacheController) as one:
        state = transfer(PoolName.MAMBA, [keys[-1]], states.alloc(1), PoolHitPolicy.TRAILING_PAGES)
        one.prefetch(CacheRequestHandle("request", 0), tokens, None, extra_pools=[draft(), state])
        operation = one.prefetch_hit_queue.get(timeout=60)
        assert operation.storage_hit_count == 4 * PAGE  # the last stored state
        operation.host_indices = kv.alloc(4 * PAGE)
        one._resolve_sidecar_kv_derived_pool_transfers(operation)
        one.prefetch_buffer.put(operation)
        acks = []
        while not (ack := one.ack_prefetch_queue.get(timeout=60)).completed_req:
            acks.append(ack)
        assert max(ack.completed_tokens or 0 for ack in acks) == 4 * PAGE
        assert [ack.pool_hits[PoolName.MAMBA] for ack in acks if ack.pool_hits] == [1]
        loaded = next(t for t in operation.pool_transfers if t.name == PoolName.MAMBA)
        at = operation.host_indices
    for pool, pages in zip((kv, pools.get_pool(PoolName.DRAFT)), want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(page_data(pool, at), pages[:4], strict=True))
    assert torch.equal(page_data(states, loaded.host_indices)[0], want_state[1])


def test_sglangs_failure_injector(tmp_path: Path) -> None:
    """With random failures and delays of SGLang's own injector, the controller loads a prefix, or nothing."""
    given, pool = config("host:4MiB", disk(tmp_path)), mha()
    with ExitStack() as stack:
        stack.enter_context(envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.4))
        stack.enter_context(envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.02))
        one = stack.enter_context(controller(pool, mha_device(), given))
        assert isinstance(one.storage_backend, HiCacheStorageFailureInjector)
        outcomes = set()
        for turn in range(80):
            tokens = [turn * 1000 + i for i in range(4 * PAGE)]
            stored, want = backup(one, pool, tokens)
            hit, loaded, pages = prefetch(one, pool, tokens)
            assert loaded <= hit <= stored
            assert all(torch.equal(a, b) for a, b in zip(pages, want, strict=False))
            outcomes.add((stored > 0, hit > 0, loaded > 0))
        assert {
            (False, False, False),
            (True, False, False),
            (True, True, False),
            (True, True, True),
        } <= outcomes


@pytest.mark.parametrize("fault", ["failing", "hung"])
def test_the_controller_survives_a_faulty_tier(fault: str, tmp_path: Path) -> None:
    given = config("host:4MiB", disk(tmp_path), extra={"load_seconds": 0.5})
    tokens, pool = list(range(10 * PAGE)), mha()
    with controller(pool, mha_device(), given) as one:
        assert backup(one, pool, tokens)[0] == len(tokens)
    with controller(pool, mha_device(), given) as one:
        storage: Any = one.storage_backend
        queue = storage.pages.tiers.manager.queues[0]
        faults = Faults(**{fault: True})
        queue.tier = FaultyTier(queue.tier, faults)
        hit, loaded, _ = prefetch(one, pool, tokens)
        assert (hit, loaded) == (len(tokens), 0)
        assert backup(one, pool, [i + 5000 for i in tokens])[0] == len(tokens)
        faults.release()
        assert one.prefetch_thread.is_alive()
        assert one.prefetch_io_aux_thread.is_alive()
        assert one.backup_thread.is_alive()


def test_several_threads_call_at_once(tmp_path: Path) -> None:
    pool, errors = mha(), []
    with opened(config("host:2MiB", disk(tmp_path)), pool) as storage:

        def work(number: int) -> None:
            try:
                at = torch.arange(number * 4 * PAGE, (number + 1) * 4 * PAGE)
                want = page_data(pool, at)
                for turn in range(15):
                    keys = hashes(4, 10_000 * number + 100 * turn)
                    assert all(storage.batch_set_v1(keys, at))
                    assert storage.batch_get_v1(keys, at) == [True] * 4
                    assert storage.batch_exists(keys) == 4
                    assert all(torch.equal(a, b) for a, b in zip(page_data(pool, at), want, strict=True))
            except BaseException as error:  # noqa: BLE001  reported below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not errors

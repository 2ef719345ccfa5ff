"""kvloom's L2 adapter below LMCache's own classes. test_lmcache.py runs this file in the environment of LMCache."""

from __future__ import annotations

import inspect
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig, get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _filename_to_object_key, _object_key_to_filename
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transfer_context import create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from lmcache.v1.platform import consume_fd

from kvloom.adapters.lmcache import KvloomL2Adapter, import_files
from kvloom.adapters.lmcache.object_keys import as_objects, parse_file_name
from kvloom.adapters.lmcache.settings import Settings
from kvloom.adapters.lmcache.version import VERSION
from kvloom.tiers import OpenTier, open_tier
from kvloom.tiers.testing import Faults, FaultyTier

SHAPE = torch.Size([2, 4, 16, 32])  # K and V, layers, tokens of a chunk, values
LAYOUT = MemoryLayoutDesc(shapes=[SHAPE], dtypes=[torch.bfloat16])
SIZE = SHAPE.numel() * 2
TOKENS, SECONDS = 16, 120.0
LAYOUTS = {0: LAYOUT, 1: MemoryLayoutDesc(shapes=[torch.Size([3, 100])], dtypes=[torch.float32])}


def keys(count: int, first: int = 0, **fields: Any) -> list[ObjectKey]:
    given: dict[str, Any] = {"model_name": "org/model", "kv_rank": 0x01000100, **fields}
    return [ObjectKey(chunk_hash=i.to_bytes(4, "big") * 8, **given) for i in range(first, first + count)]


def memory(data: torch.Tensor | None = None, size: int = SIZE) -> TensorMemoryObj:
    """One of LMCache's memory objects."""
    raw = torch.zeros(size, dtype=torch.uint8) if data is None else data
    meta = MemoryObjMetadata(
        shape=torch.Size([len(raw)]),
        dtype=torch.uint8,
        address=0,
        phy_size=len(raw),
        ref_count=1,
        pin_count=0,
        fmt=MemoryFormat.BINARY,
    )
    return TensorMemoryObj(raw, meta, None)


def random_objects(count: int, size: int = SIZE) -> list[TensorMemoryObj]:
    return [memory(torch.randint(0, 256, (size,), dtype=torch.uint8)) for _ in range(count)]


def disk(folder: Path) -> str:
    return f"disk:{folder / 'kv'}:64MiB"


def plugin(*tiers: str, **params: Any) -> dict[str, Any]:
    """The spec of the adapter in LMCache's configuration."""
    return {
        "type": "plugin",
        "module_path": "kvloom.adapters.lmcache",
        "class_name": "KvloomL2Adapter",
        "adapter_params": {"tiers": list(tiers) or ["host:4MiB"], **params},
    }


@contextmanager
def opened(spec: dict[str, Any]) -> Iterator[L2AdapterInterface]:
    """An adapter as LMCache's factory creates it."""
    config = get_l2_adapter_config_class(spec["type"]).from_dict(spec)
    adapter = create_l2_adapter_from_registry(config)
    try:
        yield adapter
    finally:
        adapter.close()


def wait(fd: int, query: Callable[[], Any]) -> Any:
    """Poll an event as LMCache's controllers do."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    until = time.monotonic() + 60
    while True:
        if found := query():
            return found
        assert time.monotonic() < until
        if poll.poll(1000):
            consume_fd(fd)


def store(adapter: L2AdapterInterface, names: list[ObjectKey], objects: list[Any]) -> Any:
    task = adapter.submit_store_task(names, objects)
    done = wait(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    assert list(done) == [task]
    return done[task]


def bits(found: Bitmap, count: int) -> list[bool]:
    return [i in found.get_indices_list() for i in range(count)]


def lookup(adapter: L2AdapterInterface, names: list[ObjectKey], layouts: Any = LAYOUTS) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(names, layouts)

    def query() -> Any:
        found = adapter.query_lookup_and_lock_result(task)
        return None if found is None else (found,)

    (found,) = wait(adapter.get_lookup_and_lock_event_fd(), query)
    assert adapter.query_lookup_and_lock_result(task) is None  # only once
    return bits(found, len(names))


def load(adapter: L2AdapterInterface, names: list[ObjectKey], objects: list[Any]) -> list[bool]:
    task = adapter.submit_load_task(names, objects)

    def query() -> Any:
        found = adapter.query_load_result(task)
        return None if found is None else (found,)

    (found,) = wait(adapter.get_load_event_fd(), query)
    assert adapter.query_load_result(task) is None
    return bits(found, len(names))


def equal(some: list[Any], others: list[Any]) -> bool:
    return all(bytes(a.byte_array) == bytes(b.byte_array) for a, b in zip(some, others, strict=True))


# --- the interface that this adapter is written for


def test_the_interface_of_lmcache_is_the_tested_one() -> None:
    """If this test fails, LMCache changed its L2 interface: adapt the adapter, then these values."""
    assert sorted(L2AdapterInterface.__abstractmethods__) == [
        "close",
        "get_load_event_fd",
        "get_lookup_and_lock_event_fd",
        "get_store_event_fd",
        "pop_completed_store_tasks",
        "query_load_result",
        "query_lookup_and_lock_result",
        "submit_load_task",
        "submit_lookup_and_lock_task",
        "submit_store_task",
        "submit_unlock",
    ]
    for name in (*L2AdapterInterface.__abstractmethods__, "delete", "report_status"):
        theirs = list(inspect.signature(getattr(L2AdapterInterface, name)).parameters)
        ours = list(inspect.signature(getattr(KvloomL2Adapter, name)).parameters)
        assert ours == theirs, f"{name} has other parameters in LMCache {VERSION.installed()}"
    assert list(ObjectKey.__dataclass_fields__) == [
        "chunk_hash",
        "model_name",
        "kv_rank",
        "object_group_id",
        "cache_salt",
    ]
    found = VERSION.installed()
    assert found == VERSION.tested, (
        f"the interface of LMCache {found} is the tested one: raise VERSION.tested"
    )


# --- store, lookup, load


def test_another_process_loads_stored_objects(tmp_path: Path) -> None:
    names, objects = keys(6), random_objects(6)
    with opened(plugin("host:4MiB", disk(tmp_path))) as adapter:
        fds = {
            adapter.get_store_event_fd(),
            adapter.get_load_event_fd(),
            adapter.get_lookup_and_lock_event_fd(),
        }
        assert len(fds) == 3
        assert lookup(adapter, names) == [False] * 6
        result = store(adapter, names, objects)
        assert result.is_successful()
        assert result.bytes_transferred() == 6 * SIZE
        assert store(adapter, names, objects).bytes_transferred() == 0  # stored before
        assert adapter.get_usage().total_bytes_used == 6 * SIZE
    with opened(plugin("host:4MiB", disk(tmp_path))) as adapter:
        some = [*names, *keys(1, 100)]
        assert lookup(adapter, some) == [True] * 6 + [False]
        into = [memory() for _ in some]
        assert load(adapter, some, into) == [True] * 6 + [False]
        assert equal(into[:6], objects)
        assert not any(bytes(into[6].byte_array))  # a miss changes no byte
        adapter.submit_unlock(some)
        status = adapter.report_status()
        assert status["is_healthy"]
        assert (status["loaded_objects"], status["missed_objects"]) == (6, 1)


def test_groups_of_different_sizes_are_in_one_task(tmp_path: Path) -> None:
    names = [*keys(3), *keys(3, object_group_id=1)]
    objects = [*random_objects(3), *random_objects(3, 1200)]
    with opened(plugin("host:4MiB", disk(tmp_path))) as adapter:
        assert store(adapter, names, objects).is_successful()
    with opened(plugin("host:4MiB", disk(tmp_path))) as adapter:
        assert lookup(adapter, names) == [True] * 6
        into = [memory(size=len(one.byte_array)) for one in objects]
        assert load(adapter, names, into) == [True] * 6
        assert equal(into, objects)
        assert load(adapter, names[:1], [memory(size=10)]) == [False]  # another size


def test_stored_sizes_are_found_without_a_layout() -> None:
    with opened(plugin()) as adapter:
        store(adapter, keys(2), random_objects(2, 777))
        assert lookup(adapter, keys(2), {}) == [True, True]
        assert lookup(adapter, keys(2, 5), {}) == [False, False]


def test_keys_contain_model_rank_group_salt_and_namespace(tmp_path: Path) -> None:
    with opened(plugin(disk(tmp_path))) as adapter:
        store(adapter, keys(1), random_objects(1))
    with opened(plugin(disk(tmp_path))) as adapter:
        assert lookup(adapter, keys(1)) == [True]
        layouts = dict.fromkeys((0, 1), LAYOUT)
        for change in (
            {"model_name": "other"},
            {"kv_rank": 0x02000200},
            {"object_group_id": 1},
            {"cache_salt": "user"},
        ):
            assert lookup(adapter, keys(1, **change), layouts) == [False]
    with opened(plugin(disk(tmp_path), namespace="new weights")) as adapter:
        assert lookup(adapter, keys(1)) == [False]


def test_deleted_objects_are_misses(tmp_path: Path) -> None:
    class Listener(L2AdapterListener):
        def __init__(self) -> None:
            self.stored: list[ObjectKey] = []
            self.used: list[ObjectKey] = []
            self.deleted: list[ObjectKey] = []

        def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
            self.stored += keys

        def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
            self.used += keys

        def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
            self.deleted += keys

    names, listener = keys(3), Listener()
    with opened(plugin("host:4MiB", disk(tmp_path))) as adapter:
        adapter.register_listener(listener)
        store(adapter, names, random_objects(3))
        queue = adapter.pages.tiers.manager.queues[0]  # type: ignore[attr-defined]
        until = time.monotonic() + 30
        while queue.pending_store_bytes and time.monotonic() < until:
            time.sleep(0.01)
        adapter.delete([*names[:2], *keys(1, 50)])
        assert lookup(adapter, names) == [False, False, True]
        assert load(adapter, names, [memory() for _ in names]) == [False, False, True]
        assert adapter.get_usage().total_bytes_used == SIZE
    assert (listener.stored, listener.deleted, listener.used) == (names, names[:2], names[2:])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"tiers": []}, "needs tiers"),
        ({"tires": []}, "unknown setting 'tires'"),
        ({"load_seconds": "x"}, "load_seconds"),
        ({"namespace": 1}, "namespace"),
        ({"tiers": ["int8:disk:/kv:1GiB"]}, "LMCache's pages are stored exactly"),
        ({"max_object_bytes": 1 << 30}, "no space for a page"),
    ],
)
def test_wrong_settings_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), opened(plugin("host:4MiB", **params)):
        pass


def test_the_largest_object_follows_host_memory() -> None:
    assert Settings.parse({"tiers": ["host:8MiB"]}).max_object_bytes == 1 << 20
    assert Settings.parse({"tiers": ["disk:/kv:1TiB"]}).max_object_bytes == 128 << 20


# --- faults


@pytest.mark.parametrize("fault", ["failing", "hung", "slow", "corrupt"])
def test_a_faulty_tier_is_a_miss(fault: str, tmp_path: Path) -> None:
    names = keys(5)
    with opened(plugin(disk(tmp_path))) as adapter:
        store(adapter, names, random_objects(5))
    faults = Faults(**{"slow": {"slow": 3.0}, "corrupt": {}}.get(fault, {fault: True}))
    tier = OpenTier(FaultyTier(open_tier(disk(tmp_path)), faults))
    if fault == "corrupt":
        damage(tmp_path / "kv")
    adapter = KvloomL2Adapter({"tiers": ["host:4MiB"], "load_seconds": 0.4}, others=[tier])
    try:
        into = [memory() for _ in names]
        lookup(adapter, names)
        assert load(adapter, names, into) == [False] * 5
        assert not any(any(bytes(one.byte_array)) for one in into)
        until = time.monotonic() + 30
        while not adapter.report_status()["faults"]:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert fault != "corrupt" or any("corrupt" in name for name in adapter.report_status()["faults"])
        assert store(adapter, keys(2, 50), random_objects(2)).is_successful()  # in host memory
        assert lookup(adapter, keys(2, 50)) == [True, True]
        faults.release()
    finally:
        adapter.close()


def damage(folder: Path) -> None:
    """Change bytes in every page of an open disk tier."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 14:
            with path.open("r+b") as file:
                data = bytearray(file.read())
                for at in range(4096, len(data), 256):
                    data[at] ^= 0x55
                file.seek(0)
                file.write(data)


def test_unexpected_objects_fail_their_task_only(caplog: pytest.LogCaptureFixture) -> None:
    with opened(plugin("host:4MiB")) as adapter:
        assert not store(adapter, keys(1), [None]).is_successful()
        assert not store(adapter, keys(2), random_objects(1)).is_successful()
        assert not store(adapter, keys(1), random_objects(1, 2 << 20)).is_successful()  # too large
        assert load(adapter, keys(2), [None, None]) == [False, False]
        assert store(adapter, keys(1), random_objects(1)).is_successful()
        assert lookup(adapter, keys(1)) == [True]
    task = adapter.submit_load_task(keys(1), [memory()])  # after close
    assert bits(adapter.query_load_result(task), 1) == [False]  # type: ignore[arg-type]
    adapter.close()


def test_lmcaches_fault_injector(tmp_path: Path) -> None:
    """LMCache's own injector drops loads of this adapter. The other objects are complete."""
    spec = {"type": "fault_inject", "inner": plugin(disk(tmp_path)), "rate": 0.4, "seed": 3}
    names, objects = keys(40), random_objects(40)
    with opened(spec) as adapter:
        assert store(adapter, names, objects).is_successful()
        assert lookup(adapter, names) == [True] * 40
        into = [memory() for _ in names]
        loaded = load(adapter, names, into)
        assert 0 < sum(loaded) < 40
        there = [i for i, ok in enumerate(loaded) if ok]
        assert equal([into[i] for i in there], [objects[i] for i in there])


def test_several_threads_submit_tasks(tmp_path: Path) -> None:
    adapter = KvloomL2Adapter({"tiers": ["host:2MiB", disk(tmp_path)]})
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                names, objects = keys(4, 1000 * number + 4 * turn), random_objects(4)
                adapter.submit_store_task(names, objects)
                until = time.monotonic() + 60
                while True:
                    into = [memory() for _ in names]
                    task = adapter.submit_load_task(names, into)
                    while (found := adapter.query_load_result(task)) is None:
                        time.sleep(0.001)
                    if len(found.get_indices_list()) == 4:
                        break
                    assert time.monotonic() < until
                assert equal(into, objects)
        except BaseException as error:  # noqa: BLE001  reported below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    adapter.close()
    assert not errors


# --- LMCache's storage manager


@contextmanager
def manager(*specs: dict[str, Any]) -> Iterator[StorageManager]:
    """LMCache's L1 memory with its store and prefetch controllers above the adapters."""
    configs = [get_l2_adapter_config_class(spec["type"]).from_dict(spec) for spec in specs]
    memory_config = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
    one = StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config),
            eviction_config=EvictionConfig("LRU"),
            l2_adapter_config=L2AdaptersConfig(configs),
        )
    )
    try:
        yield one
    finally:
        one.close()


def write(one: StorageManager, names: list[ObjectKey], seed: int = 0) -> list[bytes]:
    """Write objects to L1. Return their bytes."""
    generator = torch.Generator().manual_seed(seed)
    reserved = one.reserve_write(names, LAYOUT)
    found = []
    for name in names:
        data = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator).numpy()
        np.frombuffer(reserved[name].byte_array, np.uint8)[:] = data
        found.append(data.tobytes())
    one.finish_write(names)
    return found


def prefetch(one: StorageManager, names: list[ObjectKey]) -> tuple[int, list[bytes]]:
    """Load a prefix into L1. Return how many objects came from L2, and the bytes of the prefix."""
    rows = [GroupedObjectKeys(keys=names, object_group_id=0, layout_desc=LAYOUT)]
    handle = one.submit_prefetch_task(PrefetchTaskSpec(key_groups=rows, num_kv_readers=1))
    assert one.wait_prefetch_status(handle, 60)
    result = one.query_prefetch_status(handle)
    assert result is not None
    hits = [names[i] for i in result.hit_cells[0].get_indices_list()]
    if not hits:
        return 0, []
    with one.read_prefetched_results(hits) as objects:
        assert objects is not None
        found = [bytes(each.byte_array) for each in objects]
    one.finish_read_prefetched(hits)
    return result.l2_hit_count, found


def stored_objects(one: StorageManager) -> int:
    return sum(adapter.report_status()["stored_objects"] for _, adapter in one.l2_adapters())


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_lmcaches_storage_manager_stores_and_prefetches(tmp_path: Path) -> None:
    names, spec = keys(12), plugin("host:8MiB", disk(tmp_path))
    with manager(spec) as one:
        want = write(one, names)
        wait_until(lambda: stored_objects(one) == 12)
        one.clear(force=True)
        assert prefetch(one, names) == (12, want)
    with manager(spec) as one:  # a new server
        assert prefetch(one, [*names, *keys(2, 500)]) == (12, want)
        assert prefetch(one, keys(3, cache_salt="user")) == (0, [])


def test_the_storage_manager_survives_a_damaged_disk(tmp_path: Path) -> None:
    names, spec = keys(6), plugin("host:8MiB", disk(tmp_path))
    with manager(spec) as one:
        write(one, names)
        wait_until(lambda: stored_objects(one) == 6)
    with manager(spec) as one:
        damage(tmp_path / "kv")
        assert prefetch(one, names) == (0, [])
        want = write(one, names, seed=1)
        assert prefetch(one, names) == (0, want)  # from L1


# --- files of LMCache's fs adapter


@pytest.mark.parametrize(
    "name",
    [
        *keys(1),
        *keys(1, cache_salt="user-1"),
        *keys(1, object_group_id=17, kv_rank=0x04030403),
        *keys(1, model_name="a/b/c-d_e.f"),
    ],
)
def test_file_names_are_those_of_lmcache(name: ObjectKey) -> None:
    file = _object_key_to_filename(name)
    assert parse_file_name(file) == name == _filename_to_object_key(file)


@pytest.mark.parametrize(
    "name", ["x", "x.data", "a@1@2.data", "a@zz@0@00.data", "a@0x1@0@0.data", "a@1@2@00@s@t.data"]
)
def test_other_files_are_not_keys(name: str) -> None:
    assert parse_file_name(name) is None
    assert _filename_to_object_key(name) is None


def test_files_of_lmcache_are_imported(tmp_path: Path) -> None:
    folder = tmp_path / "fs"
    names = [*keys(5), *keys(2, cache_salt="user"), *keys(2, object_group_id=1)]
    objects = [*random_objects(7), *random_objects(2, 1200)]
    with opened({"type": "fs", "base_path": str(folder)}) as adapter:
        assert store(adapter, names, objects).is_successful()
    (folder / "notes.txt").write_text("x")
    (folder / _object_key_to_filename(keys(1, 900)[0])).write_bytes(b"")  # an object without bytes
    command = [sys.executable, "-m", "kvloom.adapters.lmcache", str(folder), "--tier", disk(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "objects": 9,
        "bytes": 7 * SIZE + 2 * 1200,
        "present": 0,
        "failed": 1,
        "other_files": 1,
    }
    again = import_files(folder, {"tiers": [disk(tmp_path)]})
    assert (again.objects, again.present) == (0, 9)
    with opened(plugin(disk(tmp_path))) as adapter:
        assert lookup(adapter, names) == [True] * 9
        into = [memory(size=len(one.byte_array)) for one in objects]
        assert load(adapter, names, into) == [True] * 9
        assert equal(into, objects)
    with pytest.raises(NotADirectoryError):
        import_files(tmp_path / "none", {"tiers": ["host:4MiB"]})


def test_keys_do_not_run_into_each_other() -> None:
    one = as_objects(keys(1, model_name="ab", cache_salt="c"), SIZE, "").keys
    assert one != as_objects(keys(1, model_name="a", cache_salt="bc"), SIZE, "").keys
    assert one != as_objects(keys(1, model_name="b", cache_salt="c"), SIZE, "a").keys


# --- LMCache's server


@contextmanager
def server(*tiers: str) -> Iterator[tuple[int, int]]:
    """LMCache's server with the adapter, in a process of its own. Yields its port, and that of its HTTP API."""
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(int(probe.getsockname()[1]))
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--l2-adapter", json.dumps(plugin(*tiers))]
    command += ["--host", "127.0.0.1", "--port", str(ports[0])]
    command += ["--http-host", "127.0.0.1", "--http-port", str(ports[1])]
    command += ["--chunk-size", str(TOKENS), "--l1-size-gb", "0.25", "--eviction-policy", "LRU"]
    command += ["--supported-transfer-mode", "engine_driven", "--disable-observability", "--no-l1-use-lazy"]
    command += ["--shm-name", f"kvloom-test-{os.getpid()}-{ports[0]}"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, env={**os.environ, "LMCACHE_TRACK_USAGE": "false"}
    )
    try:
        until = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", ports[0]), 1).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.1)
        yield ports[0], ports[1]
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def worker(port: int, cache: torch.Tensor) -> Iterator[tuple[Any, Any]]:
    """A client of the server, and its transfers of a KV cache, as in an engine's worker."""
    client: Any = RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
    caches = {"layer.0": cache}
    context: Any = create_transfer_context(caches, instance_id=1, req_client=client, mode="engine_driven")
    try:
        context.register(caches, "model", 1, 1, SECONDS)
        yield client, context
    finally:
        context.close()
        client.close()
        for left in Path("/dev/shm").glob(f"lmcache_kv_{os.getpid()}_*"):
            left.unlink(missing_ok=True)


def status(port: int) -> str:
    """The status of the server and its adapters, without spaces."""
    with urlopen(f"http://127.0.0.1:{port}/status", timeout=SECONDS) as answer:
        return json.dumps(json.loads(answer.read()), separators=(",", ":"))


def hit_chunks(client: Any, request: IPCCacheServerKey) -> int:
    """Look up a prefix. The server loads its chunks from the adapter."""
    client.lookup(replace(request, worker_id=None), 1).result(timeout=SECONDS)
    while (found := client.query_prefetch_status(request.request_id).result(timeout=SECONDS)) is None:
        time.sleep(0.001)
    return int(found)


def test_a_second_server_of_lmcache_loads_stored_chunks(tmp_path: Path) -> None:
    chunks, tiers = 8, ("host:8MiB", disk(tmp_path))
    cache = torch.zeros((2, 2 * chunks + 1, 8, TOKENS, 4), dtype=torch.bfloat16).share_memory_()
    stored, loaded = slice(1, chunks + 1), slice(chunks + 1, 2 * chunks + 1)
    cache[:, stored].view(torch.uint8).random_(0, 256)
    tokens = tuple(range(chunks * TOKENS))
    request = IPCCacheServerKey("model", 1, 0, tokens, 0, len(tokens), "first", num_kv_readers=1)
    with server(*tiers) as (port, http), worker(port, cache) as (client, context):
        assert hit_chunks(client, request) == 0
        client.end_session("first").result(timeout=SECONDS)
        blocks, event = [list(range(1, chunks + 1))], context.create_recorded_event()
        done = context.submit_store("first", request, {"layer.0": cache}, blocks, event, 1)
        assert done.result(timeout=SECONDS)
        until = time.monotonic() + SECONDS
        while hit_chunks(client, request) < chunks:  # a store replies before it has ended
            assert time.monotonic() < until
            client.end_session("first").result(timeout=SECONDS)
            time.sleep(0.01)
        client.end_session("first").result(timeout=SECONDS)
        wait_until(lambda: f'"stored_objects":{chunks}' in status(http))  # copied in the background
    request = replace(request, request_id="second")
    with server(*tiers) as (port, _), worker(port, cache) as (client, context):
        assert hit_chunks(client, request) == chunks
        blocks, event = [list(range(chunks + 1, 2 * chunks + 1))], context.create_recorded_event()
        done = context.submit_retrieve("second", request, {"layer.0": cache}, blocks, event, 1)
        assert done.result(timeout=SECONDS)
        client.end_session("second").result(timeout=SECONDS)
    assert torch.equal(cache[:, stored].view(torch.uint8), cache[:, loaded].view(torch.uint8))

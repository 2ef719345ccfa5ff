"""LMCache controlled by JSON lines: the process that `kvloom bench tiers` starts in the interpreter that has LMCache.

Each line names a backend, a page size and a number of bytes. The reply has the seconds to put and to get these bytes.
The process needs only LMCache and torch, not kvloom. LMCache's output goes to stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["main"]

TOKENS = 16
SERVER_SECONDS = 120.0
"""Longest wait for one reply of the multi-process server, in seconds."""


class _World:
    """The memory that the benchmark copies, and LMCache's CPU backend, which most other backends use. `put` and `get`
    of a backend store and read all pages, and return when the bytes have arrived.
    """

    def __init__(self, page: int, total: int) -> None:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        torch.set_num_threads(1)
        self.torch, self.page, self.count = torch, page, total // page
        width = page // (2 * TOKENS * 2)
        self.shape, self.dtype = torch.Size([2, 1, TOKENS, width]), torch.bfloat16
        self.format = MemoryFormat.KV_2LTD
        self.metadata = LMCacheMetadata(
            "bench", 1, 1, 0, 0, torch.bfloat16, (1, 2, TOKENS, 1, width), chunk_size=TOKENS
        )
        self.folder = tempfile.mkdtemp(dir=os.environ.get("KVLOOM_BENCH_DIR"))
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=True,
            max_local_cpu_size=2 * total / 2**30 + 0.25,
            local_disk=self.folder,
            max_local_disk_size=8 * total / 2**30 + 1,
            extra_config={"use_odirect": True},
        )
        self.cpu = LocalCPUBackend(self.config, self.metadata, "cpu")
        self.source = torch.randint(0, 256, (self.count, page), dtype=torch.uint8)
        self.target = torch.zeros_like(self.source)
        self.keys: list[Any] = []
        self.round = 0
        self._make_key = CacheEngineKey
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.next_round()

    def next_round(self) -> None:
        self.round += 1
        base = self.round << 32
        self.keys = [self._make_key("bench", 1, 0, base + i, self.dtype) for i in range(self.count)]

    def filled(self, number: int) -> Any:
        """Return a page in LMCache's memory with the bytes of page `number`. LMCache's connector fills pages in the
        same way.
        """
        page = self.cpu.allocate(self.shape, self.dtype, self.format)
        page.tensor.view(self.torch.uint8).reshape(-1).copy_(self.source[number])
        return page

    def taken(self, number: int, page: Any) -> None:
        self.target[number].copy_(page.tensor.view(self.torch.uint8).reshape(-1))
        page.ref_count_down()

    def check(self) -> None:
        if not self.torch.equal(self.source, self.target):
            raise RuntimeError("LMCache returned different bytes")
        self.target.zero_()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _cpu(world: _World) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    def put() -> None:
        for number, key in enumerate(world.keys):
            page = world.filled(number)
            world.cpu.submit_put_task(key, page)
            page.ref_count_down()

    def get() -> None:
        for number, key in enumerate(world.keys):
            world.taken(number, world.cpu.get_blocking(key))

    return put, get, world.cpu.clear


def _disk(world: _World) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

    disk = LocalDiskBackend(world.config, world.loop, world.cpu, "cpu", None, world.metadata)

    def put() -> None:
        for number, key in enumerate(world.keys):
            page = world.filled(number)
            disk.submit_put_task(key, page)
            page.ref_count_down()
        while any(not disk.contains(key) for key in world.keys):
            time.sleep(0.0005)

    def get() -> None:
        step = max(1, (32 << 20) // world.page)
        for at in range(0, world.count, step):
            pages = disk.batched_get_blocking(world.keys[at : at + step])
            for number, page in enumerate(pages, at):
                world.taken(number, page)

    def clear() -> None:
        for key in world.keys:
            disk.remove(key)
        world.cpu.clear()

    return put, get, clear


def _started(command: list[str], port: int) -> subprocess.Popen[bytes]:
    """Start a server of LMCache on `port` of loopback."""
    server = subprocess.Popen(command, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return server
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                raise
            time.sleep(0.1)


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()


def _remote(world: _World) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector

    port = _port()
    server = _started([sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"], port)
    connector = LMCServerConnector("127.0.0.1", port, world.loop, world.cpu)

    def run(task: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(task, world.loop).result(120)

    def put() -> None:
        for number, key in enumerate(world.keys):
            page = world.filled(number)
            run(connector.put(key, page))
            page.ref_count_down()
        if not run(connector.exists(world.keys[-1])):  # answered after all that was sent
            raise RuntimeError("lmcache_server lost a page")

    def get() -> None:
        for number, key in enumerate(world.keys):
            world.taken(number, run(connector.get(key)))

    world.close = lambda: _end(server)  # type: ignore[method-assign]
    return put, get, lambda: None


class _MultiProcess:
    """LMCache's multi-process server, which stores blocks of a KV cache. This class makes the same calls as LMCache's
    worker in an engine without a GPU. Each request stores or retrieves up to 32 MiB.

    `put` ends with a lookup of the blocks, because only a lookup shows that the store has ended. The time of the lookup
    therefore counts as store time. `mode` selects the process that copies: the server, which maps the cache, or the
    worker, which copies into the server's shared memory.
    """

    def __init__(self, world: _World, mode: str) -> None:
        from lmcache.v1.multiprocess.transfer_context import create_transfer_context
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self.world = world
        port, torch = _port(), world.torch
        self._server = _started(self._command(port, mode), port)
        self._client: Any = RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
        # Block 0 is unused; then the stored blocks, then the target blocks.
        self._cache = torch.zeros(
            (2, 2 * world.count + 1, 8, TOKENS, world.shape[-1] // 8), dtype=world.dtype
        ).share_memory_()
        self._stored = self._cache[:, 1 : world.count + 1].view(torch.uint8)
        self._loaded = self._cache[:, world.count + 1 :].view(torch.uint8)
        self._stored.random_(0, 256)
        self._caches = {"layer.0": self._cache}
        self._context: Any = create_transfer_context(
            self._caches, instance_id=1, req_client=self._client, mode=mode
        )
        self._context.register(self._caches, "bench", 1, 1, SERVER_SECONDS)

    def _command(self, port: int, mode: str) -> list[str]:
        gigabytes = 3 * self.world.count * self.world.page / 2**30 + 0.25
        command = [sys.executable, "-m", "lmcache.cli.main", "server"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += [
            "--chunk-size",
            str(TOKENS),
            "--l1-size-gb",
            f"{gigabytes:.2f}",
            "--eviction-policy",
            "LRU",
        ]
        command += ["--supported-transfer-mode", mode, "--disable-observability", "--no-l1-use-lazy"]
        command += ["--http-host", "127.0.0.1", "--http-port", str(_port())]
        return [*command, "--shm-name", f"kvloom-bench-{os.getpid()}-{port}"]

    def _requests(self) -> list[tuple[range, Any]]:
        """Return the requests of this round. Each is a range of pages, and the key of these pages."""
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        world = self.world
        step = max(1, (32 << 20) // world.page)
        made = []
        for at in range(0, world.count, step):
            pages = range(at, min(at + step, world.count))
            first = (world.round * world.count + at) * TOKENS
            tokens = tuple(range(first, first + len(pages) * TOKENS))
            who = f"{world.round}-{at}"
            made.append(
                (pages, IPCCacheServerKey("bench", 1, 0, tokens, 0, len(tokens), who, num_kv_readers=1))
            )
        return made

    def put(self) -> None:
        for pages, key in self._requests():
            blocks = [[1 + number for number in pages]]
            event = self._context.create_recorded_event()
            done = self._context.submit_store(key.request_id, key, self._caches, blocks, event, 1)
            if not done.result(timeout=SERVER_SECONDS):
                raise RuntimeError("LMCache's multi-process server did not store the pages")

        for pages, key in self._requests():
            self._wait_for(len(pages), key)

    def _wait_for(self, pages: int, key: Any) -> None:
        """Wait until a lookup finds all `pages` pages of a request. The wait is needed because the server confirms a
        store before the store has ended. The lookup also takes the read locks that `get` needs.
        """
        client, seconds = self._client, SERVER_SECONDS
        deadline = time.monotonic() + seconds
        while True:
            client.lookup(replace(key, worker_id=None), 1).result(timeout=seconds)
            while (found := client.query_prefetch_status(key.request_id).result(timeout=seconds)) is None:
                time.sleep(0.0002)
            if found >= pages:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"LMCache's multi-process server has {found} of {pages} pages")
            client.end_session(key.request_id).result(timeout=seconds)
            time.sleep(0.0005)

    def get(self) -> None:
        for pages, key in self._requests():
            blocks = [[1 + self.world.count + number for number in pages]]
            event = self._context.create_recorded_event()
            done = self._context.submit_retrieve(key.request_id, key, self._caches, blocks, event, 1)
            if not done.result(timeout=SERVER_SECONDS):
                raise RuntimeError("LMCache's multi-process server lost a page")

    def check(self) -> None:
        if not self.world.torch.equal(self._stored, self._loaded):
            raise RuntimeError("LMCache returned different bytes")
        self._loaded.zero_()

    def clear(self) -> None:
        for _, key in self._requests():
            self._client.end_session(key.request_id).result(timeout=SERVER_SECONDS)

    def close(self) -> None:
        self._context.close()
        self._client.close()
        _end(self._server)
        # LMCache's worker leaves this to the end of the process.
        for left in Path("/dev/shm").glob(f"lmcache_kv_{os.getpid()}_*"):
            left.unlink(missing_ok=True)


def _processes(world: _World, mode: str) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    server = _MultiProcess(world, mode)
    world.close, world.check = server.close, server.check  # type: ignore[method-assign]
    return server.put, server.get, server.clear


Verbs = tuple[Callable[[], None], Callable[[], None], Callable[[], None]]
BACKENDS: dict[str, Callable[[_World], Verbs]] = {
    "cpu": _cpu,
    "disk": _disk,
    "server": _remote,
    "multi-process": partial(_processes, mode="lmcache_driven"),
    "multi-process, shm": partial(_processes, mode="engine_driven"),
}


def main() -> None:
    """Reply to every line of standard input on the original standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    key: tuple[str, int, int] | None = None
    world: _World | None = None  # one at a time: idle servers still use a part of a core
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["backend"] == "version":
                from importlib.metadata import version

                reply: dict[str, Any] = {"version": version("lmcache")}
            else:
                wanted = (asked["backend"], asked["page"], asked["total"])
                if world is None or wanted != key:
                    if world is not None:
                        world.close()
                    key, world = wanted, _World(asked["page"], asked["total"])
                    put, get, clear = BACKENDS[asked["backend"]](world)
                world.next_round()
                began = time.perf_counter()
                put()
                between = time.perf_counter()
                get()
                reply = {"write": between - began, "read": time.perf_counter() - between}
                world.check()
                clear()
        except Exception as error:  # noqa: BLE001  returned as a reply
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(reply), file=answers, flush=True)
    if world is not None:
        world.close()
    os._exit(0)


if __name__ == "__main__":
    main()

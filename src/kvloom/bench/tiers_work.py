"""The measurements of `kvloom bench tiers`: a tier and its medium with the same bytes, alternating.

A Work has two sides, the tier and its medium alone. Each side has the functions `write` and `read`, which return when
the bytes have arrived. The medium alone is memcpy, files with O_DIRECT, or the store's own client.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from kvloom.tiers import DiskConfig, DiskTier, HostConfig, HostTier, Ranges, Tier, TierError
from kvloom.tiers.peer import open_peer
from kvloom.tiers.remote import (
    MooncakeClient,
    MooncakeConfig,
    NixlFiles,
    RedisAddress,
    RemoteConfig,
    S3Bucket,
    open_mooncake,
    open_nixl,
    open_redis,
    open_s3,
)

from .tiers_media import FILE_ROUNDS, WAIT_SECONDS, Memory, Side, address, memcpy, raw, tcp

__all__ = ["WORKS", "Work", "folder_in"]

_SLAB_BYTES = 8 << 20
_DISK = 24  # rounds that fit the disk tier, so that eviction is not measured
_S3_THREADS = 8
_STORAGE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 16 << 20, "tcp", "", sys.argv[2])
print(code, flush=True)
sys.stdin.read()
store.close()
"""


@dataclass(frozen=True, slots=True)
class Work:
    tier: str
    medium_name: str
    ours: Side
    medium: Side
    lmcache: tuple[str, ...] = ()  # LMCache's backends for the same medium


def _of_tier(tier: Tier, memory: Memory) -> Side:
    def done(transfer: Any) -> None:
        if not transfer.wait(WAIT_SECONDS) or transfer.failed:
            raise RuntimeError(f"{tier.name}: {transfer}")

    return Side(
        lambda: done(tier.write(memory.objects, Ranges(memory.source, memory.starts))),
        lambda: done(tier.read(memory.objects, Ranges(memory.target, memory.starts))),
    )


@contextlib.contextmanager
def host(memory: Memory, folder: Path) -> Iterator[list[Work]]:
    tier = HostTier(HostConfig(memory.total, min(_SLAB_BYTES, memory.total)))
    # the arena allocates memory at its first use: do that before timing, as in a running tier
    _of_tier(tier, memory).write()

    yield [Work("host", "memcpy", _of_tier(tier, memory), memcpy(memory), ("cpu",))]
    tier.close()


@contextlib.contextmanager
def disk(memory: Memory, folder: Path) -> Iterator[list[Work]]:
    works, tiers = [], []
    kinds: tuple[Literal["power", "process"], ...] = ("power", "process")
    for durable in kinds:
        config = DiskConfig(
            folder / durable, _DISK * memory.total, segment_bytes=FILE_ROUNDS * memory.total, durable=durable
        )
        tiers.append(DiskTier(config))
        alone = raw(memory, folder / f"raw-{durable}", durable == "power")
        name = "raw O_DIRECT + sync" if durable == "power" else "raw O_DIRECT"
        lmcache = () if durable == "power" else ("disk",)
        works.append(Work(f"disk ({durable})", name, _of_tier(tiers[-1], memory), alone, lmcache))
    yield works
    for tier in tiers:
        tier.close()


@contextlib.contextmanager
def nixl(memory: Memory, folder: Path) -> Iterator[list[Work]]:
    config = DiskConfig(
        folder / "nixl", _DISK * memory.total, segment_bytes=FILE_ROUNDS * memory.total, durable="process"
    )
    tier = open_nixl(config)
    alone = raw(memory, folder / "raw", False, NixlFiles(-1))
    yield [Work("nixl POSIX", "NIXL alone", _of_tier(tier, memory), alone)]
    tier.close()


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _server(command: list[str], port: int, log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 0.5).close()
                break
            except OSError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise TierError(f"{command[0]} does not start: see {log}") from error
                time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(10)


@contextlib.contextmanager
def redis(memory: Memory, folder: Path) -> Iterator[list[Work]]:
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise TierError("no redis-server: apt-get install redis-server")
    try:
        from redis import Redis
    except ImportError:
        raise TierError("its own client is missing: pip install 'redis[hiredis]'") from None
    port = _port()
    quiet = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with _server([binary, "--port", str(port), *quiet], port, folder / "redis.log"):
        tier = open_redis(RedisAddress(port=port), RemoteConfig(3 * memory.total, timeout=30))
        client = Redis(port=port)
        keys = [f"bench {number}" for number in range(memory.count)]
        step = max(1, min(16, (8 << 20) // memory.page))
        batches = [range(at, min(at + step, memory.count)) for at in range(0, memory.count, step)]

        def write() -> None:
            for batch in batches:
                pipeline = client.pipeline(transaction=False)
                for number in batch:
                    at = number * memory.page
                    pipeline.set(keys[number], memory.source[at : at + memory.page].tobytes())
                pipeline.execute()

        def read() -> None:
            for batch in batches:
                values = client.mget([keys[number] for number in batch])
                for number, value in zip(batch, values, strict=True):
                    at = number * memory.page
                    memory.target[at : at + memory.page] = np.frombuffer(value, np.uint8)

        yield [Work("redis", "redis-py, pipelines", _of_tier(tier, memory), Side(write, read))]
        tier.close()


@contextlib.contextmanager
def _mooncake_storage(size: int, master: str) -> Iterator[None]:
    """Start another process that owns the memory of Mooncake, as in a cluster."""
    environment = {**os.environ, "MC_TCP_BIND_ADDRESS": "127.0.0.1", "GLOG_minloglevel": "2"}
    with subprocess.Popen(
        [sys.executable, "-c", _STORAGE, str(size), master],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "0":
            raise TierError("Mooncake's storage does not start")
        try:
            yield
        finally:
            process.communicate(timeout=30)


@contextlib.contextmanager
def mooncake(memory: Memory, folder: Path) -> Iterator[list[Work]]:
    binary = Path(sys.executable).parent / "mooncake_master"
    if not binary.exists():
        raise TierError("no mooncake_master: pip install mooncake-transfer-engine-non-cuda")
    port = _port()
    command = [str(binary), f"--rpc_port={port}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    with (
        _server([*command, f"--metrics_port={_port()}"], port, folder / "mooncake.log"),
        _mooncake_storage(6 * memory.total, f"127.0.0.1:{port}"),
    ):
        config = MooncakeConfig(f"127.0.0.1:{port}")
        shared = MooncakeClient(config, timeout=30)
        tier = open_mooncake(config, RemoteConfig(2 * memory.total, timeout=30), shared)
        client: Any = shared.get()
        for array in (memory.source, memory.target):
            shared.register_memory(client, array)  # registered once, for both sides
        keys = [f"bench-{number}" for number in range(memory.count)]
        step = max(1, (16 << 20) // memory.page)  # its fastest batch size
        batches = [range(at, min(at + step, memory.count)) for at in range(0, memory.count, step)]

        def each(verb: Any, array: npt.NDArray[np.uint8]) -> None:
            for batch in batches:
                pointers = [address(array) + number * memory.page for number in batch]
                codes = verb([keys[number] for number in batch], pointers, [memory.page] * len(batch))
                if any(code < 0 for code in codes):
                    raise RuntimeError(f"Mooncake returned {min(codes)}")

        def write() -> None:
            client.batch_remove(keys, True)  # included in its time, like the tier's eviction of old pages
            each(client.batch_put_from, memory.source)

        def read() -> None:
            each(client.batch_get_into, memory.target)

        yield [Work("mooncake", "its client, batches", _of_tier(tier, memory), Side(write, read))]
        tier.close()


@contextlib.contextmanager
def s3(memory: Memory, folder: Path) -> Iterator[list[Work]]:
    try:
        boto3, _ = import_module("boto3"), import_module("moto.server")
    except ImportError as error:
        raise TierError(f"no S3 store to start ({error}): pip install boto3 'moto[server]'") from None
    port = _port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    keys = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret"}
    with (
        patch.dict(os.environ, keys),
        _server(command, port, folder / "s3.log"),
        ThreadPoolExecutor(_S3_THREADS) as pool,
    ):
        client: Any = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
        client.create_bucket(Bucket="bench")
        tier = open_s3(S3Bucket("bench", "ours/", url), RemoteConfig(2 * memory.total, timeout=30))

        def put(number: int) -> None:
            at = number * memory.page
            body = memory.source[at : at + memory.page].tobytes()
            client.put_object(Bucket="bench", Key=f"theirs/{number}", Body=body)

        def get(number: int) -> None:
            at = number * memory.page
            body = client.get_object(Bucket="bench", Key=f"theirs/{number}")["Body"].read()
            memory.target[at : at + memory.page] = np.frombuffer(body, np.uint8)

        def write() -> None:
            list(pool.map(put, range(memory.count)))

        def read() -> None:
            list(pool.map(get, range(memory.count)))

        name = f"boto3, {_S3_THREADS} threads"
        yield [Work("s3", name, _of_tier(tier, memory), Side(write, read))]
        tier.close()


@contextlib.contextmanager
def peer(memory: Memory, folder: Path) -> Iterator[list[Work]]:
    slab = str(min(_SLAB_BYTES, memory.total))
    share = ["share", str(2 * memory.total), "--slab", slab, "--listen", "127.0.0.1:0", "--json"]
    command = [sys.executable, "-m", "kvloom.cli", *share]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(json.loads(process.stdout.readline())["address"].rpartition(":")[2])
        shared = open_peer(("127.0.0.1", port), config=RemoteConfig(1, timeout=30))
        plain = open_peer(("127.0.0.1", port), by="connection", config=RemoteConfig(1, timeout=30))
        _of_tier(shared, memory).write()  # once through its memory
        memory.fresh()
        _of_tier(shared, memory).write()
        alone, end = tcp(memory)
        near = ("server", "multi-process", "multi-process, shm")
        yield [
            Work("peer, same host", "memcpy", _of_tier(shared, memory), memcpy(memory), near),
            Work("peer, by TCP", "TCP alone", _of_tier(plain, memory), alone, ("server",)),
        ]
        end()
        shared.close()
        plain.close()
        process.terminate()


WORKS: dict[str, Callable[[Memory, Path], contextlib.AbstractContextManager[list[Work]]]] = {
    "host": host,
    "disk": disk,
    "nixl": nixl,
    "redis": redis,
    "mooncake": mooncake,
    "s3": s3,
    "peer": peer,
}


def folder_in(place: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Return a context with a temporary folder in `place`. The folder is deleted at the end of the context."""
    return tempfile.TemporaryDirectory(prefix="kvloom-bench-", dir=place, ignore_cleanup_errors=True)

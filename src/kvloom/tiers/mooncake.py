"""Mooncake Store as a tier: `mooncake://master:50051?capacity=64GiB&segment=16GiB`.

One client for a tier, as its library wants it; every thread has a registered buffer, through which values pass. The store
neither counts for us nor tells what it evicted, so `capacity` bounds what this process put there. An empty or negative answer
is a miss, a length is never believed, and nothing is asked of a client whose set-up failed: that would end the process.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from .bounded import Bounded
from .files import aligned, aligned_bytes
from .options import Options
from .remote import RemoteConfig, RemoteTier, StoreError, Usage
from .tier import TierError
from .transfer import Outcome
from .values import Counted, Place, Store, Want, store_tier

__all__ = ["MooncakeConfig", "MooncakeStore", "open_mooncake", "opener"]

_NO_ROOM, _TOO_LONG = -200, -600
_SETUP_SECONDS = 20.0
_LOST: list[memoryview] = []  # buffers that must outlive their connections
_FAILED: list[Any] = []  # clients that were never set up: their end can crash the process


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """`segment` is the memory this process gives to the store, 0 for none; `local` is this host's address, as other clients
    reach it; `protocol` tcp or rdma."""

    master: str
    segment: int = 0
    local: str = "127.0.0.1"
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""

    def __str__(self) -> str:
        return f"mooncake://{self.master}"


class _Client:
    """The library's client, made once. It finds a restarted master by itself."""

    def __init__(self, config: MooncakeConfig, timeout: float) -> None:
        self._config, self._timeout = config, timeout
        self._lock = threading.Lock()
        self._ready: Any = None

    def get(self) -> Any:
        """A StoreError while the master cannot be reached."""
        with self._lock:
            if self._ready is None:
                self._ready = self._make()
            return self._ready

    def _make(self) -> Any:
        host, _, port = self._config.master.rpartition(":")
        try:
            # Asked first: without a master the set-up hangs.
            socket.create_connection((host, int(port)), self._timeout).close()
        except OSError as error:
            raise StoreError(f"the master of {self._config} cannot be reached: {error}") from error
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", self._config.local)
        client = _library().MooncakeDistributedStore()
        config = self._config
        buffers = 16 << 20

        def set_up() -> int:
            return int(
                client.setup(
                    config.local,
                    config.metadata,
                    config.segment,
                    buffers,
                    config.protocol,
                    config.devices,
                    config.master,
                )
            )

        bounded = Bounded(_SETUP_SECONDS, str(config))
        try:
            code = bounded.call(set_up)
        except BaseException:
            _FAILED.append(client)
            raise
        finally:
            bounded.close()
        if code:
            _FAILED.append(client)
            raise StoreError(f"{config} could not be set up: code {code}")
        return client

    def close(self) -> None:
        """Gives back the segment, and with it what lies there."""
        with self._lock:
            client, self._ready = self._ready, None
        if client is not None:
            bounded = Bounded(_SETUP_SECONDS, str(self._config))
            bounded.call(client.close)
            bounded.close()


class MooncakeStore(Store):
    """One thread's way to the store: calls that are bounded in time, and a buffer that is registered."""

    def __init__(self, client: _Client, counted: Counted, timeout: float, what: str) -> None:
        self._client, self._counted = client.get(), counted
        self._bounded = Bounded(timeout, what)
        self._room = aligned_bytes(0)
        self._address = 0

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        names = [key.hex() for key in keys]
        found = self._call(lambda: self._client.batch_is_exist(names))
        self._checked(found, len(keys))
        if any(code < 0 for code in found):
            raise StoreError(f"the master does not answer: code {min(found)}")
        return [code == 1 for code in found]

    def get(self, wants: Sequence[Want], place: Place) -> list[int]:
        """A key that is in a batch twice is asked for once: the client would fill one of its places only."""
        places = {want: number for number, want in enumerate(dict.fromkeys(wants))}
        distinct = list(places)
        self._counted.touch([want.key for want in distinct])
        sizes = [want.stop - want.start if want.stop else want.most for want in distinct]
        begins = [0, *accumulate(aligned(size) for size in sizes)]
        self._stage(begins[-1])
        got = self._fetch(distinct, begins, sizes)
        lengths = []
        for number, want in enumerate(wants):
            at, length = begins[places[want]], got[places[want]]
            lengths.append(length if length > 0 else -1)
            for piece in (place(number, length) or ()) if length > 0 else ():
                piece[:] = self._room[at : at + len(piece)]
                at += len(piece)
        return lengths

    def put(self, items: Sequence[tuple[bytes, Sequence[Any]]]) -> list[Outcome]:
        sizes = {key: sum(map(len, pieces)) for key, pieces in items}
        keys = list(sizes)
        self._evict(self._counted.reserve(sizes))
        self._stage(sum(map(aligned, sizes.values())))
        at, begins, values = 0, [], dict(items)
        for key in keys:
            begins.append(at)
            done = at
            for piece in values[key]:
                self._room[done : done + len(piece)] = memoryview(piece)
                done += len(piece)
            at += aligned(sizes[key])
        names, pointers = [key.hex() for key in keys], [self._address + begin for begin in begins]
        lengths = [sizes[key] for key in keys]
        codes = self._call(lambda: self._client.batch_put_from(names, pointers, lengths))
        self._checked(codes, len(keys))
        self._counted.forget([key for key, code in zip(keys, codes, strict=True) if code])
        outcome = {
            key: Outcome.OK if code == 0 else Outcome.FULL if code == _NO_ROOM else Outcome.FAILED
            for key, code in zip(keys, codes, strict=True)
        }
        return [outcome[key] for key, _ in items]

    def remove(self, keys: Sequence[bytes]) -> int:
        names = [key.hex() for key in dict.fromkeys(keys)]
        codes = self._call(lambda: self._client.batch_remove(names, True))
        self._checked(codes, len(names))
        self._counted.forget(keys)
        return sum(code == 0 for code in codes)

    def usage(self) -> Usage:
        return self._counted.usage()

    def close(self) -> None:
        if self._address:
            try:
                self._call(lambda: self._client.unregister_buffer(self._address))
            except TimeoutError:
                _LOST.append(self._room)  # a call that hangs may still write there
        self._address = 0
        self._bounded.close()

    # --- inside

    def _call(self, function: Any) -> Any:
        return self._bounded.call(function)

    @staticmethod
    def _checked(answers: Any, count: int) -> None:
        if len(answers) != count:
            raise StoreError(f"{len(answers)} answers for {count} keys")

    def _evict(self, gone: list[bytes]) -> None:
        if gone:
            names = [key.hex() for key in gone]
            self._call(lambda: self._client.batch_remove(names, True))

    def _stage(self, size: int) -> None:
        """A registered buffer of that size. One that was given up to a hung call is never used again: its connection is."""
        if size <= len(self._room) and self._address:
            return
        room = aligned_bytes(max(size, 1 << 20))
        address = int(np.frombuffer(room, np.uint8).__array_interface__["data"][0])
        old = self._address
        if self._call(lambda: self._client.register_buffer(address, len(room))):
            raise StoreError(f"a buffer of {len(room)} bytes could not be registered")
        if old:
            self._call(lambda: self._client.unregister_buffer(old))
        self._room, self._address = room, address

    def _fetch(self, wants: Sequence[Want], begins: list[int], sizes: list[int]) -> list[int]:
        """The length of each want in its place of the buffer; what is not there is not positive."""
        lengths = [-1] * len(wants)
        whole = [number for number, want in enumerate(wants) if not want.stop]
        parts = [number for number, want in enumerate(wants) if want.stop]
        if whole:
            names = [wants[number].key.hex() for number in whole]
            pointers = [self._address + begins[number] for number in whole]
            rooms = [sizes[number] for number in whole]
            got = self._call(lambda: self._client.batch_get_into(names, pointers, rooms))
            self._checked(got, len(whole))
            for number, room, length in zip(whole, rooms, got, strict=True):
                # Longer than any value of ours: damaged, and told as such.
                lengths[number] = room + 1 if length == _TOO_LONG else min(length, room + 1)
        for number in parts:
            want, size = wants[number], sizes[number]
            name = want.key.hex()
            length = self._range(name, begins[number], want.start, size)
            if length == _TOO_LONG:
                size = min(size, self._size(name) - want.start)
                length = self._range(name, begins[number], want.start, size) if size > 0 else -1
            lengths[number] = length if length == size else -1
        return lengths

    def _size(self, name: str) -> int:
        return int(self._call(lambda: self._client.get_size(name)))

    def _range(self, name: str, to: int, start: int, size: int) -> int:
        answer = self._call(
            lambda: self._client.get_into_ranges([self._address], [[name]], [[[to]]], [[[start]]], [[[size]]])
        )
        return int(answer[0][0][0])


def _library() -> Any:
    for variable, level in (("GLOG_minloglevel", "2"), ("MC_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(variable, level)  # it tells every step otherwise
    try:
        return import_module("mooncake.store")
    except ImportError as error:
        raise TierError(
            f"Mooncake cannot be loaded ({error}): pip install mooncake-transfer-engine (without CUDA: "
            "mooncake-transfer-engine-non-cuda), and from the distribution libibverbs1 libcurl4 libnuma1"
        ) from error


def open_mooncake(mooncake: MooncakeConfig, config: RemoteConfig) -> RemoteTier:
    """A TierError when the package is missing, or the master cannot be reached."""
    _library()
    client, counted = _Client(mooncake, config.timeout), Counted(config.capacity)
    return store_tier(
        str(mooncake),
        config,
        lambda: MooncakeStore(client, counted, config.timeout, str(mooncake)),
        client.close,
    )


def opener(text: str) -> Callable[[], RemoteTier]:
    """`mooncake://master:port?capacity=64GiB&segment=16GiB&local=10.0.0.7&protocol=rdma&devices=mlx5_0`."""
    url = urlsplit(text)
    options = Options(text, url.query)
    try:
        port = url.port or 50051
    except ValueError as error:
        raise ValueError(f"{options.told}: {error}") from None
    if url.hostname is None:
        raise ValueError(f"{options.told}: where is its master? Write mooncake://host:port?capacity=64GiB")
    mooncake = MooncakeConfig(
        master=f"{url.hostname}:{port}",
        segment=options.size("segment", 0),
        local=options.text("local", "127.0.0.1"),
        metadata=options.text("metadata", "P2PHANDSHAKE"),
        protocol=options.text("protocol", "tcp"),
        devices=options.text("devices", ""),
    )
    return partial(open_mooncake, mooncake, options.remote())

"""The client of Mooncake Store, one per tier. This module starts and closes the client, and registers the memory of
callers.

If a client could not be started, it is never called, because a call would crash the process.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.tiers.aligned_memory import address_of
from kvloom.tiers.tier import TierError

from .bounded_calls import BoundedCalls
from .remote_tier import StoreError

__all__ = ["ABANDONED_MEMORY", "MooncakeClient", "MooncakeConfig", "load_library"]

ABANDONED_MEMORY: list[Any] = []  # memory that a hung call may still access
_ABANDONED_CLIENTS: list[
    Any
] = []  # clients that did not start or have a hung call; ending them would crash the process
_SETUP_SECONDS, _CLOSE_SECONDS = 20.0, 5.0
_MIN_REGISTERED_BYTES = 1 << 20
_MAX_REGISTERED = 8  # number of registered regions; other memory is copied through a buffer


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """Settings of the client.

    - `master` is the address of Mooncake's master.
    - `segment` is the number of bytes of memory that this process contributes to the store, or 0.
    - `local` is the address of this host for other clients.
    - `protocol` is tcp or rdma.
    - `metadata` and `devices` (of RDMA) are passed to Mooncake unchanged.
    - `replicas` is the number of copies of each value, in the segments of different processes.
    """

    master: str
    segment: int = 0
    local: str = "127.0.0.1"
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"{self}: replicas {self.replicas} must be 1 or more")

    def __str__(self) -> str:
        return f"mooncake://{self.master}"


class MooncakeClient:
    """The client of Mooncake's library. It is created once, and reconnects by itself when the master restarts."""

    def __init__(self, config: MooncakeConfig, timeout: float) -> None:
        self._config, self._timeout = config, timeout
        self._lock, self._register_lock = threading.Lock(), threading.Lock()
        self._ready: Any = None
        self._calls, self._ended = 0, False
        self._idle = threading.Condition()  # notified when a call ends
        self._turns = {"get": threading.Lock(), "put": threading.Lock()}
        # Registered (address, bytes) -> the memory, which this reference keeps alive.
        self._registered: dict[tuple[int, int], Any] = {}

    def should_register(self, memory: npt.NDArray[np.uint8]) -> bool:
        """Return whether `memory` should be registered. The memory must be large enough and not registered yet, and
        the limit of registered regions must not be reached."""
        region = (address_of(memory), len(memory))
        return (
            region[1] >= _MIN_REGISTERED_BYTES
            and len(self._registered) < _MAX_REGISTERED
            and not any(_overlap(region, other) for other in self._registered)
        )

    def register_memory(self, client: Any, memory: npt.NDArray[np.uint8]) -> None:
        """Register memory until the tier is closed. This may take long, and the library may refuse the memory."""
        with self._register_lock:
            if self.should_register(memory) and client.register_buffer(address_of(memory), len(memory)) == 0:
                self._registered = {**self._registered, (address_of(memory), len(memory)): memory}

    @contextmanager
    def one_at_a_time(self, verb: str) -> Iterator[None]:
        """A context for the transfer of one batch. `verb` is "get" or "put". At any time, at most one get and one put
        run. Meanwhile, other threads verify the batches that they have read. This is faster than several gets or puts
        at once. Raises TimeoutError if the previous batch does not end in time."""
        if not self._turns[verb].acquire(timeout=self._timeout):
            raise TimeoutError(f"{self._config}: another call did not end within {self._timeout} s")
        try:
            yield
        finally:
            self._turns[verb].release()

    def registered_address(self, piece: memoryview) -> int:
        """Return the address of a piece, or 0 if its memory is not registered."""
        at = address_of(np.frombuffer(piece, np.uint8))
        is_registered = any(low <= at and at + len(piece) <= low + size for low, size in self._registered)
        return at if is_registered else 0

    def run(self, call: Callable[[], Any]) -> Any:
        """Run `call()` if the client is open. A call on a closed client would crash the process."""
        with self._idle:
            if self._ended:
                raise StoreError(f"{self._config} is closed")
            self._calls += 1
        try:
            return call()
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def get(self) -> Any:
        """Return the library's client. Raises StoreError while the master cannot be reached."""
        with self._lock:
            if self._ready is None:
                self._ready = self._make()
            return self._ready

    def _make(self) -> Any:
        host, _, port = self._config.master.rpartition(":")
        try:
            # Checked first, because without a master the set-up hangs.
            socket.create_connection((host, int(port)), self._timeout).close()
        except OSError as error:
            raise StoreError(f"the master of {self._config} cannot be reached: {error}") from error
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", self._config.local)
        client = load_library().MooncakeDistributedStore()
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

        bounded = BoundedCalls(_SETUP_SECONDS, str(config))
        try:
            code = bounded.call(set_up)
        except BaseException:
            _ABANDONED_CLIENTS.append(client)
            raise
        finally:
            bounded.close()
        if code:
            _ABANDONED_CLIENTS.append(client)
            raise StoreError(f"{config} could not be set up: code {code}")
        return client

    def close(self) -> None:
        """Close the client, and release the segment with the values in it. If a call hangs, raises TimeoutError and
        releases nothing."""
        with self._idle:
            self._ended = True
            idle = self._idle.wait_for(lambda: not self._calls, max(self._timeout, _CLOSE_SECONDS))
        with self._lock:
            client, self._ready = self._ready, None
            registered, self._registered = self._registered, {}
        if not idle:
            _ABANDONED_CLIENTS.append(client)
            ABANDONED_MEMORY.extend(registered.values())
            raise TimeoutError(
                f"{self._config}: a call hangs, so the client stays open until the process ends"
            )

        def end() -> None:
            for address, _ in registered:
                client.unregister_buffer(address)
            client.close()

        if client is not None:
            bounded = BoundedCalls(_SETUP_SECONDS, str(self._config))
            try:
                bounded.call(end)
            except TimeoutError:
                ABANDONED_MEMORY.extend(registered.values())  # a hung call may still access it
                raise
            bounded.close()


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


def load_library() -> Any:
    for variable, level in (("GLOG_minloglevel", "2"), ("MC_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(variable, level)  # otherwise the library logs every step
    try:
        return import_module("mooncake.store")
    except ImportError as error:
        raise TierError(
            f"Mooncake cannot be loaded ({error}): pip install mooncake-transfer-engine (without CUDA: "
            "mooncake-transfer-engine-non-cuda), and from the distribution libibverbs1 libcurl4 libnuma1"
        ) from error

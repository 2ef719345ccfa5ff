"""NIXL as the transport of a disk tier: `nixl:///nvme/kv?capacity=1TiB&backend=POSIX`.

The tier has the same segments, index, checksums and crash safety as the disk tier. NIXL moves the pages with its
plug-in POSIX, or with GDS or GDS_MT if these load. Short transfers, and reads beyond the end of a file, use plain
system calls.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any, Literal, get_args
from urllib.parse import unquote, urlsplit

import numpy as np

from kvloom.tiers.aligned_memory import address_of
from kvloom.tiers.disk import DiskConfig, DiskTier, Files, disk_config
from kvloom.tiers.encoding import run_checksums
from kvloom.tiers.options import Options
from kvloom.tiers.tier import TierError

__all__ = ["Backend", "NixlFiles", "make_agent", "open_nixl", "parse_url", "wait_each"]

Backend = Literal["POSIX", "GDS", "GDS_MT"]
_MIN_BYTES = 64 << 10  # for smaller sizes a plain call is faster
_numbers = count()


def make_agent(backend: str, parameters: dict[str, str] | None = None) -> Any:
    """Return a NIXL agent with one backend, for one thread at a time. Raises TierError if NIXL or the plug-in is
    missing.

    The agent has no progress thread, because such a thread would keep a core busy. Transfers progress while the caller
    polls them.
    """
    os.environ.setdefault(
        "UCX_MODULES", "^ib"
    )  # a plug-in that is loaded but unused crashes the process at exit
    logging.getLogger("nixl").setLevel(logging.ERROR)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        api = import_module("nixl._api")
    except ImportError as error:
        raise TierError(
            f"NIXL cannot be loaded ({error}): pip install --no-deps nixl nixl-cu12 (a plain install also installs CUDA)"
        ) from error
    try:
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        agent = api.nixl_agent(f"kvloom-{os.getpid()}-{next(_numbers)}", config)
        agent.create_backend(backend, parameters or {})
    except Exception as error:
        raise TierError(f"the NIXL plug-in {backend} cannot be loaded: {error!r}") from error
    return agent


class NixlFiles(Files):
    """The file calls of a disk tier, with NIXL for long transfers. Every thread has its own agent."""

    def __init__(self, directory: int, backend: Backend = "POSIX") -> None:
        super().__init__(directory)
        self._backend = backend
        self._local = threading.local()
        self.moved = 0  # bytes transferred by NIXL
        self._agent()  # raises now if a package is missing

    def read(self, fd: int, into: Sequence[Any], offset: int) -> int:
        size = sum(map(len, into))
        if size < _MIN_BYTES or offset + size > os.fstat(fd).st_size:
            return super().read(fd, into, offset)
        self._move("READ", fd, into, offset)
        return size

    def read_checked(self, fd: int, into: memoryview, offset: int, run_bytes: int) -> tuple[int, bytes]:
        """Read all bytes with one NIXL transfer, then computes the checksums. Smaller transfers would allow earlier
        checksums, but would take more time than this saves."""
        return self.read(fd, [into], offset), run_checksums(into, run_bytes)

    def write(self, fd: int, pieces: Sequence[Any], offset: int) -> None:
        if sum(map(len, pieces)) < _MIN_BYTES:
            super().write(fd, pieces, offset)
        else:
            self._move("WRITE", fd, pieces, offset)

    def _agent(self) -> Any:
        if not hasattr(self._local, "agent"):
            self._local.agent = make_agent(self._backend)
        return self._local.agent

    def _move(self, verb: str, fd: int, pieces: Sequence[Any], offset: int) -> None:
        """Transfer bytes between the file `fd`, from `offset` on, and the buffers `pieces`. `verb` is READ or WRITE.
        Raises OSError if a transfer fails."""
        agent = self._agent()
        memory, positions, registered = [], [], []
        at = offset
        for piece in pieces:
            address = address_of(np.frombuffer(piece, np.uint8))
            memory.append((address, len(piece), 0))
            positions.append((at, len(piece), fd))
            at += len(piece)
        try:
            registered.append(agent.register_memory([(*region, "") for region in memory], "DRAM"))
            registered.append(agent.register_memory([(offset, at - offset, fd, "")], "FILE"))
            handle = agent.initialize_xfer(
                verb,
                agent.get_xfer_descs(memory, "DRAM"),
                agent.get_xfer_descs(positions, "FILE"),
                agent.name,
            )
            try:
                _finish(agent, handle)
            finally:
                agent.release_xfer_handle(handle)
        except OSError:
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"NIXL: {error!r}") from error
        finally:
            for each in registered:
                agent.deregister_memory(each)
        self.moved += at - offset


def _finish(agent: Any, handle: Any) -> None:
    """Wait until a transfer has ended. Raises OSError if the transfer fails."""
    if not all(wait_each(agent, [handle])):
        raise OSError(errno.EIO, "NIXL: the transfer failed")


def wait_each(agent: Any, handles: Sequence[Any]) -> list[bool]:
    """Wait until every transfer has ended. Return, for each transfer, whether it succeeded.

    If the caller reuses the memory afterwards, each transfer should have only one part. When one part of a
    transfer fails, a backend may report the failure while it still moves the other parts.
    """

    def state(verb: Callable[[Any], str], handle: Any) -> str:
        try:
            return verb(handle)
        except Exception:  # noqa: BLE001  the transfer has ended
            return "ERR"

    states = [state(agent.transfer, handle) for handle in handles]
    going, pause = list(range(len(handles))), 20e-6
    while going := [number for number in going if states[number] not in ("DONE", "ERR")]:
        time.sleep(pause)
        pause = min(2 * pause, 100e-6)
        for number in going:
            states[number] = state(agent.check_xfer_state, handles[number])
    return [state == "DONE" for state in states]


def open_nixl(config: DiskConfig, backend: Backend = "POSIX") -> DiskTier:
    """Open a disk tier that transfers pages by NIXL. Raises TierError if NIXL is missing."""
    _check(backend)
    make_agent(backend)
    return DiskTier(config, lambda directory: NixlFiles(directory, backend))


def parse_url(url: str) -> Callable[[], DiskTier]:
    """Parse `nixl:///path?capacity=1TiB&backend=POSIX&durable=process&compression=lz4&readers=4`. Return the
    function that opens the tier.
    """
    parts = urlsplit(url)
    options = Options(url, parts.query)
    path = unquote(parts.path)
    if not path.startswith("/") or parts.netloc:
        raise ValueError(f"{options.url}: write nixl:///directory?capacity=1TiB")
    backend: Any = options.text("backend", "POSIX")
    config = disk_config(options, path, options.size("capacity"))
    config = replace(
        config,
        readers=options.integer("readers", config.readers),
        pending_bytes=options.size("pending", config.pending_bytes),
    )
    options.reject_unknown()
    _check(backend)
    return partial(open_nixl, config, backend)


def _check(backend: str) -> None:
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is none of {', '.join(get_args(Backend))}")

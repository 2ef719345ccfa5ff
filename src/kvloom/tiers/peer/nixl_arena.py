"""Access to a peer's arena by NIXL. NIXL uses RDMA between hosts if UCX supports it, otherwise shared memory or TCP.

The server registers its arena with NIXL and publishes the address. The client copies pages between the arena and its
own registered buffer. The client accesses pages only during a lease: between `ACQUIRE` and `RELEASE`, or between
`RESERVE` and `COMMIT`. `peer_tier.py` manages leases.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.tiers.aligned_memory import address_of, aligned_bytes
from kvloom.tiers.remote import make_agent

__all__ = ["NixlArena", "NixlClient"]

_BUFFER_BYTES = 8 << 20
_BUSY_SECONDS, _IDLE_SECONDS = 50e-6, 0.02
_ABANDONED: list[memoryview] = []  # buffers to which an abandoned transfer may still write


class NixlArena:
    """The server's side of NIXL access. Keeps the arena (the memory of the host tier) registered until `close`.

    Without RDMA, transfers progress only while the server polls NIXL. A thread polls often during leases, and
    rarely otherwise.
    """

    def __init__(self, arena: npt.NDArray[np.uint8]) -> None:
        agent, address = make_agent("UCX"), address_of(arena)
        registered = agent.register_memory([(address, len(arena), 0, "")], "DRAM")
        metadata = base64.b64encode(agent.get_agent_metadata()).decode()
        self.about = {"nixl": metadata, "base": address}
        self._arena = arena
        self._leases, self._ended = 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._progress, args=(agent, registered), name="kvloom-nixl", daemon=True
        )
        self._thread.start()

    def change_leases(self, change: int) -> None:
        """Add `change` (1 or -1) to the number of current leases."""
        with self._changed:
            self._leases += change
            self._changed.notify()

    def close(self) -> None:
        """End NIXL access. Transfers in flight fail."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def _progress(self, agent: Any, registered: Any) -> None:
        while not self._ended:
            agent.get_new_notifs()  # there are no notifications, but the call makes the agent progress
            if self._leases:
                time.sleep(_BUSY_SECONDS)
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._leases > 0, _IDLE_SECONDS)
        agent.deregister_memory(registered)


class NixlClient:
    """The client's side of NIXL access, with one instance per connection. After any exception the connection is
    unusable."""

    def __init__(self, about: dict[str, Any], timeout: float) -> None:
        self._agent, self._base, self._timeout = make_agent("UCX"), int(about["base"]), timeout
        self._remote = self._agent.add_remote_agent(base64.b64decode(about["nixl"]))
        self._buffer = aligned_bytes(0)
        self._registered: Any = None

    def prepare_buffer(self, page_bytes: int) -> int:
        """Register a buffer for pages of this size. Return the number of pages that fit, at least one."""
        if len(self._buffer) < max(page_bytes, _BUFFER_BYTES):
            self._deregister()
            self._buffer = aligned_bytes(max(page_bytes, _BUFFER_BYTES))
            memory = [(address_of(np.frombuffer(self._buffer, np.uint8)), len(self._buffer), 0, "")]
            self._registered = self._agent.register_memory(memory, "DRAM")
        return len(self._buffer) // page_bytes

    def buffer_page(self, number: int, page_bytes: int) -> memoryview:
        """Return page number `number` of the buffer."""
        return self._buffer[number * page_bytes : (number + 1) * page_bytes]

    def transfer(self, verb: str, offsets: Sequence[int], page_bytes: int, start: int, stop: int) -> None:
        """Transfer bytes [start, stop) of arena pages. `offsets` are the positions of the pages in the arena. READ
        copies from the arena to the buffer, and WRITE from the buffer to the arena."""
        base, size = address_of(np.frombuffer(self._buffer, np.uint8)), stop - start
        ours = [(base + number * page_bytes + start, size, 0) for number in range(len(offsets))]
        theirs = [(self._base + offset + start, size, 0) for offset in offsets]
        agent = self._agent
        handle = agent.initialize_xfer(
            verb, agent.get_xfer_descs(ours, "DRAM"), agent.get_xfer_descs(theirs, "DRAM"), self._remote
        )
        deadline, pause = time.monotonic() + self._timeout, 20e-6
        state = agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            if time.monotonic() > deadline:
                _ABANDONED.append(self._buffer)
                raise TimeoutError(f"NIXL: the transfer did not end within {self._timeout} s")
            time.sleep(pause)
            pause = min(2 * pause, 200e-6)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state == "ERR":
            raise ConnectionError("NIXL: the transfer failed")

    def close(self) -> None:
        self._deregister()
        self._agent.remove_remote_agent(self._remote)

    def _deregister(self) -> None:
        registered, self._registered = self._registered, None
        if registered is not None:
            self._agent.deregister_memory(registered)

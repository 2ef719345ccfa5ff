"""A process that serves its host tier until it is ended: `python -m tests.tiers.peer_child MIB [SECRET]`."""

from __future__ import annotations

import sys
import threading

from kvloom.tiers import HostConfig, HostTier
from kvloom.tiers.host import SharedMemory
from kvloom.tiers.peer import PeerConfig, PeerServer
from kvloom.tiers.testing.conformance import put


def main() -> None:
    size = int(sys.argv[1]) << 20
    memory = SharedMemory(size)
    tier = HostTier(HostConfig(size, slab_bytes=1 << 20), buffer=memory.buffer)
    put(tier, range(8))  # what its own engine has put there, without checksums
    server = PeerServer(tier, PeerConfig(secret=sys.argv[2].encode() if len(sys.argv) > 2 else b""), memory)
    print(server.address[1], flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

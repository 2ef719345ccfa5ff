"""A process that serves a host tier to `kvloom bench tiers`: `python -m kvloom.bench.tiers_peer BYTES`. Ends with its input."""

from __future__ import annotations

import sys

from kvloom.tiers import HostConfig, HostTier
from kvloom.tiers.peer_server import PeerConfig, PeerServer
from kvloom.tiers.shared import SharedMemory

__all__ = ["main"]


def main() -> None:
    """Prints its port, and serves until standard input ends."""
    memory = SharedMemory(int(sys.argv[1]))
    tier = HostTier(HostConfig(memory.size), buffer=memory.buffer)
    server = PeerServer(tier, PeerConfig(), memory)
    print(server.address[1], flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()

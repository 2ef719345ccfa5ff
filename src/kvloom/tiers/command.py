"""`kvloom share`: host memory for the servers of a machine or a fleet, which outlives each of them.

They reach it with `--tier peer://HOST:PORT`; on this machine without a byte on a socket. Decides nothing else.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from pathlib import Path

from kvloom.core.sizes import parse_size

from .host import HostConfig, HostTier
from .peer_nixl import NixlArena
from .peer_server import PeerConfig, PeerServer
from .shared import SharedMemory

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("size", metavar="SIZE", help="memory to share, like 64GiB; it comes with use")
    add(
        "--listen",
        default="127.0.0.1:7373",
        metavar="HOST:PORT",
        help="where (default: 127.0.0.1:7373); port 0 is any free one; beyond loopback a --secret is a must",
    )
    add("--secret", type=Path, metavar="FILE", help="a file of 16 bytes or more that both sides have")
    add("--slab", default="8MiB", metavar="SIZE", help="the largest page it takes (default: 8MiB)")
    add("--nixl", action="store_true", help="let NIXL reach it, too: for `peer://HOST:PORT?by=nixl`")
    add("--json", action="store_true", help="say where it listens as JSON")


def run(args: argparse.Namespace) -> int:
    """Shares until it is interrupted or terminated."""
    host, colon, port = args.listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--listen {args.listen!r}: write HOST:PORT, like 127.0.0.1:7373")
    secret = args.secret.read_bytes().strip() if args.secret is not None else b""
    slab = parse_size(args.slab)
    size = parse_size(args.size) // slab * slab
    config = PeerConfig(host.strip("[]"), int(port), secret)
    if not size:
        raise ValueError(f"{args.size} is less than one slab of {slab} bytes: share more, or give --slab")
    memory = SharedMemory(size)
    tier = HostTier(HostConfig(size, slab), buffer=memory.buffer)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    server = PeerServer(tier, config, memory, NixlArena(tier.arena) if args.nixl else None)
    where = "peer://{}:{}".format(*server.address)
    told = json.dumps({"address": where, "bytes": size}) if args.json else f"{size:,} bytes at {where}"
    print(told, flush=True)
    ended.wait()
    server.close()
    return 0

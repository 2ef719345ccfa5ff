"""`kvloom share`: host memory for the servers of a machine or a fleet, which outlives each of them.

They reach it with `--tier peer://HOST:PORT`; on this machine without a byte on a socket. Decides nothing else.
"""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path

from kvloom.core.sizes import format_bytes, parse_size

from .host import HostConfig, HostTier
from .peer_nixl import NixlArena
from .peer_server import PeerConfig, PeerServer
from .secret import read_secret
from .shared import SharedMemory

__all__ = ["arguments", "run"]

ENDS = {signal.SIGINT, signal.SIGTERM}


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("size", metavar="SIZE", help="memory to share, like 64GiB; it comes with use")
    add(
        "--listen",
        default="127.0.0.1:7373",
        metavar="HOST:PORT",
        help="where (default: 127.0.0.1:7373); port 0 is any free one; beyond loopback a --secret is a must",
    )
    add(
        "--secret",
        type=Path,
        metavar="FILE",
        help="a file of 16 bytes or more that both sides have (default: this user's own, created when missing)",
    )
    add("--socket", type=Path, metavar="PATH", help="listen at a Unix socket, too: for `peer:///PATH`")
    add(
        "--allow-uid",
        type=int,
        action="append",
        default=[],
        metavar="UID",
        help="a user that may use --socket beside this one and root; repeatable",
    )
    add("--slab", default="8MiB", metavar="SIZE", help="the largest page it takes (default: 8MiB)")
    add("--nixl", action="store_true", help="let NIXL reach it, too: for `peer://HOST:PORT?by=nixl`")
    add("--json", action="store_true", help="say where it listens as JSON")


def run(args: argparse.Namespace) -> int:
    """Shares until it is interrupted or terminated."""
    host, colon, port = args.listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--listen {args.listen!r}: write HOST:PORT, like 127.0.0.1:7373")
    secret = read_secret(args.secret) if args.secret is not None else b""
    slab = parse_size(args.slab)
    size = parse_size(args.size) // slab * slab
    if args.allow_uid and args.socket is None:
        raise ValueError(
            f"--allow-uid {args.allow_uid[0]}: other users need a socket they can reach; give --socket PATH"
        )
    config = PeerConfig(host.strip("[]"), int(port), secret, local=args.socket, users=tuple(args.allow_uid))
    if not size:
        raise ValueError(f"{args.size} is less than one slab of {slab} bytes: share more, or give --slab")
    try:
        memory = SharedMemory(size)
    except OSError as error:
        raise ValueError(f"{args.size} cannot be shared here: {error.strerror}; share less") from None
    # Before there are other threads: one of them could be told of the end, and the first would wait on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        _share(args, config, size, slab, memory)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0


def _share(args: argparse.Namespace, config: PeerConfig, size: int, slab: int, memory: SharedMemory) -> None:
    tier = HostTier(HostConfig(size, slab), buffer=memory.buffer)
    nixl = NixlArena(tier.arena) if args.nixl else None
    try:
        server = PeerServer(tier, config, memory, nixl)
    except OSError as error:
        why = str(error.strerror or error).partition(" (while")[0]
        where = args.listen if args.socket is None else f"{args.listen} or {args.socket}"
        raise ValueError(f"{where} cannot be had: {why}; choose another with --listen or --socket") from None
    where = "peer://{}:{}".format(*server.address)
    if args.json:
        print(json.dumps({"address": where, "bytes": size}), flush=True)
    else:
        print(f"{format_bytes(size)} at {where}: kvloom serve MODEL --tier {where}", flush=True)
    signal.sigwait(ENDS)
    server.close()

"""`kvloom share`: a process with host memory that several servers use as a tier. The pages remain stored when a server
exits.

Servers use this memory with `--tier peer://HOST:PORT`. Servers on the same machine access the memory directly,
without socket traffic.
"""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path
from typing import get_args

from kvloom.core import format_bytes, parse_size
from kvloom.tiers.host import HostConfig, HostTier, SharedMemory
from kvloom.tiers.ttl import check_ttl

from .nixl_arena import NixlArena
from .secret import read_secret
from .server import PeerConfig, PeerServer, UseTLS

__all__ = ["arguments", "run"]

ENDS = {signal.SIGINT, signal.SIGTERM}


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("size", metavar="SIZE", help="memory to share, like 64GiB; the system commits it on first use")
    add(
        "--listen",
        default="127.0.0.1:7373",
        metavar="HOST:PORT",
        help="address to listen on (default: 127.0.0.1:7373; port 0: any free port); other than loopback requires --secret",
    )
    add(
        "--secret",
        type=Path,
        metavar="FILE",
        help="file with a secret of 16 bytes or more, the same on both sides (default: this user's own, created if missing)",
    )
    add(
        "--tls",
        choices=get_args(UseTLS),
        default="auto",
        help="encrypt TCP connections (default: auto, which encrypts unless the address is loopback)",
    )
    add("--socket", type=Path, metavar="PATH", help="also listen on a Unix socket, for `peer:///PATH`")
    add(
        "--allow-uid",
        type=int,
        action="append",
        default=[],
        metavar="UID",
        help="user allowed on --socket besides this user and root; repeatable",
    )
    add("--slab", default="8MiB", metavar="SIZE", help="largest page size (default: 8MiB)")
    add(
        "--ttl",
        type=float,
        default=0,
        metavar="S",
        help="drop pages S seconds after they were stored (default: never)",
    )
    add("--nixl", action="store_true", help="also allow access by NIXL, for `peer://HOST:PORT?by=nixl`")
    add("--json", action="store_true", help="print the address as JSON")


def run(args: argparse.Namespace) -> int:
    """Share memory until interrupted or terminated."""
    host, colon, port = args.listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--listen {args.listen!r}: write HOST:PORT, like 127.0.0.1:7373")
    check_ttl(args.ttl)
    secret = read_secret(args.secret) if args.secret is not None else b""
    slab = parse_size(args.slab)
    size = parse_size(args.size) // slab * slab
    if args.allow_uid and args.socket is None:
        raise ValueError(
            f"--allow-uid {args.allow_uid[0]} needs a socket that this user can reach: give --socket PATH"
        )
    config = PeerConfig(
        host.strip("[]"),
        int(port),
        secret,
        unix_socket=args.socket,
        allowed_uids=tuple(args.allow_uid),
        tls=args.tls,
    )
    if not size:
        raise ValueError(
            f"{args.size} is less than one slab of {slab} bytes: share more, or use a smaller --slab"
        )
    try:
        memory = SharedMemory(size)
    except OSError as error:
        raise ValueError(
            f"{args.size} of shared memory cannot be allocated: {error.strerror}; share less"
        ) from None
    # Before other threads exist, because one of them could receive the signal instead of the main thread.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        _share(args, config, size, slab, memory)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0


def _share(args: argparse.Namespace, config: PeerConfig, size: int, slab: int, memory: SharedMemory) -> None:
    tier = HostTier(HostConfig(size, slab, ttl=args.ttl), buffer=memory.buffer)
    nixl = NixlArena(tier.arena) if args.nixl else None
    try:
        server = PeerServer(tier, config, memory, nixl)
    except OSError as error:
        why = str(error.strerror or error).partition(" (while")[0]
        where = args.listen if args.socket is None else f"{args.listen} or {args.socket}"
        raise ValueError(
            f"cannot listen on {where}: {why}; choose another address with --listen or --socket"
        ) from None
    where = "peer://{}:{}".format(*server.address)
    if args.json:
        print(json.dumps({"address": where, "bytes": size}), flush=True)
    else:
        print(f"{format_bytes(size)} at {where}: kvloom serve MODEL --tier {where}", flush=True)
    signal.sigwait(ENDS)
    server.close()

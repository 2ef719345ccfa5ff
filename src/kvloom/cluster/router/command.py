"""`kvloom route`: command-line arguments of the router."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

from kvloom.arguments import number, server, size, whole
from kvloom.config_file import add_config_argument
from kvloom.serve.https import client_context, https_arguments, https_settings

if TYPE_CHECKING:
    from .proxy import ProxyOptions

__all__ = ["arguments", "run"]

ADMIN_KEY = "KVLOOM_ROUTER_KEY"


class WorkerAddress(NamedTuple):
    """A worker's URL, and the ZMQ addresses of its events. The addresses are None if the worker reports them itself."""

    url: str
    events: str | None = None
    replay: str | None = None


def worker_address(text: str) -> WorkerAddress:
    """An argparse type that parses the URL of a worker. For a worker that is not kvloom, the URL ends with its event
    addresses: `?events=ADDRESS&replay=ADDRESS`.
    """
    address, _, query = text.partition("?")
    url = server(address)
    try:
        found = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{query!r} of {text!r} must have the form events=ADDRESS") from None
    events, replay = found.pop("events", None), found.pop("replay", None)
    if found:
        name = next(iter(found))
        raise argparse.ArgumentTypeError(f"{name!r} of {text!r} is unknown; known: events, replay")
    for one in (events, replay):
        if one is not None and not one.startswith(("tcp://", "ipc://")):
            raise argparse.ArgumentTypeError(
                f"{one!r} of {text!r} is not a ZMQ address; use one like tcp://127.0.0.1:5557"
            )
    if replay is not None and events is None:
        raise argparse.ArgumentTypeError(f"{text!r} has replay without events; give both")
    return WorkerAddress(url, events, replay)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the router to a parser."""
    add_config_argument(parser)
    _add_workers(parser.add_argument_group("workers"))
    _add_network(parser.add_argument_group("network and HTTPS"))
    _add_routing(parser.add_argument_group("choice of workers"))
    _add_retries(parser.add_argument_group("waiting and retries"))
    _add_limits(parser.add_argument_group("limits of requests"))
    _add_logs(parser.add_argument_group("logs"))


def _add_workers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    worker = "HTTP address of a worker (kvloom or vLLM), such as http://127.0.0.1:8001; for vLLM with ?events=ADDRESS&replay=ADDRESS, its ZMQ sockets; repeatable; workers can also be added with /register"
    add("--worker", action="append", default=[], type=worker_address, metavar="URL", help=worker)
    found = "URL whose host name has one address per worker, such as a headless service of Kubernetes; resolved again regularly; repeatable"
    add("--discover", action="append", default=[], type=server, metavar="URL", help=found)
    worker_key = "API key with which the router checks workers that require keys; clients send their own keys (default: $KVLOOM_WORKER_KEY)"
    add("--worker-key", metavar="KEY", help=worker_key)
    events_key = "file with the CURVE keys of events, for workers with --kv-events-key (default: plain events only; docs/cluster.md)"
    add("--kv-events-key", metavar="FILE", help=events_key)
    authority = (
        "authorities whose certificates `https:` workers must have (PEM; default: those of the system)"
    )
    add("--worker-ca-certs", metavar="FILE", help=authority)
    certificate = "certificate of the router, for workers with --ssl-ca-certs (PEM)"
    add("--worker-certfile", metavar="FILE", help=certificate)
    add("--worker-keyfile", metavar="FILE", help="its private key (default: in the same file)")


def _add_network(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    https_arguments(group)
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    port = "port (default: 8080; 0: any free port)"
    add("--port", type=whole(0, 65535), default=8080, metavar="N", help=port)
    key = f"key of /register, /unregister, /query, /workers and the dashboard; needed with a public --host (default: ${ADMIN_KEY})"
    add("--admin-key", metavar="KEY", help=key)
    metrics = "whether /metrics requires the admin key (default: auto, which requires it if other machines can reach the router)"
    add("--metrics-auth", choices=("auto", "key", "open"), default="auto", help=metrics)


def _add_routing(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    route = "kv: by cached prefix and load (default); round-robin: in turn, to compare"
    add("--route", choices=("kv", "round-robin"), default="kv", help=route)
    folder = (
        "folder with the model's tokenizer.json, to tokenise texts here (default: ask a worker's /tokenize)"
    )
    add("--tokenizer", metavar="DIR", help=folder)
    text = "do not tokenise: route texts and chats by their string prefix"
    add("--no-tokenize", action="store_true", help=text)
    image = "tokens that an image of a prompt counts as, to estimate its cost (default: 512)"
    add("--image-tokens", type=whole(1), default=512, metavar="N", help=image)
    affinity = "seconds by which the cost of a session's last worker is reduced (default: 0.05)"
    add("--affinity-seconds", type=number(0), default=0.05, metavar="S", help=affinity)
    overload = (
        "a worker gets no affinity if its backlog exceeds the smallest by more than S seconds (default: 2)"
    )
    add("--overload-seconds", type=number(0), default=2.0, metavar="S", help=overload)
    copies = "number of workers that should have each hot prefix, so that it survives the death of a worker (default: 1, no copies)"
    add("--copies", type=whole(1), default=1, metavar="N", help=copies)
    hot = "number of hits after which a prefix is hot (default: 3)"
    add("--hot-hits", type=whole(1), default=3, metavar="N", help=hot)


def _add_retries(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    inflight = "largest number of requests that run on one worker; further requests wait, and tenants take turns; up to twice as many run if some tenants have fewer than their share (default: 256)"
    add("--inflight", type=whole(1), default=256, metavar="N", help=inflight)
    queue = "largest number of waiting requests (default: 10000); one tenant uses at most 4/5 of these places"
    add("--max-queue", type=whole(0), default=10_000, metavar="N", help=queue)
    attempts = "number of workers that may fail before a request ends with an error (default: 4)"
    add("--attempts", type=whole(1), default=4, metavar="N", help=attempts)
    deadline = "seconds after which a request ends with an error (default: 600)"
    add("--deadline-seconds", type=number(0, above=True), default=600.0, metavar="S", help=deadline)
    wait = "seconds that a request waits while no worker can take it, such as during a restart (default: 30; 0: refuse at once)"
    add("--wait-seconds", type=number(0), default=30.0, metavar="S", help=wait)
    silent = "seconds without data after which a stream continues on another worker (default: 30)"
    add("--silent-seconds", type=number(0, above=True), default=30.0, metavar="S", help=silent)


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    body = "limit of a request body (default: 64MiB)"
    add("--max-body", type=size, default="64MiB", metavar="SIZE", help=body)
    bodies = "memory for the bodies of all open requests; further requests get 429 (default: 2GiB)"
    add("--body-memory", type=size, default="2GiB", metavar="SIZE", help=bodies)
    connections = "largest number of open connections of clients (default: 16384)"
    add("--max-connections", type=whole(1), default=16384, metavar="N", help=connections)
    request = "seconds in which the headers of a request must arrive, and then its body (default: 30)"
    add("--request-seconds", type=number(0, above=True), default=30.0, metavar="S", help=request)
    slow = "seconds after which a client that reads nothing, or less than 1 KiB per second, is disconnected (default: 60)"
    add("--read-seconds", type=number(0, above=True), default=60.0, metavar="S", help=slow)


def _add_logs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    level = "least severe messages to log (default: info)"
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help=level)
    style = "format of the log on stderr (default: text)"
    add("--log-format", choices=("text", "json"), default="text", help=style)


def run(args: argparse.Namespace) -> int:
    from kvloom.serve.api import is_loopback, limited_socket, raise_file_limit
    from kvloom.serve.logs import configure_logging

    from .proxy import ProxyOptions

    configure_logging(args.log_level, args.log_format)
    key = args.admin_key or os.environ.get(ADMIN_KEY)
    is_public = not is_loopback(args.host)
    if is_public and not key:
        raise ValueError(f"--host {args.host} is public: give --admin-key, or listen on 127.0.0.1")
    if args.metrics_auth == "key" and not key:
        raise ValueError("--metrics-auth key requires a key: give --admin-key")
    options = ProxyOptions(
        args.inflight,
        args.max_queue,
        args.attempts,
        args.deadline_seconds,
        args.silent_seconds,
        args.route,
        args.wait_seconds,
    )
    raise_file_limit()
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    with limited_socket(family, socket.SOCK_STREAM, 0, args.read_seconds) as listener:
        listener.bind((args.host, args.port))
        listener.listen(2048)
        return _run(args, options, key, is_public, listener)


def _run(
    args: argparse.Namespace, options: ProxyOptions, key: str | None, is_public: bool, listener: socket.socket
) -> int:
    import uvicorn

    from kvloom.serve.api import limited_connection

    http = limited_connection(args.max_connections)
    config = uvicorn.Config(
        _placeholder, loop="auto", http=http, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, date_header=False, proxy_headers=False, timeout_keep_alive=60, timeout_graceful_shutdown=30,
        **https_settings(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs),
    )  # fmt: skip
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_serve(args, options, key, is_public, listener, config))


async def _serve(
    args: argparse.Namespace,
    options: ProxyOptions,
    key: str | None,
    is_public: bool,
    listener: socket.socket,
    config: Any,
) -> int:
    import gc
    import logging

    import aiohttp

    from kvloom.events_wire import CurveKey
    from kvloom.serve.api import GracefulServer, watch_connections

    from .application import RouterApplication
    from .fleet import Fleet, Offer
    from .prompt_keys import PromptReader
    from .proxy import Proxy
    from .replication import ReplicationOptions
    from .scoring import ScoringOptions

    scoring = ScoringOptions(affinity_seconds=args.affinity_seconds, overload_seconds=args.overload_seconds)
    tls = client_context(args.worker_ca_certs, args.worker_certfile, args.worker_keyfile)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=20, ssl=tls)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        events_key = None if args.kv_events_key is None else CurveKey.read(args.kv_events_key)
        fleet = Fleet(session, scoring, args.worker_key, events_key, tls)
        reader = PromptReader(fleet, args.tokenizer, not args.no_tokenize, args.image_tokens)
        proxy = Proxy(fleet, reader, options, ReplicationOptions(args.copies, args.hot_hits))
        for worker in args.worker:
            fleet.add(worker.url).publishes = Offer(events=worker.events, replay=worker.replay)
        for url in args.discover:
            fleet.discover(url)
        config.app = application = RouterApplication(
            fleet,
            proxy,
            key,
            args.max_body,
            is_public,
            args.body_memory,
            args.request_seconds,
            args.metrics_auth == "key" or (args.metrics_auth == "auto" and is_public),
        )
        host, port = listener.getsockname()[:2]
        logging.getLogger("kvloom.router").info(
            "routing on %s://%s:%d over %d workers; the fleet is at /dashboard",
            "http" if args.ssl_certfile is None else "https",
            host,
            port,
            len(args.worker),
        )
        gc.freeze()  # garbage collections delay requests, so they skip the modules and settings loaded so far
        server = GracefulServer(config)
        tasks = [
            asyncio.create_task(application.state.run()),
            asyncio.create_task(watch_connections(server, args.request_seconds, args.read_seconds)),
        ]
        try:
            await server.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()
            proxy.replicator.close()
            await fleet.close()
    return 0


async def _placeholder(*_: object) -> None:
    """A stand-in for the application until it is set."""

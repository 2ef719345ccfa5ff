"""The server's life cycle: bind, load, report ready, serve, drain, exit.

    SIGTERM or SIGINT   no new requests (503); running ones may finish within `drain_seconds`; then exit 0
    a second one        exit at once

The engine runs in a separate process (worker/engine_client.py). This process never loads the model: it tokenises and
serves HTTP.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import re
import resource
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from kvloom.engine import check_engine, engine_config

from .api import (
    AnswerFormats,
    PromptEncoder,
    ServerContext,
    close_idle,
    engine_error,
    is_loopback,
    limited_connection,
    load_tokenizer,
)
from .application import application
from .auth import ApiKeys, Limits, RequestLimiter
from .dashboard import DashboardState
from .errors import cut_off
from .metrics import Metrics, Recorder, RequestObserver
from .worker import EngineClient, Ready, Start, StartError, WatchdogLimits

if TYPE_CHECKING:
    from .metrics import Traces

__all__ = ["ServerOptions", "serve"]

log = logging.getLogger("kvloom.serve")

BAD_START = 2
METRICS_AUTH = ("auto", "key", "open")
SEND_BUFFER_BYTES = 1 << 17
"""Kernel buffer for a client that does not read; a larger one would hide a slow reader."""
LOADING_SECONDS = 5.0
"""Interval of messages while the model loads."""
ERROR_SECONDS = 0.1
"""Time to deliver errors to requests that are cut off."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server. `record` is a file for a traffic recording, `otlp` a receiver of traces.

    Raises ValueError for a public host without keys."""

    start: Start
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    keys: ApiKeys = field(default_factory=lambda: ApiKeys({}))
    limits: Limits = field(default_factory=Limits)
    drain_seconds: float = 30.0
    watchdog: WatchdogLimits = field(default_factory=WatchdogLimits)
    chat_template: str | None = None
    allow_chat_template: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = None
    completes_code: bool = False
    """Whether the model completes code instead of chats; the printed example request depends on it."""
    record: str | None = None
    otlp: str | None = None
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server; "*" is any."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    """Serve HTTPS with this certificate and key. With `ssl_ca_certs`, clients must present a certificate of it."""
    quiet: bool = False
    """Print no start-up message."""
    metrics_auth: str = "auto"
    """Whether /metrics requires a key: "key", "open", or "auto" (if other machines can reach the server)."""

    def __post_init__(self) -> None:
        _resolve(self.host, self.port)
        if not self.keys and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is reachable from other machines, and there are no API keys: "
                "use --api-keys FILE or --api-key KEY; --no-auth is for a loopback host such as 127.0.0.1"
            )
        if not self.keys and "*" in self.cors_origins:
            raise ValueError(
                "--cors-origin '*' lets every web page use the server, and there are no API keys: "
                "name the origins, or use --api-keys FILE or --api-key KEY"
            )
        for origin in self.cors_origins:
            if origin != "*" and re.fullmatch(r"https?://[^\s/?#@]+", origin) is None:
                raise ValueError(
                    f"--cors-origin {origin!r} is not an origin: write it like https://example.org:8443"
                )
        if (self.ssl_keyfile or self.ssl_ca_certs) and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        if self.ssl_certfile is not None:
            _check_certificate(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
        if self.metrics_auth not in METRICS_AUTH:
            raise ValueError(f"metrics_auth {self.metrics_auth!r} must be one of {', '.join(METRICS_AUTH)}")
        if self.metrics_auth == "key" and not self.keys:
            raise ValueError("--metrics-auth key requires API keys: use --api-keys FILE")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port {self.port} must be 0 to 65535")
        if not 0 <= self.drain_seconds < math.inf:
            raise ValueError(f"drain_seconds {self.drain_seconds} must be finite and not negative")

    @property
    def metrics_need_key(self) -> bool:
        if self.metrics_auth == "auto":
            return bool(self.keys) and not is_loopback(self.host)
        return self.metrics_auth == "key"

    @property
    def model_name(self) -> str:
        return self.name or Path(self.start.model).name or self.start.model


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: this module drains differently."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(options: ServerOptions) -> int:
    """Serve until a signal arrives; return the exit code.

    Raises ValueError for options that cannot be loaded, OSError if the port is unavailable."""
    start = options.start
    check_engine(
        start.model,
        engine_config(**start.settings),
        load_format=start.load_format,
        dtype=start.dtype,
        device=start.device,
    )
    _raise_file_limit()
    config = uvicorn.Config(
        _placeholder, loop="auto", http=limited_connection(options.limits.connections), ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, timeout_keep_alive=30, timeout_graceful_shutdown=2,
        ssl_certfile=options.ssl_certfile, ssl_keyfile=options.ssl_keyfile, ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if options.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )  # fmt: skip
    with (
        _listen(options.host, options.port, options.limits.read_seconds) as listener,
        asyncio.Runner(loop_factory=config.get_loop_factory()) as runner,
    ):
        return runner.run(_Lifecycle(options, config, listener).run())


class _Lifecycle:
    def __init__(self, options: ServerOptions, config: uvicorn.Config, listener: socket.socket) -> None:
        self.options, self.listener = options, listener
        self.engine = EngineClient(
            options.start, log.warning, self._engine_ready, options.watchdog, explain=engine_error
        )
        limiter = RequestLimiter(options.limits.answers, shared=len(options.keys.tenants) > 1)
        recorder = None
        if options.record is not None:
            recorder = Recorder(options.record, block_tokens=16, model=options.model_name)
        self.observer = RequestObserver(
            Metrics(self.engine, limiter, options.model_name, options.start.observe),
            _traces(options),
            recorder,
        )
        self.engine.on_progress = self.observer.record_progress
        if recorder is not None:
            self.engine.on_delta = self.observer.record_tokens
        self.context = ServerContext(
            self.engine,
            options.keys,
            options.limits,
            limiter,
            self.observer,
            options.model_name,
            options.start.model,
            int(time.time()),
            metrics_need_key=options.metrics_need_key,
            cors_origins=options.cors_origins,
        )
        self.dashboard = DashboardState(self.context)
        config.app = application(self.context, self.dashboard)
        self.server = _Server(config)
        self._began = time.monotonic()
        self._ready: Ready | None = None
        self._loaded = asyncio.Event()
        self._local = Path(options.start.model).exists()
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        named = self.options.model_name if self.options.completes_code else self.options.start.model
        log.info("loading %s ...", named)
        work = asyncio.create_task(self._work())
        http = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        idle = asyncio.create_task(self._close_idle())
        watch = asyncio.create_task(self.dashboard.sample_history())
        waiting = asyncio.create_task(self._report_loading(named))
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await self._drain()
                return 0
            failed = work.exception()
            if not isinstance(failed, StartError | OSError | ValueError):
                raise failed or RuntimeError("the engine client ended unexpectedly")
            log.error("%s", failed)
            return BAD_START
        finally:
            for task in (idle, watch, waiting, stop):
                task.cancel()
            self.engine.fail_all(cut_off())
            await asyncio.sleep(ERROR_SECONDS)
            self.server.should_exit = True
            await http
            self.engine.close()
            await asyncio.gather(work, return_exceptions=True)
            await asyncio.to_thread(self.observer.close)

    async def _report_loading(self, model: str) -> None:
        """Log the time since the start until the engine is ready."""
        while not self._loaded.is_set():
            await asyncio.sleep(LOADING_SECONDS)
            if not self._loaded.is_set():
                log.info("loading %s ... %.0f s", model, time.monotonic() - self._began)

    async def _work(self) -> None:
        await asyncio.gather(self.engine.run(), self._load_tokenizer())

    async def _load_tokenizer(self) -> None:
        model, template = self.options.start.model, self.options.chat_template
        if not self._local:  # the engine downloads it, or reports the error
            await self._loaded.wait()
        found = await asyncio.to_thread(load_tokenizer, model, template)
        seconds = self.options.limits.template_seconds
        parsers = self.options.tool_call_parser, self.options.reasoning_parser
        self.context.answers = AnswerFormats.of(found, *parsers)
        self.context.encoder = await asyncio.to_thread(
            PromptEncoder, found, seconds, self.options.allow_chat_template
        )
        self._print_ready()

    def _engine_ready(self, facts: Ready) -> None:
        again = self._ready is not None
        self._ready = facts
        self._loaded.set()
        if self.observer.recorder is not None:
            self.observer.recorder.bytes_per_token = facts.bytes_per_token
        if again:
            log.warning("engine restarted as process %s in %.1f s", self.engine.pid, facts.load_seconds)
        else:
            self._print_ready()

    def _print_ready(self) -> None:
        if self._ready is None or self.context.encoder is None:
            return
        log.info("ready: %s", self.context.model)
        if self.options.quiet:
            return
        from .startup_message import print_startup

        host, port = self.listener.getsockname()[:2]
        scheme = "http" if self.options.ssl_certfile is None else "https"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        seconds = time.monotonic() - self._began
        has_chat = bool(getattr(self.context.encoder.tokenizer, "chat_template", None))
        has_chat = has_chat and not self.options.completes_code
        print_startup(
            self.context.model,
            url,
            self._ready,
            self.engine.pid or 0,
            seconds,
            bool(self.options.keys),
            has_chat,
        )

    def _signalled(self) -> None:
        (self._stop_now if self._stop.is_set() else self._stop).set()

    async def _drain(self) -> None:
        """Wait for running requests; admit no new ones."""
        limiter, seconds = self.context.limiter, self.options.drain_seconds
        limiter.is_draining = True
        if limiter.requests:
            log.info(
                "draining: waiting up to %g s for %s; a second signal stops at once",
                seconds,
                _count_requests(limiter),
            )
            waits = {asyncio.create_task(limiter.idle.wait()), asyncio.create_task(self._stop_now.wait())}
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
        if limiter.requests:
            log.warning("stopped; %s cut off", _count_requests(limiter))
        else:
            log.info("stopped")

    async def _close_idle(self) -> None:
        seconds = self.options.limits.request_seconds
        while True:
            await asyncio.sleep(min(5.0, seconds / 2))
            close_idle(self.server.server_state.connections, seconds)


def _traces(options: ServerOptions) -> Traces | None:
    if options.otlp is None:
        return None
    from .metrics import Traces

    return Traces(options.otlp, options.model_name)


def _count_requests(limiter: RequestLimiter) -> str:
    return "1 request" if limiter.requests == 1 else f"{limiter.requests} requests"


def _listen(host: str, port: int, read_seconds: float) -> socket.socket:
    """Return a listening socket. The kernel closes connections whose client reads nothing for `read_seconds`."""
    family, kind, protocol, _, address = _resolve(host, port)
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = min(int(1e3 * read_seconds), (1 << 31) - 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        remedy = "use an address of this machine with --host" if error.errno == errno.EADDRNOTAVAIL else ""
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror}; {remedy or 'choose another with --port'}"
        ) from None
    return listener


def _resolve(host: str, port: int) -> Any:
    """Return the first address of a host. Raises ValueError if it has none."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(
            f"host {host!r} is neither an IP address nor a known name ({error.strerror}); "
            "use an address of this machine, such as 127.0.0.1"
        ) from None


def _check_certificate(certfile: str, keyfile: str | None, ca_certs: str | None) -> None:
    """Raise ValueError for files that TLS cannot use."""
    for option, path in (("certfile", certfile), ("keyfile", keyfile), ("ca-certs", ca_certs)):
        if path is not None and not Path(path).is_file():
            raise ValueError(f"--ssl-{option} {path}: there is no such file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, lambda: "")
        if ca_certs is not None:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(ca_certs)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ValueError(
            f"--ssl-certfile {certfile} cannot be used ({error}): give a certificate and its key without password, in PEM format"
        ) from None


def _raise_file_limit() -> None:
    """Raise the limit of open files to this user's maximum: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _placeholder(*_: object) -> None:
    """The application until the real one is set."""

"""The server's life cycle: bind, load, report ready, serve, drain, exit.

    SIGTERM or SIGINT   no new requests (503); running ones may finish within `drain_seconds`; then exit 0
    a second one        exit at once

The engine is a process of its own (worker/engine_client.py). This process never loads the model: it tokenises and
serves HTTP.
"""

from __future__ import annotations

import asyncio
import math
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from kvloom.engine import check_engine

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
from .errors import draining
from .metrics import Metrics, Recorder, RequestObserver
from .worker import EngineClient, Ready, Start, StartError, WatchdogLimits

if TYPE_CHECKING:
    from .metrics import Traces

__all__ = ["ServerOptions", "serve"]

BAD_START = 2
METRICS_AUTH = ("auto", "key", "open")
SEND_BUFFER_BYTES = 1 << 17
"""Kernel buffer for a client that does not read; a larger one would hide a slow reader."""
ERROR_SECONDS = 0.1
"""Time to deliver errors to requests that are cut off."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server. `record` is a file for a traffic recording, `otlp` a receiver of traces. Raises ValueError for a
    public host without keys."""

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
    """The model completes code instead of chats; the example command follows."""
    record: str | None = None
    otlp: str | None = None
    metrics_auth: str = "auto"
    """Whether /metrics requires a key: "key", "open", or "auto" (if other machines can reach the server)."""

    def __post_init__(self) -> None:
        if not self.keys and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is reachable from other machines, and there are no API keys: "
                "use --api-keys FILE, or a loopback host such as 127.0.0.1"
            )
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
    """Serve until a signal arrives; return the exit code. Raises ValueError for options that cannot be loaded, OSError if the
    port is unavailable."""
    start = options.start
    check_engine(
        start.model,
        load_format=start.load_format,
        dtype=start.dtype,
        kv_dtype=start.kv_dtype,
        kv_scales=start.kv_scales,
        pool_bytes=start.pool_bytes,
        tiers=start.tiers,
        device=start.device,
    )
    _raise_file_limit()
    config = uvicorn.Config(
        _placeholder, loop="auto", http=limited_connection(options.limits.connections), ws="none", lifespan="off", log_level="warning", access_log=False,
        server_header=False, timeout_keep_alive=30, timeout_graceful_shutdown=2,
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
            options.start, _log, self._engine_ready, options.watchdog, explain=engine_error
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
        _log(f"loading {named} ...")
        work = asyncio.create_task(self._work())
        http = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        idle = asyncio.create_task(self._close_idle())
        watch = asyncio.create_task(self.dashboard.sample_history())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await self._drain()
                return 0
            failed = work.exception()
            if not isinstance(failed, StartError | OSError | ValueError):
                raise failed or RuntimeError("the engine client ended unexpectedly")
            _log(f"error: {failed}")
            return BAD_START
        finally:
            for task in (idle, watch, stop):
                task.cancel()
            self.engine.fail_all(draining())
            await asyncio.sleep(ERROR_SECONDS)
            self.server.should_exit = True
            await http
            self.engine.close()
            await asyncio.gather(work, return_exceptions=True)
            await asyncio.to_thread(self.observer.close)

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
        if again:
            _log(f"engine restarted as process {self.engine.pid} in {facts.load_seconds:.1f} s")
        else:
            self._print_ready()

    def _print_ready(self) -> None:
        if self._ready is None or self.context.encoder is None:
            return
        from .startup_message import print_startup

        host, port = self.listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
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
            _log(
                f"draining: waiting up to {seconds:g} s for {_count_requests(limiter)}; a second signal stops at once"
            )
            waits = {asyncio.create_task(limiter.idle.wait()), asyncio.create_task(self._stop_now.wait())}
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
        _log(f"stopped; {_count_requests(limiter)} cut off" if limiter.requests else "stopped")

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
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
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
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"
        ) from None
    return listener


def _raise_file_limit() -> None:
    """Raise the limit of open files to this user's maximum: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _log(line: str) -> None:
    print(f"kvloom serve: {line}", file=sys.stderr, flush=True)


async def _placeholder(*_: object) -> None:
    """The application until the real one is set."""

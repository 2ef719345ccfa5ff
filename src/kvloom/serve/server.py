"""A server's life: bind, load, say that it is ready, serve, drain, end.

    SIGTERM or SIGINT   no new requests (503); those that run may finish within `drain_seconds`; then exit 0
    a second one        exit at once

The engine is a process of its own (link.py). This one never touches the model: it tokenises and speaks HTTP.
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

from .api.application import application
from .api.connection import at_most, close_idle
from .api.errors import draining
from .api.prompts import Prompts, load_tokenizer
from .api.service import Service, is_loopback
from .auth.keys import Keys
from .auth.limits import Gate, Limits
from .dashboard.watch import Watch
from .metrics.metrics import Metrics
from .metrics.observer import Observer
from .metrics.trace_recorder import Recorder
from .worker.engine_link import EngineLink, StartError
from .worker.messages import Ready, Start
from .worker.watchdog import Patience

if TYPE_CHECKING:
    from .metrics.otel_traces import Traces

__all__ = ["Options", "serve"]

BAD_START = 2
METRICS_AUTH = ("auto", "key", "open")
SEND_BYTES = 1 << 17
"""What the kernel keeps for a client that does not read; more would only hide that it is slow."""
LAST_WORDS_SECONDS = 0.1
"""For those that are cut off to be told so."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to serve, where, to whom. `record` is a file for its traffic, `otlp` where traces are sent. Raises ValueError where no
    keys would leave an open door."""

    start: Start
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    keys: Keys = field(default_factory=lambda: Keys({}))
    limits: Limits = field(default_factory=Limits)
    drain_seconds: float = 30.0
    patience: Patience = field(default_factory=Patience)
    chat_template: str | None = None
    writes_code: bool = False
    """The model goes on with code rather than with a chat: so does the line to try."""
    record: str | None = None
    otlp: str | None = None
    metrics_auth: str = "auto"
    """Whether /metrics needs a key: "key", "open", or "auto": only where other machines can reach the server."""

    def __post_init__(self) -> None:
        if not self.keys and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} can be reached from elsewhere, and there are no API keys: "
                "give --api-keys FILE, or a loopback host such as 127.0.0.1"
            )
        if self.metrics_auth not in METRICS_AUTH:
            raise ValueError(f"metrics_auth {self.metrics_auth!r} must be one of {', '.join(METRICS_AUTH)}")
        if self.metrics_auth == "key" and not self.keys:
            raise ValueError("--metrics-auth key needs API keys, and there are none: give --api-keys FILE")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port {self.port} must lie in 0 to 65535")
        if not 0 <= self.drain_seconds < math.inf:
            raise ValueError(f"drain_seconds {self.drain_seconds} must not be negative, nor infinite")

    @property
    def metrics_need_key(self) -> bool:
        if self.metrics_auth == "auto":
            return bool(self.keys) and not is_loopback(self.host)
        return self.metrics_auth == "key"

    @property
    def model_name(self) -> str:
        return self.name or Path(self.start.model).name or self.start.model


class _Server(uvicorn.Server):
    """uvicorn without its own signals: this room has its own idea of draining."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(options: Options) -> int:
    """Serve until a signal comes; the exit code. Raises ValueError where what is asked could never be loaded, OSError where
    the port cannot be had."""
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
        _nothing, loop="auto", http=at_most(options.limits.connections), ws="none", lifespan="off", log_level="warning", access_log=False,
        server_header=False, timeout_keep_alive=30, timeout_graceful_shutdown=2,
    )  # fmt: skip
    with (
        _bound(options.host, options.port, options.limits.read_seconds) as listener,
        asyncio.Runner(loop_factory=config.get_loop_factory()) as runner,
    ):
        return runner.run(_Life(options, config, listener).run())


class _Life:
    def __init__(self, options: Options, config: uvicorn.Config, listener: socket.socket) -> None:
        self.options, self.listener = options, listener
        self.link = EngineLink(options.start, _say, self._engine_ready, options.patience)
        gate = Gate(options.limits.answers, shared=len(options.keys.tenants) > 1)
        recorder = None
        if options.record is not None:
            recorder = Recorder(options.record, block_tokens=16, model=options.model_name)
        self.observer = Observer(
            Metrics(self.link, gate, options.model_name, options.start.observe), _traces(options), recorder
        )
        self.link.on_story = self.observer.tell
        if recorder is not None:
            self.link.on_answer = self.observer.answer
        self.service = Service(
            self.link,
            options.keys,
            options.limits,
            gate,
            self.observer,
            options.model_name,
            options.start.model,
            int(time.time()),
            metrics_need_key=options.metrics_need_key,
        )
        self.watch = Watch(self.service)
        config.app = application(self.service, self.watch)
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
        named = self.options.model_name if self.options.writes_code else self.options.start.model
        _say(f"loading {named} ...")
        work = asyncio.create_task(self._work())
        http = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        idle = asyncio.create_task(self._close_idle())
        watch = asyncio.create_task(self.watch.run())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await self._drain()
                return 0
            failed = work.exception()
            if not isinstance(failed, StartError | OSError | ValueError):
                raise failed or RuntimeError("the engine's link ended by itself")
            _say(f"error: {failed}")
            return BAD_START
        finally:
            for task in (idle, watch, stop):
                task.cancel()
            self.link.fail_all(draining())
            await asyncio.sleep(LAST_WORDS_SECONDS)
            self.server.should_exit = True
            await http
            self.link.close()
            await asyncio.gather(work, return_exceptions=True)
            await asyncio.to_thread(self.observer.close)

    async def _work(self) -> None:
        await asyncio.gather(self.link.run(), self._load_tokenizer())

    async def _load_tokenizer(self) -> None:
        model, template = self.options.start.model, self.options.chat_template
        if not self._local:  # the engine fetches it, or says why it cannot be had
            await self._loaded.wait()
        found = await asyncio.to_thread(load_tokenizer, model, template)
        seconds = self.options.limits.template_seconds
        self.service.prompts = await asyncio.to_thread(Prompts, found, seconds)
        self._tell_ready()

    def _engine_ready(self, facts: Ready) -> None:
        again = self._ready is not None
        self._ready = facts
        self._loaded.set()
        if again:
            _say(f"the engine is back, as process {self.link.pid}, after {facts.seconds:.1f} s")
        else:
            self._tell_ready()

    def _tell_ready(self) -> None:
        if self._ready is None or self.service.prompts is None:
            return
        from .welcome import welcome

        host, port = self.listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        seconds = time.monotonic() - self._began
        has_chat = bool(getattr(self.service.prompts.tokenizer, "chat_template", None))
        has_chat = has_chat and not self.options.writes_code
        welcome(
            self.service.model,
            url,
            self._ready,
            self.link.pid or 0,
            seconds,
            bool(self.options.keys),
            has_chat,
        )

    def _signalled(self) -> None:
        (self._stop_now if self._stop.is_set() else self._stop).set()

    async def _drain(self) -> None:
        """Let what runs finish, and nothing new begin."""
        gate, seconds = self.service.gate, self.options.drain_seconds
        gate.shut = True
        if gate.requests:
            _say(f"draining: {_requests(gate)} may take {seconds:g} s; a second signal stops at once")
            waits = {asyncio.create_task(gate.empty.wait()), asyncio.create_task(self._stop_now.wait())}
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
        _say(f"stopped; {_requests(gate)} cut off" if gate.requests else "stopped")

    async def _close_idle(self) -> None:
        seconds = self.options.limits.request_seconds
        while True:
            await asyncio.sleep(min(5.0, seconds / 2))
            close_idle(self.server.server_state.connections, seconds)


def _traces(options: Options) -> Traces | None:
    if options.otlp is None:
        return None
    from .metrics.otel_traces import Traces

    return Traces(options.otlp, options.model_name)


def _requests(gate: Gate) -> str:
    return "1 request" if gate.requests == 1 else f"{gate.requests} requests"


def _bound(host: str, port: int, read_seconds: float) -> socket.socket:
    """A socket that listens there. The kernel ends connections whose other side takes nothing of what was sent for
    `read_seconds`: answers that were handed over whole are waited for by nobody else."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = min(int(1e3 * read_seconds), (1 << 31) - 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(
            f"{host} port {port} cannot be had: {error.strerror}; choose another with --port"
        ) from None
    return listener


def _raise_file_limit() -> None:
    """A connection is an open file: let there be as many as this user may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say(line: str) -> None:
    print(f"kvloom serve: {line}", file=sys.stderr, flush=True)


async def _nothing(*_: object) -> None:
    """Stands where the application will, until there is one."""

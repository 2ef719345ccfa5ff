"""The server's life cycle: bind, load, report ready, serve, drain, exit.

    SIGTERM or SIGINT   refuse new requests (503), let running requests finish for up to `drain_seconds`, then exit 0
    a second signal     exit at once

Each model's engine runs in a separate process (worker/engine_client.py). This process never loads a model. It tokenises
and serves HTTP.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from kvloom.engine import check_engine, engine_config

from .api import (
    GracefulServer,
    ServedModel,
    ServerContext,
    limited_connection,
    limited_socket,
    raise_file_limit,
    watch_connections,
)
from .application import application
from .auth import RequestLimiter
from .dashboard import Dashboards
from .https import https_settings
from .metrics import ServerMetrics
from .model_routes import model_routes
from .model_set import ModelSet
from .server_options import ChatOptions, ModelOptions, ServerOptions, resolve, shared_start, with_own_events
from .worker import StartError

__all__ = ["ChatOptions", "ModelOptions", "ServerOptions", "serve", "shared_start", "with_own_events"]

log = logging.getLogger("kvloom.serve")

BAD_START = 2
LOADING_SECONDS = 5.0
"""Seconds between two log messages while the model loads."""
ERROR_SECONDS = 0.1
"""Seconds to wait before the server ends, so that requests that were ended early can receive their error responses."""


class _Server(GracefulServer):
    """uvicorn without its signal handlers, because this module handles signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(options: ServerOptions) -> int:
    """Serve until a signal arrives. Return the exit code.

    Raises ValueError if an engine cannot be loaded with these options, and OSError if the port is unavailable.
    """
    for model in options.models:
        start = model.start
        check_engine(
            start.model,
            engine_config(**start.settings),
            load_format=start.load_format,
            dtype=start.dtype,
            device=start.device,
        )
    raise_file_limit()
    config = uvicorn.Config(
        _placeholder, loop="auto", http=limited_connection(options.limits.connections), ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, timeout_keep_alive=30, timeout_graceful_shutdown=2,
        **https_settings(options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs),
    )  # fmt: skip
    with (
        _listen(options.host, options.port, options.limits.read_seconds) as listener,
        asyncio.Runner(loop_factory=config.get_loop_factory()) as runner,
    ):
        return runner.run(_run(options, config, listener))


async def _run(options: ServerOptions, config: uvicorn.Config, listener: socket.socket) -> int:
    return await _Lifecycle(options, config, listener).run()


class _Lifecycle:
    def __init__(self, options: ServerOptions, config: uvicorn.Config, listener: socket.socket) -> None:
        self.options, self.listener = options, listener
        limiter = RequestLimiter(options.limits.answers, shared=len(options.keys.tenants) > 1)
        self.context = ServerContext(
            options.keys,
            options.limits,
            limiter,
            ServerMetrics(limiter),
            aliases=dict(options.aliases),
            labels_models=options.has_many,
            memory=options.memory,
            metrics_need_key=options.metrics_need_key,
            cors_origins=options.cors_origins,
            lora_folders=options.lora_folders,
        )
        self.models = ModelSet(options, self.context, self._model_ready)
        self.dashboards = Dashboards(self.context)
        config.app = application(self.context, self.dashboards, model_routes(self.context, self.models))
        self.server = _Server(config)
        self._began = time.monotonic()
        self._awaited = {model.served_name for model in options.models}
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()

    async def run(self) -> int:
        loop, limits = asyncio.get_running_loop(), self.options.limits
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        for model in self.options.models:
            log.info("loading %s ...", _shown(model))
            self.models.add(model)
        http = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        tasks = [
            asyncio.create_task(watch_connections(self.server, limits.request_seconds, limits.read_seconds)),
            asyncio.create_task(self.dashboards.sample_history()),
            asyncio.create_task(self._report_loading()),
        ]
        if self.models.broker is not None:
            tasks.append(asyncio.create_task(self.models.broker.run()))
            tasks[-1].add_done_callback(self.models.report_fault)
        stop, fault = asyncio.create_task(self._stop.wait()), self.models.fault
        try:
            waits: set[asyncio.Future[Any]] = {fault, stop}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await self._drain()
                return 0
            failed = fault.exception()
            if not isinstance(failed, StartError | OSError | ValueError):
                raise failed or RuntimeError("the engine client ended unexpectedly")
            log.error("%s", failed)
            return BAD_START
        finally:
            for task in (*tasks, stop):
                task.cancel()
            self.models.fail_all()
            await asyncio.sleep(ERROR_SECONDS)
            self.server.should_exit = True
            await http
            await self.models.close()

    async def _report_loading(self) -> None:
        """Log the loading time regularly, until the models of the command line are ready."""
        while self._awaited:
            await asyncio.sleep(LOADING_SECONDS)
            for model in self.options.models:
                if model.served_name in self._awaited:
                    log.info("loading %s ... %.0f s", _shown(model), time.monotonic() - self._began)

    def _model_ready(self, served: ServedModel) -> None:
        """Log that a model is ready. When all models of the command line are ready, print the start-up message."""
        log.info("ready: %s", served.name)
        if served.name not in self._awaited:
            return
        self._awaited.discard(served.name)
        if self._awaited or self.options.quiet:
            return
        from .startup_message import ReadyModel, print_startup

        host, port = self.listener.getsockname()[:2]
        scheme = "http" if self.options.ssl_certfile is None else "https"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        completing = {model.served_name for model in self.options.models if model.completes_code}
        models = [
            ReadyModel(
                one.name,
                one.engine.info,
                one.engine.pid or 0,
                one.name not in completing and _has_chat(one),
                one.engine.role,
            )
            for one in self.context.models.values()
            if one.engine.info is not None
        ]
        seconds = time.monotonic() - self._began
        print_startup(models, url, seconds, bool(self.options.keys), self.options.memory)

    def _signalled(self) -> None:
        (self._stop_now if self._stop.is_set() else self._stop).set()

    async def _drain(self) -> None:
        """Refuse new requests and wait for running requests."""
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


def _shown(model: ModelOptions) -> str:
    """Return the text that names a model in the log: its folder or hub id, or its served name if the model completes
    code."""
    return model.served_name if model.completes_code else model.start.model


def _has_chat(served: ServedModel) -> bool:
    return served.encoder is not None and bool(getattr(served.encoder.tokenizer, "chat_template", None))


def _count_requests(limiter: RequestLimiter) -> str:
    return "1 request" if limiter.requests == 1 else f"{limiter.requests} requests"


def _listen(host: str, port: int, read_seconds: float) -> socket.socket:
    """Return a socket that is bound to the address of the server."""
    family, kind, protocol, _, address = resolve(host, port)
    listener = limited_socket(family, kind, protocol, read_seconds)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        remedy = "use an address of this machine with --host" if error.errno == errno.EADDRNOTAVAIL else ""
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror}; {remedy or 'choose another with --port'}"
        ) from None
    return listener


async def _placeholder(*_: object) -> None:
    """A stand-in for the application until it is set."""

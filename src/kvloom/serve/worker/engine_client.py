"""The client of the engine in the API process. It starts and restarts the engine process, sends requests, and
delivers answers.

    loading ──▶ ready ──▶ died, or hung and killed: open requests fail, then after a pause ──▶ loading …

A failed first start is final. Later starts are retried, at most MAX_RESTARTS times a minute.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from kvloom.engine import Role
from kvloom.serve.errors import ApiError, bad_request, engine_died, engine_loading, grammars_busy, slo_not_met
from kvloom.tiers import mark_optional

from .messages import (
    HEADER_BYTES,
    AdapterAnswer,
    Add,
    Cancel,
    Delta,
    EndSession,
    EngineStats,
    ExpectSession,
    FromEngine,
    Heartbeat,
    LoadAdapter,
    Outputs,
    PoolState,
    Ready,
    RequestProgress,
    ResizePool,
    SetRole,
    SnapshotRequest,
    Start,
    StartFailed,
    ToEngine,
    UnloadAdapter,
    body_length,
    frame,
)
from .response_stream import ResponseStream
from .watchdog import HEARTBEAT_SECONDS, Watchdog, WatchdogLimits

__all__ = ["Backoff", "EngineClient", "StartError"]

MAX_RESTARTS = 5
WINDOW_SECONDS = 60.0
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 8.0
SOCKET_BYTES = 1 << 20
STDERR = 2
ENGINE_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment of the engine process, which must be set before torch is loaded. Idle OpenMP threads sleep instead of
spinning, because spinning threads would take cores from the API process.
"""


class StartError(Exception):
    """Raised if the first start of the engine failed."""


class Backoff:
    """Computes the pause before each restart. The pause doubles with each restart in the last WINDOW_SECONDS. The pause
    is long enough that at most MAX_RESTARTS restarts happen within WINDOW_SECONDS.
    """

    def __init__(self) -> None:
        self._starts: deque[float] = deque()

    def pause(self, now: float) -> float:
        """Return the seconds to wait after an engine died at `now`, and count the restart."""
        while self._starts and now - self._starts[0] > WINDOW_SECONDS:
            self._starts.popleft()
        seconds = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** len(self._starts))
        if len(self._starts) >= MAX_RESTARTS:
            seconds = max(seconds, self._starts[-MAX_RESTARTS] + WINDOW_SECONDS - now)
        self._starts.append(now + seconds)
        return seconds


class EngineClient:
    """Runs one engine process at a time. When the process ends, starts a new one. Calls these functions of its owner:

    | callback      | called with                                               |
    |---------------|-----------------------------------------------------------|
    | `log`         | a line for the server's log                               |
    | `on_ready`    | the Ready message of each engine                          |
    | `on_progress` | the progress of each prompt                               |
    | `on_delta`    | each delta of an open request; may be None                |
    | `explain`     | the reason of a rejection; returns the error response     |
    """

    def __init__(
        self,
        start: Start,
        log: Callable[[str], None],
        on_ready: Callable[[Ready], None],
        limits: WatchdogLimits | None = None,
        explain: Callable[[str], ApiError] = bad_request,
    ) -> None:
        self.start, self._log, self._on_ready = start, log, on_ready
        self._limits = limits or WatchdogLimits()
        self._explain = explain
        self.info: Ready | None = None
        self.is_ready = False
        self.restarts = 0
        self.instance = ""
        """A random name of the running engine. Each engine has another name, so that a router notices a restart."""
        self.pid: int | None = None
        self.stats = EngineStats()
        self._streams: dict[int, ResponseStream] = {}
        self._snapshot_waiters: list[asyncio.Future[bytes]] = []
        self._pool_waiters: list[tuple[int, asyncio.Future[PoolState]]] = []
        self._resizes = 0
        self._adapter_waiters: dict[int, asyncio.Future[str]] = {}
        self._adapter_changes = 0
        self._writer: asyncio.StreamWriter | None = None
        self._closing = asyncio.Event()
        self._next_id = 0
        self.on_progress: Callable[[RequestProgress], None] = lambda progress: None
        self.on_delta: Callable[[Delta], None] | None = None
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    def require_ready(self) -> Ready:
        """Return the engine's Ready message. Raises ApiError while no engine is ready."""
        if not self.is_ready or self.info is None:
            raise engine_loading()
        return self.info

    @property
    def has_open(self) -> bool:
        """Whether there are prompts whose answers are not complete."""
        return bool(self._streams)

    def new_ids(self, count: int) -> list[int]:
        """Return ids for `count` prompts."""
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))

    def submit(self, messages: Iterable[Add], stream: ResponseStream) -> None:
        """Send prompts to the engine. `stream` receives their deltas."""
        self.require_ready()
        for message in messages:
            self._streams[message.id] = stream
            self._send(message)

    def cancel(self, stream: ResponseStream) -> None:
        """Cancel the pending prompts of a stream. The engine releases their pages."""
        for id_ in stream.pending:
            if self._streams.pop(id_, None) is not None:
                self._send(Cancel(id_))
        stream.pending.clear()

    def expect_session(self, tenant: str, session: str) -> None:
        """Announce that a session will soon send a request, so that the engine can prefetch its pages."""
        self._send(ExpectSession(tenant, session))

    def end_session(self, tenant: str, session: str) -> None:
        """Announce that a session is over."""
        self._send(EndSession(tenant, session))

    @property
    def role(self) -> Role:
        """The role of the worker. A restarted engine keeps the role."""
        return cast(Role, self.start.settings.get("role", "both"))

    def set_role(self, role: Role) -> None:
        """Change the role. Raises ApiError for a role that this worker cannot have."""
        if "encode" in (role, self.role) and role != self.role:
            raise bad_request(
                f"the role cannot change from {self.role} to {role}: an encode worker loads only the image part of "
                "its model; start another worker",
                "role",
            )
        if role == "prefill" and self.require_ready().peer_address is None:
            raise bad_request(
                "role prefill needs host memory that decode workers can read: start the server with "
                "--tier host:SIZE?share=HOST:PORT",
                "role",
            )
        self.start = msgspec.structs.replace(self.start, settings={**self.start.settings, "role": role})
        self._send(SetRole(role))

    async def snapshot(self, seconds: float) -> bytes:
        """Return a snapshot of the cache as JSON. Raises ApiError if no engine is ready, and TimeoutError after
        `seconds`.
        """
        self.require_ready()
        if self.role == "encode":
            raise bad_request("an encode worker has no page pool: its counters are at /metrics")
        answer = asyncio.get_running_loop().create_future()
        self._snapshot_waiters.append(answer)
        self._send(SnapshotRequest())
        return await asyncio.wait_for(answer, seconds)

    async def resize_pool(self, pool_bytes: int, seconds: float | None) -> PoolState:
        """Grow or shrink an elastic pool to `pool_bytes`. Return its current size and target size. The pool may reach
        the target later, when requests have finished.

        Raises ApiError if no engine is ready, and TimeoutError after `seconds`. If `seconds` is None, waits until the
        engine answers or dies.
        """
        self.require_ready()
        answer: asyncio.Future[PoolState] = asyncio.get_running_loop().create_future()
        self._resizes += 1
        self._pool_waiters.append((self._resizes, answer))
        self._send(ResizePool(pool_bytes, self._resizes, self.start.share_bytes))
        return await asyncio.wait_for(answer, seconds)

    async def change_adapter(self, name: str, path: str | None, replace: bool, seconds: float) -> str:
        """Load a LoRA adapter from the folder `path`. With `replace`, it may replace a loaded adapter of the same name.
        If `path` is None, unload the adapter. Return the engine's error, or "" on success. A restarted engine has the
        same adapters.

        Raises ApiError if no engine is ready, and TimeoutError after `seconds`.
        """
        self.require_ready()
        self._adapter_changes += 1
        number = self._adapter_changes
        answer = self._adapter_waiters[number] = asyncio.get_running_loop().create_future()
        self._send(UnloadAdapter(name, number) if path is None else LoadAdapter(name, path, replace, number))
        try:
            return await asyncio.wait_for(answer, seconds)
        finally:
            self._adapter_waiters.pop(number, None)

    def _record_adapters(self, answer: AdapterAnswer) -> None:
        """Store the list of adapters in an answer of the engine, so that a restarted engine loads them again. Also
        passes the result to the `change_adapter` call that waits for this answer.
        """
        assert self.info is not None
        self.info = msgspec.structs.replace(self.info, adapters=answer.adapters)
        settings = {
            **self.start.settings,
            "lora": {one.name: one.path for one in answer.adapters},
            "max_loras": self.info.adapter_slots,
            "max_lora_rank": self.info.adapter_rank,
        }
        self.start = msgspec.structs.replace(self.start, settings=settings)
        waiter = self._adapter_waiters.get(answer.number)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer.error)

    def close(self) -> None:
        """End the engine process. Afterwards `run` returns."""
        self._closing.set()
        if self._writer is not None:
            self._writer.close()

    def fail_all(self, error: ApiError) -> None:
        """End every open stream with `error`. Every wait for a snapshot, a pool resize or an adapter change also ends
        with this error."""
        for stream in {id(one): one for one in self._streams.values()}.values():
            stream.pending.clear()
            stream.fail(error)
        self._streams.clear()
        waiters: list[asyncio.Future[Any]] = [
            *self._snapshot_waiters,
            *(answer for _, answer in self._pool_waiters),
            *self._adapter_waiters.values(),
        ]
        self._snapshot_waiters, self._pool_waiters, self._adapter_waiters = [], [], {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    async def run(self) -> None:
        """Keep an engine running until `close`. Raises StartError if the first start fails."""
        backoff = Backoff()
        while not self._closing.is_set():
            why = await self._run_engine()
            if self._closing.is_set():
                return
            if self.info is None:
                raise StartError(f"engine {why}")
            pause = backoff.pause(time.monotonic())
            self._log(f"engine {why}; restarting in {pause:.2g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause)
            self.restarts += 1

    async def _run_engine(self) -> str:
        """Run one engine process until it ends. Return the reason why it ended."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        with theirs:
            fd = theirs.fileno()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvloom.serve.worker.engine_process", str(fd)), pass_fds=[fd], stdout=STDERR,
                env={**ENGINE_ENVIRONMENT, **os.environ},
            )  # fmt: skip
        self.pid = process.pid
        reader, self._writer = await asyncio.open_connection(sock=ours)
        if self._closing.is_set():
            self._writer.close()
        failure = hung = ""
        watchdog = Watchdog(self._limits)

        async def watch() -> None:
            nonlocal hung
            last = time.monotonic()
            while not hung:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                now = time.monotonic()
                hung, last = watchdog.tick(now - last) or "", now
            with suppress(ProcessLookupError):
                process.kill()  # closes the socket, so that reading below ends

        watching = asyncio.create_task(watch())
        try:
            self._send(self.start if self.info is None else _restart(self.start, self.info))
            while not failure:
                header = await reader.readexactly(HEADER_BYTES)
                message = self._decoder.decode(await reader.readexactly(body_length(header)))
                watchdog.received(message)
                failure = self._handle(message)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            watching.cancel()
            self.is_ready = False
            self._writer.close()
            self._writer = None
            self.fail_all(engine_died(hung))  # requests fail now, because the process may take seconds to end
            try:
                code = await asyncio.wait_for(process.wait(), 5)
            except TimeoutError:
                process.kill()
                code = await process.wait()
        if hung:
            return f"was killed because it {hung}"
        return failure or (f"died by signal {-code}" if code < 0 else f"exited with code {code}")

    def _handle(self, message: FromEngine) -> str:
        """Handle a message of the engine process. Return the reason if the engine cannot be used, else ""."""
        if isinstance(message, Outputs):
            self._deliver(message)
            return ""
        if isinstance(message, StartFailed):
            return f"cannot start: {message.reason}"
        if isinstance(message, Heartbeat):
            return ""
        self.info, self.is_ready, self.stats = message, True, EngineStats()
        self.instance = secrets.token_hex(8)
        self._on_ready(message)
        return ""

    def _deliver(self, outputs: Outputs) -> None:
        for progress in outputs.progress:  # progress of a prompt comes before the deltas of the prompt
            self.on_progress(progress)
        for delta in outputs.deltas:
            stream = self._streams.get(delta.id)
            if stream is not None:
                if self.on_delta is not None:
                    self.on_delta(delta)
                stream.put(delta)
                if delta.id not in stream.pending:
                    del self._streams[delta.id]
        for rejected in outputs.rejected:
            stream = self._streams.pop(rejected.id, None)
            if stream is not None:
                stream.pending.discard(rejected.id)
                error = self._explain(rejected.reason)
                if rejected.slo is not None:
                    error = slo_not_met(rejected.reason, rejected.slo)
                elif rejected.is_retryable:
                    error = grammars_busy(rejected.reason, error.param)
                stream.fail(error)
        if outputs.stats is not None:
            self.stats = outputs.stats
        if outputs.pool is not None and self.info is not None:
            pool = outputs.pool
            resizes = [answer for number, answer in self._pool_waiters if number <= pool.number]
            self._pool_waiters = [waiter for waiter in self._pool_waiters if waiter[0] > pool.number]
            self.info = msgspec.structs.replace(
                self.info, pool_bytes=pool.pool_bytes, max_tokens=pool.max_tokens
            )
            slabs = pool.pool_bytes // self.info.slab_bytes
            self.stats = msgspec.structs.replace(
                self.stats, slabs=slabs
            )  # so that sums over all engines stay exact
            for resize in resizes:
                if not resize.done():
                    resize.set_result(pool)
        for answered in outputs.adapters:
            self._record_adapters(answered)
        if outputs.snapshot is not None:
            waiters, self._snapshot_waiters = self._snapshot_waiters, []
            for snapshot in waiters:
                if not snapshot.done():
                    snapshot.set_result(outputs.snapshot)

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))


def _restart(start: Start, before: Ready) -> Start:
    """Return the start options for a restart. `before` is the Ready message of the engine that has died.

    All tiers become optional, so that the engine starts even if a tier is unavailable. Adapters whose folders are gone
    are left out. A pool that shares memory with other pools starts with its last size, because other pools may use the
    rest of the memory.
    """
    settings = {
        **start.settings,
        "tiers": [mark_optional(tier) for tier in start.settings.get("tiers", ())],
    }
    if before.adapter_slots:
        there = (one for one in before.adapters if (Path(one.path) / "adapter_config.json").is_file())
        settings |= {
            "lora": {one.name: one.path for one in there},
            "max_loras": before.adapter_slots,
            "max_lora_rank": before.adapter_rank,
        }
    if start.share_bytes is not None:
        least = min(settings["min_pool_bytes"], before.pool_bytes)
        settings |= {"pool_bytes": before.pool_bytes, "min_pool_bytes": least}
    return msgspec.structs.replace(start, settings=settings)

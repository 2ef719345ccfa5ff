"""The engine's process: loads the model, then steps while there is work. `python -m kvloom.serve.worker.engine_process FD`.

FD is its end of a pair of sockets; the first message says what to load. A thread reads: when the other end closes, the process
ends at once, whatever it is doing, so that no engine outlives its server; with tiers below, a few seconds later, for what they
are still to store. Another beats, so that the server sees an engine
that hangs. Signals that are meant for the server are ignored.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from .messages import (
    HEADER_BYTES,
    Add,
    Beat,
    Cancel,
    EndSession,
    ExpectSession,
    Failed,
    FromEngine,
    Look,
    Ready,
    Start,
    ToEngine,
    frame,
    length_of,
)
from .watchdog import BEAT_SECONDS

if TYPE_CHECKING:
    from kvloom.engine import Engine, OffloadManager

    from .worker import Worker

__all__ = ["load_engine", "main"]

Inbox = SimpleQueue[Add | Cancel | ExpectSession | EndSession | Look | None]
"""None: the server is gone."""
GRAMMAR_SECONDS = 0.005
"""How often grammars that compile are looked after while nothing else is to do."""
IDLE_SECONDS = 0.5
"""How often tiers are looked after while nothing else is to do."""
GOODBYE = 4.0
"""Seconds that tiers have to store what is on its way when the server ends."""
_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def main(fd: int) -> None:
    """Serve the other end of socket `fd` until it closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=fd)
    start = _receive(link)
    assert isinstance(start, Start), f"the first message must be Start, not {start!r}"
    inbox: Inbox = SimpleQueue()
    outbox = _Outbox(link)
    grace = GOODBYE if start.tiers else 0.0
    threading.Thread(target=_read, args=(link, inbox, grace), daemon=True).start()
    threading.Thread(target=outbox.beat, daemon=True).start()
    from kvloom.models.reading import ModelError

    try:
        worker, ready = _loaded(start)
    except (ModelError, ValueError, OSError) as error:
        outbox.send(Failed(str(error)))
        return
    gc.collect()
    gc.freeze()  # what is there now stays: to look through all of it for garbage would stop everybody for 0.2 s
    outbox.send(ready)
    _serve(outbox, inbox, worker)


class _Outbox:
    """What goes to the server: messages of the engine's own thread, and beats between them. `step` is the one that runs."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lock = link, threading.Lock()
        self.step = 0

    def send(self, message: FromEngine) -> None:
        data = frame(message)
        with self._lock:
            self._link.sendall(data)

    def beat(self) -> None:
        """Beat until the server is gone."""
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self.send(Beat(self.step))
            except OSError:
                return


def load_engine(start: Start) -> Engine:
    """The engine that `start` describes; minutes, for a large model."""
    from kvloom.core import Tenant
    from kvloom.engine import Engine, EngineConfig, GrammarLimits, use_threads
    from kvloom.models.load import device_of, load

    device = device_of(start.device)
    use_threads(start.threads)
    model, tokenizer = load(
        start.model,
        start.cpu_dtype if start.dtype == "auto" and device.type == "cpu" else start.dtype,
        device,
        load_format=start.load_format,
        progress=start.progress,
    )
    config = EngineConfig(
        pool_bytes=start.pool_bytes,
        memory_fraction=start.memory_fraction,
        token_budget=start.token_budget,
        max_running=start.max_running,
        kv_dtype=start.kv_dtype,
        kv_scales=start.kv_scales,
        batch_invariant=start.batch_invariant,
        tenants=[Tenant(t.name, t.quota, t.weight, t.firm) for t in start.tenants],
        tiers=start.tiers,
        grammar_limits=GrammarLimits(start.grammar_seconds, start.grammar_memory),
    )
    engine = Engine(model, config, tokenizer)
    _prepare(engine, start.progress)
    return engine


def _prepare(engine: Engine, progress: bool) -> None:
    """Compile kernels and capture graphs now, on a GPU, rather than while users wait."""
    if not progress or engine.device.type != "cuda":
        engine.prepare()
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("compiling and capturing steps", total=None)
        engine.prepare(lambda done, total: bars.update(task, completed=done, total=total))


def _loaded(start: Start) -> tuple[Worker, Ready]:
    from .worker import Worker

    began = time.monotonic()
    engine = load_engine(start)
    layout, cache = engine.layout, engine.cache
    slabs = cache.pool.slabs - 1
    quotas = {t.name: min(t.quota, slabs * layout.slab_bytes) for t in start.tenants if t.quota is not None}
    ready = Ready(
        device=str(engine.device),
        dtype=str(next(engine.model.parameters()).dtype).removeprefix("torch."),
        vocabulary=len(engine.model.get_input_embeddings().weight),
        longest=_longest(engine, slabs * layout.slab_bytes),
        tenants_longest={name: _longest(engine, quota) for name, quota in quotas.items()},
        pool_bytes=slabs * layout.slab_bytes,
        slab_bytes=layout.slab_bytes,
        block_tokens=layout.block_tokens,
        bytes_per_token=layout.bytes_per_token(),
        layout=layout.table(),
        seconds=time.monotonic() - began,
        tiers=[] if engine.offload is None else _tiers(engine.offload),
        left_out=[] if engine.offload is None else engine.offload.unavailable,
    )
    return Worker(engine, start.tenants, start.observe), ready


def _tiers(lower: OffloadManager) -> list[tuple[str, int, int]]:
    found = [lower.host, *(lane.tier for lane in lower.transfers.lanes if lane.tier.capacity)]
    return [(tier.name, tier.capacity, tier.stats().objects) for tier in found]


def _longest(engine: Engine, pool_bytes: int) -> int:
    """The most tokens that one request can have: what the model takes, and what the pool holds."""
    low, high = 1, engine.cache.max_tokens
    while low < high:
        middle = (low + high + 1) // 2
        fits = engine.layout.slab_bytes_for(middle) <= pool_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _serve(outbox: _Outbox, inbox: Inbox, worker: Worker) -> None:
    for step in count(1):
        if not worker.busy:
            outbox.step = 0
            pause = None if worker.engine.offload is None else IDLE_SECONDS
            try:
                first = inbox.get(timeout=GRAMMAR_SECONDS if worker.compiling else pause)
            except Empty:
                worker.look_below()
                continue
            outbox.step = step
            _take(worker, first)
        outbox.step = step
        with suppress(Empty):
            while True:
                _take(worker, inbox.get_nowait())
        outputs = worker.step()
        if outputs is not None:
            outbox.send(outputs)


def _take(worker: Worker, message: Add | Cancel | ExpectSession | EndSession | Look | None) -> None:
    if message is None:
        worker.engine.close(GOODBYE - 0.5)
        os._exit(0)
    worker.take(message)


def _read(link: socket.socket, inbox: Inbox, grace: float) -> None:
    try:
        while True:
            message = _receive(link)
            assert not isinstance(message, Start)
            inbox.put(message)
    except (EOFError, OSError):
        if grace:  # what tiers are still to get
            inbox.put(None)
            time.sleep(grace)
        os._exit(0)  # the server is gone; there is nothing else that must be saved
    finally:
        traceback.print_exc()
        os._exit(1)


def _receive(link: socket.socket) -> Any:
    return _decoder.decode(_exactly(link, length_of(bytes(_exactly(link, HEADER_BYTES)))))


def _exactly(link: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = link.recv_into(view)
        if not got:
            raise EOFError("the other end is closed")
        view = view[got:]
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""The engine's process: loads the model, then steps while there is work. `python -m kvloom.serve.engine_process FD`.

FD is its end of a pair of sockets; the first message says what to load. A thread reads: when the other end closes, the process
ends at once, whatever it is doing, so that no engine outlives its server. Signals that are meant for the server are ignored.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from .messages import HEADER_BYTES, Add, Cancel, EndSession, Failed, Ready, Start, ToEngine, frame, length_of

if TYPE_CHECKING:
    from kvloom.engine.engine import Engine

    from .worker import Worker

__all__ = ["load_engine", "main"]

Inbox = SimpleQueue[Add | Cancel | EndSession]
_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def main(fd: int) -> None:
    """Serve the other end of socket `fd` until it closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=fd)
    start = _receive(link)
    assert isinstance(start, Start), f"the first message must be Start, not {start!r}"
    inbox: Inbox = SimpleQueue()
    threading.Thread(target=_read, args=(link, inbox), daemon=True).start()
    from kvloom.models.reading import ModelError

    try:
        worker, ready = _loaded(start)
    except (ModelError, ValueError, OSError) as error:
        link.sendall(frame(Failed(str(error))))
        return
    link.sendall(frame(ready))
    _serve(link, inbox, worker)


def load_engine(start: Start) -> Engine:
    """The engine that `start` describes; minutes, for a large model."""
    import torch

    from kvloom.core import Tenant
    from kvloom.engine.engine import Engine
    from kvloom.models.load import load

    device = torch.device(start.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"there is no device {start.device!r} here: torch sees {torch.cuda.device_count()} GPUs"
        )
    if start.threads is not None or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(start.threads or max(1, len(os.sched_getaffinity(0)) - 1))
    model, tokenizer = load(
        start.model,
        start.cpu_dtype if start.dtype == "auto" and device.type == "cpu" else start.dtype,
        device,
        load_format="random" if start.random_weights else "auto",
        progress=start.progress,
    )
    engine = Engine(
        model,
        start.pool_bytes,
        start.kv_dtype,
        token_budget=start.token_budget,
        max_running=start.max_running,
        tokenizer=tokenizer,
        memory_fraction=start.memory_fraction,
        kv_scales=start.kv_scales,
        tenants=[Tenant(tenant.name, tenant.quota, tenant.weight) for tenant in start.tenants],
    )
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
    )
    return Worker(engine, start.tenants, start.observe), ready


def _longest(engine: Engine, pool_bytes: int) -> int:
    """The most tokens that one request can have: what the model takes, and what the pool holds."""
    low, high = 1, engine.cache.max_tokens
    while low < high:
        middle = (low + high + 1) // 2
        fits = engine.layout.slab_bytes_for(middle) <= pool_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _serve(link: socket.socket, inbox: Inbox, worker: Worker) -> None:
    while True:
        try:
            while True:
                worker.take(inbox.get_nowait() if worker.busy else inbox.get())
        except Empty:
            pass
        outputs = worker.step()
        if outputs is not None:
            link.sendall(frame(outputs))


def _read(link: socket.socket, inbox: Inbox) -> None:
    try:
        while True:
            message = _receive(link)
            assert not isinstance(message, Start)
            inbox.put(message)
    except (EOFError, OSError):
        os._exit(0)  # the server is gone; there is nothing here that must be saved
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

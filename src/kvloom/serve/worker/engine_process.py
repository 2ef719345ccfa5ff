"""The engine process: loads the model, then runs steps. Started as `python -m
kvloom.serve.worker.engine_process FD`.

FD is one end of a socket pair. The first message is Start. One thread reads messages, and another sends
heartbeats. When the API process closes the socket, this process exits. If it has tiers, it first finishes
pending stores, for up to CLOSE_SECONDS. The process ignores SIGINT and SIGTERM, which are meant for the API
process.
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
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from kvloom.serve.logs import configure_logging

from .messages import (
    HEADER_BYTES,
    FromEngine,
    GroupInfo,
    Heartbeat,
    Ready,
    Start,
    StartFailed,
    ToEngine,
    body_length,
    frame,
)
from .watchdog import HEARTBEAT_SECONDS

if TYPE_CHECKING:
    from kvloom.engine import Engine, OffloadManager

    from .encode_worker import EncodeWorker
    from .worker import Worker

__all__ = ["load_engine", "main"]

Inbox = SimpleQueue[ToEngine | None]
"""A queue of messages. None means that the API process has closed the socket."""
PREPARE_SECONDS = 0.005
"""Seconds between two polls of an idle engine while requests wait for images or grammars, or adapters are being loaded.
"""
IDLE_SECONDS = 0.5
"""Seconds between two polls of an idle engine that has tiers, an elastic pool or events."""
CLOSE_SECONDS = 4.0
"""Seconds in which tiers must finish pending stores when the server ends."""
_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def main(fd: int) -> None:
    """Serve requests from socket `fd` until the other end closes it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=fd)
    start = _receive(link)
    assert isinstance(start, Start), f"the first message must be Start, got {start!r}"
    configure_logging(start.log_level, start.log_format)
    inbox: Inbox = SimpleQueue()
    sender = _Sender(link)
    grace = CLOSE_SECONDS if start.settings.get("tiers") else 0.0
    threading.Thread(target=_read_messages, args=(link, inbox, grace), daemon=True).start()
    threading.Thread(target=sender.send_heartbeats, daemon=True).start()
    from kvloom.models.specs import ModelError

    is_encoder = start.settings.get("role") == "encode"
    try:
        worker, ready = _load_encode_worker(start) if is_encoder else _load_worker(start)
    except (ModelError, ValueError, OSError) as error:
        sender.send(StartFailed(str(error)))
        return
    gc.collect()
    gc.freeze()  # loaded objects stay: scanning them would stop all requests for 0.2 s
    sender.send(ready)
    _serve(sender, inbox, worker)


class _Sender:
    """Sends the messages of the engine thread, and heartbeats from another thread. `step` is the number of the running
    step, for the heartbeats."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lock = link, threading.Lock()
        self.step = 0

    def send(self, message: FromEngine) -> None:
        data = frame(message)
        with self._lock:
            self._link.sendall(data)

    def send_heartbeats(self) -> None:
        """Send heartbeats until the socket closes."""
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            try:
                self.send(Heartbeat(self.step))
            except OSError:
                return


def load_engine(start: Start) -> Engine:
    """Load the engine that `start` describes. Takes minutes for a large model."""
    from kvloom.core import Objective, Tenant
    from kvloom.engine import Engine, engine_config, load_ranks, opened_tiers, use_threads
    from kvloom.models.loading import choose_device

    device = choose_device(start.device)
    use_threads(start.threads)
    tenants = [
        Tenant(t.name, t.quota, t.weight, t.firm, Objective(t.slo_ttft, t.slo_tbt)) for t in start.tenants
    ]
    config = engine_config(**start.settings, tenants=tenants)
    with opened_tiers(
        config.tiers
    ) as tiers:  # errors of tiers are reported before the model loads, which may take minutes
        model, tokenizer, group = load_ranks(
            start.model,
            config,
            start.cpu_dtype if start.dtype == "auto" and device.type == "cpu" else start.dtype,
            device,
            load_format=start.load_format,
            progress=start.progress,
            threads=start.threads,
        )
    config = replace(config, tiers=tiers)
    engine = Engine(model, config, tokenizer, group)
    if group is not None:
        group.on_failure = _exit
    _warm_up(engine, start.progress)
    return engine


def _exit(reason: str) -> None:
    """End the process because another rank (process) of the model has stopped. The API process then starts a new
    engine."""
    print(f"ranks: {reason}; the engine restarts", file=sys.stderr, flush=True)
    os._exit(1)


def _warm_up(engine: Engine, progress: bool) -> None:
    """Compile kernels and capture CUDA graphs before the first request. With `progress`, show a progress bar."""
    if not progress or engine.device.type != "cuda":
        engine.prepare()
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("compiling and capturing steps", total=None)
        engine.prepare(lambda done, total: bars.update(task, completed=done, total=total))


def _load_worker(start: Start) -> tuple[Worker, Ready]:
    from .adapter_loads import adapter_infos
    from .image_prompts import ImagePrompts
    from .worker import Worker, max_request_tokens

    began = time.monotonic()
    engine = load_engine(start)
    layout, cache, size = engine.layout, engine.cache, engine.pool_size
    slabs = cache.usable_slabs
    quotas = {t.name: min(t.quota, slabs * layout.slab_bytes) for t in start.tenants if t.quota is not None}
    images = None if engine.vision is None else ImagePrompts(start.model, engine.vision)
    worker = Worker(engine, start.tenants, start.observe, start.share_bytes, images, start.stream_interval)
    ready = Ready(
        device=str(engine.device),
        dtype=str(next(engine.model.parameters()).dtype).removeprefix("torch."),
        vocab_size=len(engine.model.get_input_embeddings().weight),
        max_tokens=worker.max_tokens,
        tenant_max_tokens={name: max_request_tokens(engine, quota, name) for name, quota in quotas.items()},
        pool_bytes=slabs * layout.slab_bytes,
        slab_bytes=layout.slab_bytes,
        block_tokens=layout.block_tokens,
        bytes_per_token=layout.bytes_per_token(),
        layout=layout.table(),
        load_seconds=time.monotonic() - began,
        tiers=[] if engine.offload is None else _tiers(engine.offload),
        unavailable_tiers=[] if engine.offload is None else engine.offload.unavailable,
        pool_limits=None if size is None else (size.least * layout.slab_bytes, size.most * layout.slab_bytes),
        image_refusal=_image_refusal(engine),
        audio_refusal=_audio_refusal(engine),
        hash_model=cache.model,
        peer_address=engine.peer_address,
        groups=[
            GroupInfo(g.index, g.spec.kind, g.spec.visibility.size)
            for g in layout.groups
            if g.spec.axis == "text" and g.spec.lifetime == "target"
        ],
        max_context=cache.max_tokens,
        token_budget=engine.scheduler.token_budget,
        adapters=adapter_infos(engine),
        adapter_slots=0 if engine.adapters is None else engine.adapters.slots.count,
        adapter_rank=0 if engine.adapters is None else engine.adapters.slots.rank,
        encoder_tokens=engine.encoder_tokens,
        decoder_tokens=engine.decoder_tokens,
        defaults=engine.defaults,
    )
    return worker, ready


def _load_encode_worker(start: Start) -> tuple[EncodeWorker, Ready]:
    from .encode_worker import load_encode_worker

    return load_encode_worker(start)


def _image_refusal(engine: Engine) -> str:
    """Return the reason why the model accepts no images, or ""."""
    from kvloom.models.vision import Vision

    reason = Vision.refusal(engine.model)
    if reason is not None or engine.vision is None:
        return reason or "its image part is not loaded"
    return "" if find_spec("PIL") else "Pillow is not installed (pip install kvloom[vision])"


def _audio_refusal(engine: Engine) -> str:
    """Return the reason why the model accepts no audio, or ""."""
    from kvloom.models.vision import Vision

    reason = Vision.refusal(engine.model, "audio")
    return reason or ("its audio part is not loaded" if engine.vision is None else "")


def _tiers(offload: OffloadManager) -> list[tuple[str, int, int]]:
    found = [offload.host, *(lane.tier for lane in offload.transfers.queues if lane.tier.capacity)]
    return [(tier.name, tier.capacity, tier.stats().objects) for tier in found]


def _serve(sender: _Sender, inbox: Inbox, worker: Worker | EncodeWorker) -> None:
    for step in count(1):
        if not worker.is_busy:
            sender.step = 0
            pause = IDLE_SECONDS if worker.needs_polling else None
            try:
                first = inbox.get(timeout=PREPARE_SECONDS if worker.is_preparing else pause)
            except Empty:
                worker.poll_idle()
                continue
            sender.step = step
            _handle(worker, first)
        sender.step = step
        with suppress(Empty):
            while True:
                _handle(worker, inbox.get_nowait())
        outputs = worker.step()
        if outputs is not None:
            sender.send(outputs)


def _handle(
    worker: Worker | EncodeWorker,
    message: ToEngine | None,
) -> None:
    if message is None:
        worker.close(CLOSE_SECONDS - 0.5)
        os._exit(0)
    worker.handle(message)


def _read_messages(link: socket.socket, inbox: Inbox, grace: float) -> None:
    try:
        while True:
            message = _receive(link)
            assert not isinstance(message, Start)
            inbox.put(message)
    except (EOFError, OSError):
        if grace:  # for pending stores
            inbox.put(None)
            time.sleep(grace)
        os._exit(0)  # the API process is gone; nothing else needs saving
    finally:
        traceback.print_exc()
        os._exit(1)


def _receive(link: socket.socket) -> Any:
    return _decoder.decode(_receive_exactly(link, body_length(bytes(_receive_exactly(link, HEADER_BYTES)))))


def _receive_exactly(link: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = link.recv_into(view)
        if not got:
            raise EOFError("the socket is closed")
        view = view[got:]
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]))

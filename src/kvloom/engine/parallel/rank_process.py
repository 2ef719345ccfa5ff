"""The process of a rank: loads its part of the model, then repeats the steps of rank 0. Started as
`python -m kvloom.engine.parallel.rank_process SOCKET MEMORY`.

SOCKET and MEMORY are file descriptors: one end of a socket pair, and the memory of the step channel. The first message
is RankStart. When rank 0 closes the socket, this process exits at once. It ignores signals that are meant for rank 0.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from kvloom.engine.adapter_table import open_adapters
from kvloom.engine.config import engine_config
from kvloom.engine.execution import KVMemory, ModelRunner, allocate_kv_memory, use_threads
from kvloom.engine.speculation import load_head
from kvloom.engine.target_runner import target_runner, with_step_sizes
from kvloom.kernels.copy import copy_pages
from kvloom.models.loading import load
from kvloom.models.paged import TokenMover
from kvloom.models.sharding import RankGroups
from kvloom.models.specs import ModelError

from .frames import receive_frame, receive_length, send_frame
from .host_copies import RankHost
from .messages import (
    Copied,
    CopyDocument,
    CopyHost,
    CopyPages,
    Failed,
    FromRank,
    LoadAdapter,
    MoveTokens,
    RankStart,
    Ready,
    SetSinks,
    ShareHost,
    Started,
    Step,
    StepReader,
    ToRank,
)
from .rank_adapters import RankAdapters
from .rank_documents import RankDocuments
from .step_channel import StepChannel

__all__ = ["main"]

_sending = threading.Lock()
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


def main(fd: int, memory: int) -> None:
    """Repeat the steps of rank 0 until it closes socket `fd`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=fd)
    start = msgspec.msgpack.decode(receive_frame(link), type=RankStart)
    try:
        kv, runner, adapters, ranks = _load(link, start)
        channel = StepChannel(memory, start.count)
        os.close(memory)
        gc.collect()
        gc.freeze()
        _send(link, Ready(str(kv.layout.table()), kv.cache.usable_slabs))
        ranks.limit(float(start.settings["rank_seconds"]))
        _serve(link, channel, ranks, kv, runner, adapters)
    except EOFError:
        os._exit(0)  # rank 0 is gone; nothing needs saving
    except Exception as error:  # noqa: BLE001 - rank 0 reports every error
        _fail(link, error)


def _fail(link: socket.socket, error: Exception) -> None:
    """Report an error to rank 0 and end this process."""
    is_refusal = isinstance(error, ModelError | ValueError)
    if not is_refusal:
        traceback.print_exception(error)
    with suppress(OSError):
        _send(link, Failed(str(error), is_refusal))
    os._exit(1)


def _load(link: socket.socket, start: RankStart) -> tuple[KVMemory, ModelRunner, RankAdapters, RankGroups]:
    device = torch.device(start.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    use_threads(start.threads)
    config = with_step_sizes(engine_config(**start.settings), device.type == "cuda")
    _send(link, Started())
    parts = config.tensor_parallel, config.context_parallel
    use_gloo = config.rank_backend == "gloo"
    ranks = RankGroups.connect(start.rank, *parts, Path(start.meeting), device, use_gloo)
    load_format: Any = start.load_format
    model, _ = load(
        start.model,
        start.dtype,
        device,
        load_format,
        ranks=ranks,
        whole_output=bool(config.head),
        text_only=config.text_only,
        expert_parallel=config.expert_parallel,
    )
    # Only rank 0 runs the head, but the pools of all ranks have its pages.
    head = load_head(config.head, model) if config.head else None
    table = open_adapters(model, config)
    slots = None if table is None else table.slots
    kv = allocate_kv_memory(model, config, head, slots)
    return kv, target_runner(model, kv, config, slots), RankAdapters(slots), ranks


def _serve(
    link: socket.socket,
    channel: StepChannel,
    ranks: RankGroups,
    kv: KVMemory,
    runner: ModelRunner,
    adapters: RankAdapters,
) -> None:
    reader, mover = StepReader(kv.cache), TokenMover(kv.cache, kv.buffer, ranks.context)
    documents = RankDocuments(kv.cache, runner, ranks)
    host = RankHost(
        kv.layout,
        kv.buffer,
        ranks.weight_shard,
        lambda number: _send(link, Copied(number)),
        lambda error: _fail(link, error),
    )
    while True:
        message = _decoder.decode(channel.read(receive_length(link), ranks.every.shard.rank))
        if isinstance(message, Step):
            runner.run(reader.read(message), message.wanted, message.whole, message.pooled)
        elif isinstance(message, CopyPages):
            copy_pages(kv.buffer, message.page_stride, *message.page_ids)
        elif isinstance(message, MoveTokens):
            mover.move(message.read())
        elif isinstance(message, CopyDocument | SetSinks):
            documents.run(message)
        elif isinstance(message, ShareHost | CopyHost):
            host.run(message)
        elif isinstance(message, LoadAdapter):
            adapters.run(message)
        else:
            runner.capture()


def _send(link: socket.socket, message: FromRank) -> None:
    with _sending:
        send_frame(link, _encoder.encode(message))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""The ranks of an engine, as rank 0 sees them. Starts a process for each other rank, and sends it every
step.

    RankGroup(…)  start the processes      connect()  ranks can add up tensors     attach(…)  steps are sent

If a rank stops, the next call raises RankError. A rank ends when rank 0 closes its socket, also if rank 0 crashes.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence as Many
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvloom.combinations import refused
from kvloom.core import CopyBatch, KVCache
from kvloom.engine.config import EngineConfig
from kvloom.engine.execution import ModelRunner
from kvloom.models.loading import LoadFormat, check_ranks, load
from kvloom.models.lora import LoraAdapter
from kvloom.models.paged import RotatedCopy, Work
from kvloom.models.sharding import RankError, RankGroups

from .frames import receive_frame, send_frame, send_length
from .host_copies import HostCopies
from .messages import (
    Copied,
    CopyDocument,
    CopyPages,
    Failed,
    FromRank,
    MoveTokens,
    Prepare,
    RankStart,
    Ready,
    SetSinks,
    Started,
    StepWriter,
    ToRank,
)
from .rank_adapters import adapter_messages
from .step_channel import StepChannel, create_memory

__all__ = ["DraftMirror", "RankGroup", "load_ranks"]

SETTINGS = (
    *("pool_bytes", "memory_fraction", "tensor_parallel", "context_parallel", "rank_seconds"),
    *("rank_backend", "expert_parallel"),
    *("block_tokens", "checkpoint_every"),
    *("token_budget", "max_running", "max_context", "kv_dtype", "cuda_graphs", "speculate", "draft_tokens"),
    *("kv_scales", "text_only"),
    *("lora", "max_loras", "max_lora_rank", "lora_targets"),
)
"""Settings that every rank must know."""
MIN_PAGE_TOKENS = 16
"""Smallest number of tokens of a page that GPU kernels can read."""
START_SECONDS = 1800.0
"""Longest time until a rank has loaded its weights, in seconds."""
CLOSE_SECONDS = 5.0
Message = TypeVar("Message", Started, Ready)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def _plain(value: Any) -> Any:
    """Return the value of a setting for a message. Paths become strings."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def rank_device(device: torch.device, rank: int, use_gloo: bool = False) -> torch.device:
    """Return the device of a rank. If rank 0 uses GPU n (`device`), rank r uses GPU n + r. With gloo, ranks
    share GPUs if there are too few: after the last GPU, ranks start again with GPU n."""
    if device.type == "cpu":
        return device
    first = device.index or 0
    if use_gloo:
        rank %= max(1, torch.cuda.device_count() - first)
    return torch.device(device.type, first + rank)


def _check_gpus(config: EngineConfig, device: torch.device, gpus: int) -> None:
    """Raise ValueError if the ranks of an engine cannot run on GPUs from `device` on. `gpus` is the number of all
    GPUs."""
    count, parts = config.rank_count, config.context_parallel
    if parts > 1 and config.block_tokens // parts < MIN_PAGE_TOKENS:
        raise ValueError(
            refused("context parallel, small pages", count=parts, tokens=config.block_tokens // parts)
        )
    if parts > 1 and config.tree_nodes:
        raise ValueError(refused("context parallel, tree", count=parts))
    if config.rank_backend != "gloo" and (device.index or 0) + count > gpus:
        raise ValueError(
            f"{count} ranks need {count} GPUs, and torch sees {gpus}: use fewer ranks, or rank_backend gloo, with which "
            "ranks share a GPU"
        )


def load_ranks(
    model: str,
    config: EngineConfig,
    dtype: torch.dtype | str,
    device: torch.device,
    load_format: LoadFormat = "auto",
    progress: bool = False,
    threads: int | None = None,
) -> tuple[Any, Any, RankGroup | None]:
    """Load a model. Return the model, its tokenizer or None, and the group of the other ranks, which the caller passes
    to the engine. With tensor parallelism, the model is the part that rank 0 computes. On one rank, the group is None.
    `config` and `threads` configure the ranks. The other arguments are those of `load`.
    """
    if config.rank_count == 1:
        return *load(model, dtype, device, load_format, progress, text_only=config.text_only), None
    check_ranks(model, config.tensor_parallel, load_format, config.text_only)
    group = RankGroup(model, config, dtype, device, load_format, threads)
    try:
        ranks = group.connect()
        loaded = load(
            model,
            dtype,
            rank_device(device, 0),
            load_format,
            progress,
            ranks=ranks,
            whole_output=bool(config.head),
            text_only=config.text_only,
            expert_parallel=config.expert_parallel,
        )
        return *loaded, group
    except BaseException:
        group.close()
        raise


class DraftMirror:
    """A mirror repeats the steps of a runner on the other ranks. Only rank 0 runs the draft model or head, so this
    mirror sends nothing. It records the block table entries that a draft step changes, for the next step of the target.
    """

    def __init__(self, writer: StepWriter) -> None:
        self._writer = writer

    def run(self, works: Many[Work], *_: object) -> None:
        self._writer.note_changes(works)

    def capture(self) -> None:
        pass


class RankGroup:
    """The processes of ranks 1 to N-1. Not thread-safe."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        dtype: torch.dtype | str,
        device: torch.device,
        load_format: LoadFormat = "auto",
        threads: int | None = None,
    ) -> None:
        """Start a process for each rank except rank 0. The processes load their weights at the same time
        as rank 0. Raises ValueError if there are too few GPUs, or if GPU kernels cannot read the pages of a divided
        context."""
        self.count = config.rank_count
        if device.type == "cuda":
            _check_gpus(config, device, torch.cuda.device_count())
        self._parts = config.tensor_parallel, config.context_parallel
        self._use_gloo = config.rank_backend == "gloo"
        self._seconds, self._device = config.rank_seconds, rank_device(device, 0)
        self._folder = Path(tempfile.mkdtemp(prefix="kvloom-ranks-"))
        self._writer: StepWriter | None = None
        self._runner: ModelRunner | None = None
        self._failure: str | None = None
        self._is_closing = False
        self.on_failure: Callable[[str], None] | None = None
        """Called in another thread with the reason when a rank stops."""
        self.ranks: RankGroups | None = None
        """Sums and gathers between ranks, after `connect`."""
        self.host_copies = HostCopies(self.count, self._send, self.fail, lambda: self._failure, self._seconds)
        """Copies between the pools of ranks and the host tier."""
        memory = create_memory()
        self._channel = StepChannel(memory, self.count)
        self._sockets: list[socket.socket] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        """The processes of ranks 1, 2, …"""
        try:
            for rank in range(1, self.count):
                ours, theirs = socket.socketpair()
                given = str(theirs.fileno()), str(memory)
                command = [sys.executable, "-m", "kvloom.engine.parallel.rank_process", *given]
                self.processes.append(subprocess.Popen(command, pass_fds=(theirs.fileno(), memory)))
                theirs.close()
                self._sockets.append(ours)
                start = RankStart(
                    rank,
                    self.count,
                    str(self._folder / "meeting"),
                    model,
                    str(dtype).removeprefix("torch."),
                    str(rank_device(device, rank, self._use_gloo)),
                    load_format,
                    threads,
                    {name: _plain(getattr(config, name)) for name in SETTINGS},
                )
                body = _encoder.encode(start)
                send_frame(ours, body)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)

    def connect(self) -> RankGroups:
        """Wait until all ranks have started, and connect to them. Return the connection, over which the ranks add up
        and gather tensors. Raises RankError if a rank has stopped."""
        try:
            for number in range(len(self._sockets)):
                self._receive(number, Started)
            self.ranks = RankGroups.connect(
                0, *self._parts, self._folder / "meeting", self._device, self._use_gloo
            )
        except BaseException:
            self.close()
            raise
        return self.ranks

    def attach(self, cache: KVCache, runner: ModelRunner) -> None:
        """Wait until all ranks have loaded their parts. From now on, they repeat every step of `runner`. Raises
        RankError if a rank has stopped or has another page layout."""
        assert self.ranks is not None
        try:
            for number in range(len(self._sockets)):
                ready = self._receive(number, Ready)
                if (ready.layout, ready.slabs) != (str(cache.layout.table()), cache.usable_slabs):
                    raise RankError(
                        f"rank {number + 1} has {ready.slabs} slabs and another page layout than rank 0 with "
                        f"{cache.usable_slabs} slabs: give all ranks equal devices"
                    )
        except BaseException:
            self.close()
            raise
        self.ranks.limit(self._seconds)
        self._writer = StepWriter(cache, runner.stage.is_mirrored)
        self._runner = runner
        runner.mirror = self
        threading.Thread(target=self._watch, name="kvloom-ranks", daemon=True).start()

    def attach_draft(self, runner: ModelRunner) -> None:
        """Record block table changes of draft steps from now on. Only rank 0 runs the draft model."""
        assert self._writer is not None
        runner.mirror = DraftMirror(self._writer)

    def run(self, works: Many[Work], wanted: Many[int] | None, whole: Many[int], pooled: Many[int]) -> None:
        """Send a step to all ranks. The arguments are those of `ModelRunner.run`."""
        assert self._writer is not None
        self._send(self._writer.write(works, wanted, whole, pooled))

    def copy(self, copies: CopyBatch) -> None:
        """Order all ranks to copy pages inside their pools."""
        self._send(CopyPages.of(copies))

    def move_tokens(self, places: Many[npt.NDArray[np.int64]]) -> None:
        """Order all ranks to move accepted tokens of draft trees. `places` are the places of `TokenMover`."""
        self._send(MoveTokens.of(places))

    def copy_document(self, rotations: Many[int], plan: RotatedCopy) -> None:
        """Order all ranks to copy tokens of a document. `rotations` are those that rank 0 has found
        (`RotatedCopier`)."""
        self._send(CopyDocument.of(rotations, plan))

    def set_sinks(self, is_on: bool) -> None:
        """Turn the attention sinks of all ranks on or off."""
        self._send(SetSinks(is_on))

    def load_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        """Order all ranks to load their parts of a LoRA adapter into a slot, before the next step."""
        for message in adapter_messages(slot, adapter):
            self._send(message)

    def capture(self) -> None:
        """Order all ranks to capture their CUDA graphs."""
        self._send(Prepare())

    def check(self) -> None:
        """Raise RankError if a rank has stopped, or takes too long for a copy of pages."""
        self.host_copies.check()

    def fail(self, reason: str) -> None:
        """Record why the group cannot continue, and end the other ranks. Every later step raises RankError.

        A rank that hangs does not notice that its socket closes. It would keep its memory, which the next group
        needs."""
        self._failure = self._failure or reason
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """End the processes of all ranks. Waits up to CLOSE_SECONDS."""
        self._is_closing = True
        if self._runner is not None:
            self._runner.mirror = None
        for link in self._sockets:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + CLOSE_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for link in self._sockets:
            link.close()
        self._sockets = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, message: ToRank) -> None:
        self._check()
        body = _encoder.encode(message)
        try:
            self._channel.write(body, self._seconds, self._check)
            for link in self._sockets:
                send_length(link, len(body))
        except (OSError, TimeoutError) as error:
            self.fail(f"a rank does not read its steps ({error})")
            self._check()

    def _check(self) -> None:
        for number, process in enumerate(self.processes, 1):
            # Only a rank that a signal has killed is reported here. Other ranks send a reason, which `_watch` receives.
            if (process.poll() or 0) < 0:
                self.fail(f"rank {number} has stopped")
        if self._failure is not None:
            raise RankError(f"ranks: {self._failure}: restart the engine")

    def _receive(self, number: int, kind: type[Message]) -> Message:
        """Return the next message of a rank, which must be of `kind`."""
        link, process = self._sockets[number], self.processes[number]
        link.settimeout(START_SECONDS)
        try:
            body = receive_frame(link)
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            ended = (
                f"ended with status {process.returncode}" if process.returncode is not None else str(error)
            )
            raise RankError(f"rank {number + 1} {ended} while it started") from error
        message = _decoder.decode(body)
        if isinstance(message, Failed):
            raise (ValueError if message.is_refusal else RankError)(f"rank {number + 1}: {message.text}")
        if not isinstance(message, kind):
            raise RankError(f"rank {number + 1} sent {type(message).__name__}")
        link.settimeout(None)
        return message

    def _ends(self) -> bool:
        return self._is_closing

    def _watch(self) -> None:
        """Receive messages of ranks until a rank stops. Record finished copies. When a rank stops, abort the collective
        calls that wait for this rank, and call `on_failure`."""
        poll = select.poll()
        for link in self._sockets:
            poll.register(link, select.POLLIN | select.POLLHUP)
        numbers = {link.fileno(): number for number, link in enumerate(self._sockets, 1)}
        while not self._ends():
            for fd, _ in poll.poll(1000):
                if self._ends():
                    return
                number = numbers[fd]
                reason = f"rank {number} has stopped"
                with suppress(OSError, EOFError, IndexError, msgspec.DecodeError):
                    message = _decoder.decode(receive_frame(self._sockets[number - 1]))
                    if isinstance(message, Copied):
                        self.host_copies.copied(number, message.number)
                        continue
                    if isinstance(message, Failed):
                        reason += f": {message.text}"
                is_known = self._failure is not None  # rank 0 has ended the rank, and raises the error itself
                self.fail(reason)
                if self.ranks is not None and self._device.type == "cuda":
                    self.ranks.abort()
                if self.on_failure is not None and not is_known:
                    self.on_failure(reason)
                return

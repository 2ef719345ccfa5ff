"""The ranks of an engine as threads of one process, for models that are already loaded."""

from __future__ import annotations

import copy
import tempfile
import threading
from collections.abc import Sequence as Many
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import CopyBatch, KVCache
from kvloom.engine import Engine, EngineConfig
from kvloom.engine.adapter_table import open_adapters
from kvloom.engine.execution import ModelRunner, allocate_kv_memory
from kvloom.engine.parallel.group import DraftMirror
from kvloom.engine.parallel.host_copies import HostCopies, RankHost
from kvloom.engine.parallel.messages import (
    CopyDocument,
    CopyHost,
    CopyPages,
    LoadAdapter,
    MoveTokens,
    SetSinks,
    ShareHost,
    Step,
    StepReader,
    StepWriter,
    ToRank,
)
from kvloom.engine.parallel.rank_adapters import RankAdapters, adapter_messages
from kvloom.engine.parallel.rank_documents import RankDocuments
from kvloom.engine.speculation import load_head
from kvloom.engine.target_runner import target_runner, with_step_sizes
from kvloom.kernels.copy import copy_pages
from kvloom.models.loading import divide_context, shard_model
from kvloom.models.lora import LoraAdapter
from kvloom.models.paged import RotatedCopy, TokenMover, Work
from kvloom.models.sharding import RankGroups, ranks_of, set_ranks

CPU = torch.device("cpu")


class ThreadRanks:
    """Stands in for `RankGroup`: every message is encoded and decoded as between processes."""

    def __init__(self, model: Any, config: EngineConfig) -> None:
        self._model, self._config = model, config
        self.folder = tempfile.TemporaryDirectory()
        self._queues: list[SimpleQueue[bytes | None]] = []
        self.errors: list[BaseException] = []
        self._threads = []
        self.runners: dict[int, ModelRunner] = {}
        self.pools: dict[int, torch.Tensor] = {}
        """The pools of ranks 1, 2, …"""
        self.host_copies = HostCopies(
            config.rank_count, self._send, self.fail, self._failure, config.rank_seconds
        )
        self._writer: StepWriter | None = None
        for rank in range(1, config.rank_count):
            queue: SimpleQueue[bytes | None] = SimpleQueue()
            self._queues.append(queue)
            self._threads.append(threading.Thread(target=self._serve, args=(rank, queue), daemon=True))
            self._threads[-1].start()

    def part(self, rank: int) -> Any:
        """The part of a rank. Waits for all ranks."""
        parts = self._config.tensor_parallel, self._config.context_parallel
        ranks = RankGroups.connect(rank, *parts, Path(self.folder.name) / "meeting", CPU)
        ranks.limit(self._config.rank_seconds)
        if ranks.weights is None:
            model = copy.deepcopy(self._model)
        else:
            model = shard_model(
                self._model, ranks.weights, bool(self._config.head), self._config.expert_parallel
            )
        if ranks.context is not None:
            divide_context(model, ranks, whole_output=bool(self._config.head))
        set_ranks(model, ranks)
        return model

    def _serve(self, rank: int, queue: SimpleQueue[bytes | None]) -> None:
        try:
            model, config = self.part(rank), with_step_sizes(self._config, False)
            groups = ranks_of(model)
            assert groups is not None
            table = open_adapters(model, config)
            slots = None if table is None else table.slots
            head = load_head(config.head, model) if config.head else None
            memory, adapters = allocate_kv_memory(model, config, head, slots), RankAdapters(slots)
            runner = self.runners[rank] = target_runner(model, memory, config, slots)
            reader = StepReader(memory.cache)
            mover = TokenMover(memory.cache, memory.buffer, groups.context)
            documents = RankDocuments(memory.cache, runner, groups)
            self.pools[rank] = memory.buffer
            host = RankHost(
                memory.layout,
                memory.buffer,
                groups.weight_shard,
                lambda number: self.host_copies.copied(rank, number),
                self.errors.append,
            )
            while (data := queue.get()) is not None:
                message = msgspec.msgpack.decode(data, type=ToRank)
                if isinstance(message, Step):
                    runner.run(reader.read(message), message.wanted, message.whole, message.pooled)
                elif isinstance(message, ShareHost | CopyHost):
                    host.run(message)
                elif isinstance(message, CopyDocument | SetSinks):
                    documents.run(message)
                elif isinstance(message, LoadAdapter):
                    adapters.run(message)
                elif isinstance(message, MoveTokens):
                    mover.move(message.read())
                elif isinstance(message, CopyPages):
                    source, target = message.page_ids
                    copy_pages(memory.buffer, message.page_stride, source, target)
        except Exception as error:  # noqa: BLE001
            self.errors.append(error)

    def attach(self, cache: KVCache, runner: ModelRunner) -> None:
        self._writer, runner.mirror = StepWriter(cache, runner.stage.is_mirrored), self

    def attach_draft(self, runner: ModelRunner) -> None:
        assert self._writer is not None
        runner.mirror = DraftMirror(self._writer)

    def run(self, works: Many[Work], wanted: Many[int] | None, whole: Many[int], pooled: Many[int]) -> None:
        assert self._writer is not None
        self._send(self._writer.write(works, wanted, whole, pooled))

    def copy(self, copies: CopyBatch) -> None:
        self._send(CopyPages.of(copies))

    def move_tokens(self, places: Many[npt.NDArray[np.int64]]) -> None:
        self._send(MoveTokens.of(places))

    def copy_document(self, rotations: Many[int], plan: RotatedCopy) -> None:
        self._send(CopyDocument.of(rotations, plan))

    def set_sinks(self, is_on: bool) -> None:
        self._send(SetSinks(is_on))

    def load_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        for message in adapter_messages(slot, adapter):
            self._send(message)

    def capture(self) -> None:
        raise AssertionError("graphs are for GPUs")

    def _send(self, message: Any) -> None:
        data = msgspec.msgpack.encode(message)
        for queue in self._queues:
            queue.put(data)

    def check(self) -> None:
        self.host_copies.check()

    def _failure(self) -> str | None:
        return str(self.errors[0]) if self.errors else None

    def fail(self, reason: str) -> None:
        self.errors.append(RuntimeError(reason))

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join(60)
        self.folder.cleanup()


def parallel_engine(model: Any, count: int, **settings: Any) -> Engine:
    """An engine with `count` ranks that divide the model. The ranks are threads. `model` is the whole model."""
    return _engine(model, EngineConfig(tensor_parallel=count, **settings))


def context_engine(model: Any, count: int, **settings: Any) -> Engine:
    """An engine with `count` ranks that divide the context. The ranks are threads."""
    return _engine(model, EngineConfig(context_parallel=count, **settings))


def grid_engine(model: Any, parts: int, count: int, **settings: Any) -> Engine:
    """An engine with `parts` parts of the weights and `count` parts of the context. The ranks are threads."""
    return _engine(model, EngineConfig(tensor_parallel=parts, context_parallel=count, **settings))


def _engine(model: Any, config: EngineConfig) -> Engine:
    group = ThreadRanks(model, config)
    try:
        return Engine(group.part(0), config, group=group)  # type: ignore[arg-type]
    except BaseException:
        group.close()
        raise

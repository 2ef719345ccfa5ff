"""KvloomConnector: vLLM's KV connector interface. Each method forwards to the scheduler side or to the worker side."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvloom.adapters.common import TierPages

from .block_groups import block_groups
from .identity import model_identity
from .layer_pages import LayerPages
from .messages import Answers, Step
from .scheduler_side import SchedulerSide
from .settings import Settings
from .shard import Shard, worker_count
from .tier_events import TierEvents
from .worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KvloomConnector"]

log = logging.getLogger("kvloom.vllm")


class KvloomConnector(KVConnectorBase_V1, SupportsHMA):
    """kvloom's tiers as a KV connector. vLLM creates one connector in the scheduler, and one in each worker.

    `kv_connector_extra_config` contains the fields of `Settings`. Raises ValueError for a wrong setting, and for a
    model whose KV cache cannot be stored.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = self._kv_transfer_config, vllm_config.parallel_config
        self._settings = Settings.parse(transfer.kv_connector_extra_config, worker_count(parallel))
        self._groups = block_groups(vllm_config, kv_cache_config)
        self._shard, self._world_size = Shard.of(parallel), parallel.world_size
        published = vllm_config.kv_events_config
        self._publishes = published is not None and published.enable_kv_cache_events
        hash_tokens = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
        self._events = TierEvents(self._groups, hash_tokens) if self._publishes else None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            # A missing page is recomputed. With vLLM's default policy, it would fail the request.
            transfer.kv_load_failure_policy = "recompute"
            self._scheduler = SchedulerSide(
                self._settings,
                self._groups,
                model_identity(vllm_config),
                self._world_size,
                stores=transfer.is_kv_producer,
                loads=transfer.is_kv_consumer,
                events=self._events,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: vLLM need not wait until stores are complete, because a lost store only causes a later miss."""
        return False

    # --- the scheduler

    @property
    def scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def on_new_request(self, request: Request) -> None:
        self.scheduler.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.build_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        found = connector_output.kv_connector_worker_meta
        answers = found.answers if isinstance(found, Answers) else []
        self.scheduler.receive(answers, connector_output.failed_recving)
        if self._events is not None and isinstance(found, Answers):
            self._events.apply(found.changes)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finish(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finish(request)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the block events of host memory and disk tiers since the last call."""
        return () if self._events is None else self._events.take()

    def reset_cache(self) -> bool | None:
        """Make all stored pages unreachable, because the weights may have changed. Tiers evict these pages later."""
        self.scheduler.reset()
        return True

    # --- a worker

    @property
    def worker(self) -> WorkerSide:
        assert self._worker is not None, "vLLM has not registered its KV caches"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the tiers. For a layer with a recurrent state, vLLM passes a list of tensors, although the type hint
        names one tensor.
        """
        layers = LayerPages(self._groups, self._kv_cache_config, kv_caches, self._shard.text)
        largest = max(form.page_bytes for form in layers.forms)
        pin = layers.device.type == "cuda"
        tiers = TierPages(self._settings.tiers, largest, self._shard.process, pin=pin)
        events = self._publishes and self._shard.rank == 0
        self._worker = WorkerSide(self._settings, self._groups, layers, tiers, events)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.worker.begin_compute()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker.begin_step(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing, because vLLM starts a request only after all its pages are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Does nothing, because `wait_for_save` copies all layers of a block as one page."""

    def wait_for_save(self) -> None:
        self.worker.end_step(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished, failed = self.worker.take_finished()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        answers, changes = self.worker.take_answers(), self.worker.take_changes()
        return Answers(answers, changes) if answers or changes else None

    def _step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step

    def shutdown(self) -> None:
        """Write pending pages to the tiers, and close the tiers."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close()

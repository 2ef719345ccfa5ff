"""Encodes images for other workers, in the engine process, and reports counters. Accepts no requests."""

from __future__ import annotations

import time
from dataclasses import asdict

from kvloom.core import HASH_TOKENS, Tenant
from kvloom.engine import Encoder, engine_config, open_encoder, use_threads
from kvloom.models.loading import choose_device, load_vision, vision_fingerprint
from kvloom.models.vision import vision_of

from .messages import Add, EngineStats, Outputs, Ready, Rejected, Start, ToEngine
from .stats import tier_usage

__all__ = ["EncodeWorker", "load_encode_worker"]

STATS_SECONDS = 0.25


class EncodeWorker:
    """Encodes the images that other workers write to its host memory. The engine process uses it in place of a
    `Worker`, so it has the methods that the engine process calls. Not thread-safe.
    """

    is_preparing = True
    """Always True, so that the engine process polls. Images arrive in host memory without a message."""
    needs_polling = True

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._rejected: list[Rejected] = []
        self._sent = EngineStats()
        self._stats_at = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether `step` has work to do or a message to send."""
        return bool(self.encoder.waiting or self._rejected) or self._has_new_stats

    def poll_idle(self) -> None:
        """Queue images that have arrived."""
        self.encoder.poll()

    def handle(self, message: ToEngine) -> None:
        """Refuse a request. Other messages have no effect."""
        if isinstance(message, Add):
            self._rejected.append(
                Rejected(message.id, "this worker only encodes images: send requests to others")
            )

    def step(self) -> Outputs | None:
        """Encode one image, if an image waits. Return an Outputs message with new counters and refused requests, or
        None if there are neither."""
        self.encoder.poll()
        if self.encoder.waiting:
            self.encoder.encode_next()
        rejected, self._rejected = self._rejected, []
        stats = None
        if self._has_new_stats:
            stats = self._sent = self._stats()
            self._stats_at = time.monotonic() + STATS_SECONDS
        return Outputs([], rejected, stats) if rejected or stats else None

    def close(self, seconds: float) -> None:
        """End the connections of other workers."""
        self.encoder.close()

    @property
    def _has_new_stats(self) -> bool:
        return time.monotonic() >= self._stats_at and self._stats() != self._sent

    def _stats(self) -> EngineStats:
        return EngineStats(
            waiting=self.encoder.waiting,
            role="encode",
            encoding=asdict(self.encoder.stats),
            tiers=[tier_usage("host", self.encoder.host.stats())],
        )


def load_encode_worker(start: Start) -> tuple[EncodeWorker, Ready]:
    """Load the image part of a model. Return the encode worker and its Ready message."""
    began = time.monotonic()
    tenants = [Tenant(one.name, one.quota, one.weight, one.firm) for one in start.tenants]
    config = engine_config(**start.settings, tenants=tenants)
    device = choose_device(start.device)
    use_threads(start.threads)
    dtype = start.cpu_dtype if start.dtype == "auto" and device.type == "cpu" else start.dtype
    model = load_vision(start.model, dtype, device, start.load_format, start.progress)
    vision, fingerprint = vision_of(model), vision_fingerprint(model)
    assert vision is not None
    encoder = open_encoder(vision, fingerprint, [str(one) for one in config.tiers], tenants)
    ready = Ready(
        device=str(device),
        dtype=str(vision.embedding_shape[1]).removeprefix("torch."),
        vocab_size=0,
        max_tokens=0,
        tenant_max_tokens={},
        pool_bytes=0,
        slab_bytes=encoder.host.slab_bytes,
        block_tokens=HASH_TOKENS,
        bytes_per_token=0,
        layout=[],
        load_seconds=time.monotonic() - began,
        tiers=[("host", encoder.host.capacity, 0)],
        hash_model=f"{model.config.model_type} images {fingerprint}",
        peer_address=encoder.server.address,
    )
    return EncodeWorker(encoder), ready

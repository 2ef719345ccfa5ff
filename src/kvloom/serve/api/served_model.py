"""ServedModel: one model of a server, with its engine process, its prompt encoder and its observer.

loading ──▶ ready ──▶ unloading ──▶ gone
   └─────▶ failed (a model that was loaded by the API; `error` is the reason)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvloom.core import HASH_TOKENS
from kvloom.serve.api.answers import AnswerFormats
from kvloom.serve.errors import ApiError, engine_loading, unloading
from kvloom.serve.metrics import Metrics, RequestObserver
from kvloom.serve.worker import AdapterInfo, EngineClient, Ready

from .prompts import PromptEncoder

__all__ = ["ServedModel"]


@dataclass(slots=True, eq=False)
class ServedModel:
    """One served model. Requests select it by `name` or `path`. `encoder` is None while the tokenizer loads."""

    name: str
    path: str
    created: int
    engine: EngineClient
    observer: RequestObserver
    encoder: PromptEncoder | None = None
    answers: AnswerFormats = field(default_factory=AnswerFormats)
    """How the model writes tool calls and reasoning. Set when the tokenizer is loaded."""
    is_added: bool = False
    """Whether a client loaded the model with POST /admin/models. /health ignores such a model until it is ready."""
    is_unloading: bool = False
    error: str = ""
    """The reason why loading failed. Empty if it did not fail."""

    @property
    def metrics(self) -> Metrics:
        return self.observer.metrics

    @property
    def status(self) -> str:
        """The state of the model: loading, ok, unloading or failed."""
        if self.error:
            return "failed"
        if self.is_unloading:
            return "unloading"
        return "ok" if self.engine.is_ready and self.encoder is not None else "loading"

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The LoRA adapters that requests may use."""
        return [] if self.engine.info is None else self.engine.info.adapters

    def adapter(self, name: str | None) -> AdapterInfo | None:
        """Return the LoRA adapter with this name, or None."""
        return next((one for one in self.adapters if one.name == name), None)

    def require_ready(self) -> tuple[Ready, PromptEncoder]:
        """Return the engine's Ready message and the encoder. Raises ApiError if the model is loading, unloading or
        failed, or if the worker only encodes images.
        """
        if self.error:
            raise ApiError(503, f"model {self.name!r} failed to load: {self.error}", "model", "load_failed")
        if self.is_unloading:
            raise unloading(self.name)
        if self.engine.role == "encode":
            raise ApiError(
                503,
                "this worker only encodes images for other workers: send requests to a router or to another worker",
                code="encode_worker",
            )
        return self.engine.require_ready(), self.require_encoder()

    def require_encoder(self) -> PromptEncoder:
        """Return the encoder. Raises ApiError while the tokenizer loads."""
        if self.encoder is None:
            raise engine_loading()
        return self.encoder

    def routing_info(self) -> dict[str, Any] | None:
        """Return the data that a router needs to choose a worker for this model: the model's name in block hashes,
        layer groups, sizes, load and event addresses. Return None while the model loads.
        """
        facts = self.engine.info
        if facts is None:
            return None
        settings = self.engine.start.settings
        return {
            "id": self.name,
            "status": self.status,
            "instance": self.engine.instance,
            "hash_model": facts.hash_model,
            "hash_tokens": HASH_TOKENS,
            "block_tokens": facts.block_tokens,
            "groups": [{"index": g.index, "kind": g.kind, "window": g.window} for g in facts.groups],
            "bytes_per_token": facts.bytes_per_token,
            "pool_bytes": facts.pool_bytes,
            "max_tokens": facts.max_tokens,
            "events": settings.get("kv_events"),
            "replay": settings.get("kv_events_replay"),
            "events_need_key": settings.get("kv_events_key") is not None,
            "role": self.engine.role,
            "step_times": self.engine.stats.step_times,
            "slo_ttft": settings.get("slo_ttft"),
            "slo_tbt": settings.get("slo_tbt"),
            "token_budget": facts.token_budget,
            "peer": None if facts.peer_address is None else "{}:{}".format(*facts.peer_address),
            "reads": [
                urlsplit(tier).netloc.rpartition("@")[2]
                for tier in settings.get("tiers", ())
                if tier.startswith("peer:")
            ],
            "encoders": [urlsplit(url).netloc.rpartition("@")[2] for url in settings.get("encoders", ())],
            "load": self._load(),
            "adapters": [
                {"name": one.name, "digest": one.digest, "invocation_tokens": one.invocation_tokens}
                for one in self.adapters
            ],
            "resident_adapters": [one.name for one in self.engine.stats.adapters if one.is_resident],
        }

    def _load(self) -> dict[str, Any]:
        """Return the load, hits and tiers of the engine, for the fleet page of a router."""
        stats, metrics = self.engine.stats, self.metrics
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "prompt_tokens": metrics.prompt_tokens,
            "cached_tokens": metrics.cached_tokens,
            "used": 1 - stats.free_slabs / stats.slabs if stats.slabs else 0.0,
            "encoding": stats.encoding,
            "tiers": [{"name": one.name, "pages": one.objects, "bytes": one.bytes} for one in stats.tiers],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the model as an entry of /v1/models."""
        facts = self.engine.info
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvloom",
            "root": self.path,
            "parent": None,
            "max_model_len": None if facts is None else facts.max_tokens,
            "status": self.status,
            **({"error": self.error} if self.error else {}),
        }

    def adapter_entries(self) -> list[dict[str, Any]]:
        """Return the LoRA adapters as entries of /v1/models. `parent` is the name of the base model."""
        base = self.to_dict()
        return [
            {**base, "id": one.name, "created": one.created, "root": one.path, "parent": self.name}
            for one in self.adapters
        ]

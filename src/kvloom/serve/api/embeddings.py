"""POST /v1/embeddings: pooled hidden states of the served model, in OpenAI's format."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send

from kvloom.engine import SamplingParams
from kvloom.serve.errors import ApiError, bad_request
from kvloom.serve.worker import Delta, Ready

from .generation import CheckedRequest, CompletionEndpoint
from .prompts import Prompt
from .request_fields import CacheFields, ChatFields, CompletionFields, check_fields, read_fields
from .responses import CompletionResponse, ResponseBuilder
from .served_model import ServedModel

__all__ = ["EmbeddingFields", "EmbeddingsEndpoint"]


class EmbeddingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a request for embeddings."""

    input: str | list[int | str | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["mean", "last"] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    tenant: str | None = None
    priority: int | None = None
    ttl: float | None = None
    cache: CacheFields | None = None
    session_id: str | None = None
    cache_salt: str | None = None


class _PooledFields(CompletionFields, frozen=True, kw_only=True):
    """A request for embeddings, as a completion with one output token. The engine pools the hidden states of the
    prompt, and the output token is dropped.
    """

    pooling: Literal["mean", "last"]
    as_base64: bool
    dimensions: int | None


class EmbeddingsEndpoint(CompletionEndpoint):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ApiError as error:
            error.param = "input" if error.param == "prompt" else error.param
            raise

    def read(self, body: bytes) -> CompletionFields:
        given = read_fields(body, EmbeddingFields)
        if given.dimensions is not None and given.dimensions < 1:
            raise bad_request(f"dimensions {given.dimensions} must be at least 1", "dimensions")
        fields = _PooledFields(
            prompt=given.input,
            model=given.model,
            max_tokens=1,
            add_special_tokens=given.add_special_tokens,
            truncate_prompt_tokens=given.truncate_prompt_tokens,
            tenant=given.tenant,
            priority=given.priority,
            ttl=given.ttl,
            cache=given.cache,
            session_id=given.session_id,
            cache_salt=given.cache_salt,
            pooling=given.pooling or "mean",
            as_base64=given.encoding_format == "base64",
            dimensions=given.dimensions,
        )
        check_fields(fields)
        return fields

    def _new_params(
        self,
        fields: CompletionFields | ChatFields,
        prompt: Prompt,
        new: int,
        served: ServedModel,
        facts: Ready,
    ) -> SamplingParams:
        assert isinstance(fields, _PooledFields)
        return SamplingParams(max_tokens=1, temperature=0, pooling=fields.pooling)

    def response(self, request: CheckedRequest) -> ResponseBuilder:
        assert isinstance(request.fields, _PooledFields)
        return _EmbeddingsResponse(
            request.fields, *request.builder_arguments, token_ids=False, top_logprobs=0
        )


class _EmbeddingsResponse(CompletionResponse):
    prefix = "embd"

    def __init__(self, fields: _PooledFields, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._fields = fields

    def whole(self, deltas: list[Delta]) -> bytes:
        data = []
        for delta in sorted(deltas, key=self._index):
            self._count(delta)
            self.usage.completion = 0  # the sampled token is dropped
            entry = {"object": "embedding", "index": self._index(delta), "embedding": self._values(delta)}
            data.append(entry)
        tokens = self.usage.prompt
        return msgspec.json.encode(
            {
                "object": "list",
                "data": data,
                "model": self._head["model"],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    def _values(self, delta: Delta) -> list[float] | str:
        """Return an embedding in the requested encoding and length. A shortened embedding is normalised again."""
        assert delta.embedding is not None
        values = np.frombuffer(delta.embedding, "<f4")
        size = self._fields.dimensions
        if size is not None:
            if size > len(values):
                raise bad_request(
                    f"dimensions {size} exceeds the {len(values)} of this model: lower it, or omit it",
                    "dimensions",
                )
            values = values[:size]
            values = values / max(float(np.linalg.norm(values)), 1e-12)
        values = values.astype("<f4", copy=False)
        return b64encode(values.tobytes()).decode() if self._fields.as_base64 else values.tolist()

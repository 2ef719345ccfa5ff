"""The engine: a Hugging Face model, a pool, a cache and a scheduler, one step at a time.

    add(prompt) → Request      step() → the requests that got a token or ended      run() → until nothing is left

One owner at a time; the model must be on the pool's device. Tokens are ids: text is someone else's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from kvloom.core import Control, KVCache, PoolLayout
from kvloom.kernels.copy import copy_pages
from kvloom.kernels.views import allocate
from kvloom.models.attention import Pages, install
from kvloom.models.batch import Batch
from kvloom.models.specs import model_spec

from .request import Request, SamplingParams
from .sampler import Sampler
from .scheduler import Scheduler

__all__ = ["Engine"]

KV_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Engine:
    """`pool_bytes` are what pages may take; `kv_dtype` is what K and V are kept in (the model's own if None)."""

    def __init__(
        self,
        model: Any,
        pool_bytes: int,
        kv_dtype: str | None = None,
        block_tokens: int = 16,
        token_budget: int = 2048,
        max_running: int = 256,
    ) -> None:
        weight = next(model.parameters())
        self.model, self.device = model.eval(), weight.device
        spec = model_spec(
            {**model.config.to_dict(), "dtype": str(weight.dtype).removeprefix("torch.")},
            kv_dtype=kv_dtype or KV_NAMES.get(weight.dtype),
        )
        self.layout = PoolLayout.build(spec.layers, block_tokens)
        slabs = self.layout.slabs_in(pool_bytes)
        if slabs < 2:
            raise ValueError(
                f"a pool of {pool_bytes:,} bytes is too small: its unit is {self.layout.slab_bytes:,} and it needs two"
            )
        self.buffer = allocate(self.layout, slabs, self.device)
        self.cache = KVCache(self.layout, slabs=slabs, model=spec.name)
        self.pages = Pages(self.layout, self.buffer)
        install(model)
        self.scheduler = Scheduler(self.cache, token_budget, max_running)
        self.sampler = Sampler()
        self.limit = spec.max_context
        self._plain = "cache_params" in inspect.signature(model.forward).parameters
        self._eos = _ids(getattr(model.generation_config, "eos_token_id", None))
        self._count = 0

    def add(
        self,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        control: Control | None = None,
        priority: int = 0,
    ) -> Request:
        """A request that waits its turn. Raises ValueError where it could never run."""
        params = params or SamplingParams()
        tokens = tuple(int(token) for token in prompt)
        if not tokens:
            raise ValueError("a prompt needs at least one token")
        if self.limit is not None and len(tokens) + params.max_tokens > self.limit:
            raise ValueError(
                f"{len(tokens)} prompt tokens and {params.max_tokens} new ones exceed the model's {self.limit}"
            )
        request = Request(self._count, tokens, params, control or Control(), priority)
        self.scheduler.add(request)
        self._count += 1
        return request

    def cancel(self, request: Request) -> None:
        """End a request now; its pages are free at once."""
        self.scheduler.cancel(request)

    def step(self) -> list[Request]:
        """Compute one step; the requests that got a token."""
        work = self.scheduler.schedule()
        for copies in self.cache.take_copies():
            copy_pages(self.buffer, copies.page_stride, copies.source, copies.target)
        if not work:
            return []
        batch = Batch.build(self.cache, [part for _, part in work], self.device)
        logits = self._forward(batch)
        self.scheduler.commit(work)
        ready = [i for i, (request, _) in enumerate(work) if request.pending == 0]
        requests = [work[i][0] for i in ready]
        for request, token in zip(requests, self.sampler.choose(logits[ready], requests), strict=True):
            self._take(request, token)
        return requests

    def run(self) -> None:
        """Step until every request has ended."""
        while self.scheduler.busy:
            self.step()

    def _forward(self, batch: Batch) -> torch.Tensor:
        self.pages.begin(batch)
        extra: dict[str, Any] = {"cache_params": self.pages}
        if not self._plain:
            extra = {
                "past_key_values": self.pages,
                "pages": self.pages,
                "position_ids": batch.positions[None],
            }
        with torch.inference_mode():
            found = self.model(
                input_ids=batch.tokens[None], use_cache=False, logits_to_keep=batch.last, **extra
            )
        logits: torch.Tensor = found.logits[0]
        return logits

    def _take(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        params = request.params
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            self.scheduler.finish(request, "stop")
        elif len(request.output) >= params.max_tokens:
            self.scheduler.finish(request, "length")


def _ids(given: int | list[int] | None) -> frozenset[int]:
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else given)

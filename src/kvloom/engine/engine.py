"""The engine: a Hugging Face model, a pool, a cache and a scheduler, one step at a time.

    add(prompt) → Request      step() → the requests that got a token or ended      run() → until nothing is left

On a GPU a step is launched before the tokens of the one before it are known (`ahead`): they stay on the device, come back
while it computes, and whoever turns out to have ended has computed one token for nothing. One owner at a time; the model
must be on the pool's device. Tokens are ids: text is someone else's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kvloom.core import Control, KVCache, PoolLayout
from kvloom.kernels.copy import copy_pages
from kvloom.kernels.views import allocate
from kvloom.models.attention import install
from kvloom.models.specs import model_spec

from .request import Request, SamplingParams
from .runner import Runner
from .sampler import Sampler
from .scheduler import Scheduled, Scheduler

__all__ = ["Engine"]

MAX_TOKENS = 131072
"""The longest sequence where the model names no limit."""
KV_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step: its work, and the tokens it chooses for `requests`, on their way to the host."""

    work: list[Scheduled]
    requests: list[Request]
    tokens: torch.Tensor
    arrived: torch.cuda.Event | None

    def land(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        found: list[int] = self.tokens.tolist()
        return found


class Engine:
    """`pool_bytes` are what pages may take; `kv_dtype` is what K and V are kept in (the model's own if None). `ahead` says
    whether steps are launched before the tokens of the one before are known; on a GPU they are, unless told otherwise."""

    def __init__(
        self,
        model: Any,
        pool_bytes: int,
        kv_dtype: str | None = None,
        block_tokens: int = 16,
        token_budget: int = 2048,
        max_running: int = 256,
        ahead: bool | None = None,
        graphs: bool = True,
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
        self.limit = spec.max_context
        self.cache = KVCache(
            self.layout,
            slabs=slabs,
            model=spec.name,
            max_sequences=max_running,
            max_tokens=self.limit or MAX_TOKENS,
        )
        install(model)
        self.runner = Runner(model, self.cache, self.buffer, token_budget, max_running, graphs)
        self.scheduler = Scheduler(self.cache, token_budget, max_running)
        self.sampler = Sampler()
        self.ahead = self.device.type == "cuda" if ahead is None else ahead
        self._flight: Flight | None = None
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

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return self.scheduler.busy or self._flight is not None

    def step(self) -> list[Request]:
        """Launch one step, and take in the tokens of the last that was; the requests that got one."""
        before, landed = self._flight, []
        if before is not None and any(request.waits for request in before.requests):
            landed = self._land(before, [])
            before = None
        self._flight = flight = self._launch(before)
        if before is not None:
            landed = self._land(before, [] if flight is None else flight.work)
        elif flight is not None and not self.ahead:
            self._flight = None
            landed = self._land(flight, [])
        return landed

    def run(self) -> None:
        """Step until every request has ended."""
        while self.busy:
            self.step()

    def _launch(self, before: Flight | None) -> Flight | None:
        places = {} if before is None else {id(request): i for i, request in enumerate(before.requests)}
        work = self.scheduler.schedule(places)
        for copies in self.cache.take_copies():
            copy_pages(self.buffer, copies.page_stride, copies.source, copies.target)
        if not work:
            return None
        ends = [request.pending == len(part.tokens) for request, part in work]
        ready = [i for i, end in enumerate(ends) if end]
        logits = self.runner.run([part for _, part in work], ready)
        requests = [work[i][0] for i in ready]
        tokens = torch.empty(0, dtype=torch.int64, device=self.device)
        if requests:
            tokens = self.sampler.choose(logits, requests)
            self.runner.chosen[: len(tokens)] = tokens
        self.scheduler.launched(work)
        return Flight(work, requests, *self._fetched(tokens))

    def _fetched(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Send the tokens on their way to the host."""
        if not tokens.is_cuda:
            return tokens, None
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return host, arrived

    def _land(self, flight: Flight, after: list[Scheduled]) -> list[Request]:
        """Take in a step's tokens; `after` is the work of the step that was launched since."""
        tokens = flight.land()
        open_ = [request for request in flight.requests if request.finish is None]
        self.scheduler.learned(flight.requests, tokens, after)
        for request in open_:
            self._end(request)
        return open_

    def _end(self, request: Request) -> None:
        """End a request whose last token is its last."""
        token, params = request.tokens[-1], request.params
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            self.scheduler.finish(request, "stop")
        elif len(request.output) >= params.max_tokens:
            self.scheduler.finish(request, "length")


def _ids(given: int | list[int] | None) -> frozenset[int]:
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else given)

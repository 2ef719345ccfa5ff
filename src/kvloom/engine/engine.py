"""The engine: a Hugging Face model, a pool, a cache and a scheduler, one step at a time.

    add(prompt) → Request      step() → the requests that got a token or ended      run() → until nothing is left

On a GPU a step is launched before the tokens of the one before it are known (`ahead`): they stay on the device, come back
while it computes, and whoever turns out to have ended has computed one token for nothing. One owner at a time; the model
must be on the pool's device. Prompts are ids; text is made as it grows only where it is asked for or decides when to end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence as Many
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import Control, CopyBatch, Tenant
from kvloom.kernels.copy import copy_pages
from kvloom.models.sight import Sight
from kvloom.models.specs import KVDtype
from kvloom.models.vision import Vision
from kvloom.tiers.opening import Place

from .beams import BeamSearch
from .flight import Flight, told_prompts
from .grammar import Grammar, GrammarLimits, Grammars, collect
from .landing import Landing, ends_of
from .lower import Lower, LowerConfig
from .odds import send
from .opening import open_lower
from .pool import pool_for
from .request import Request, SamplingParams, token_ids
from .runner import Runner
from .sampler import Chosen, Sampler
from .scheduler import Scheduled, Scheduler
from .sessions import Sessions
from .sizing import MAX_RUNNING, TOKEN_BUDGET
from .text import Text

__all__ = ["Engine"]


class Engine:
    """`pool_bytes` are what pages may take; without them, what is left of `memory_fraction` of the device.
    `kv_dtype` is what K and V are kept in (the model's own if None), and `kv_scales` where the scales of int8 and fp8 come
    from: "dynamic", "checkpoint", or a file of `kvloom calibrate`. `ahead` says
    whether steps are launched before the tokens of the one before are known; on a GPU they are, unless told otherwise.
    A `tokenizer` is needed for stop texts and structured output alone. `batch_invariant`: on a GPU, too, what a request gets is
    the same bits whatever runs beside it. `tiers` are places for pages below the pool (`host:64GiB`, `disk:/path:1TiB`:
    docs/tiers.md), nearest first; `lower` says how they are used, and `close` ends them. `max_context` are the tokens a sequence
    may come to have, where the model could do more. `grammar_limits` bound what a grammar may take in time and memory."""

    def __init__(
        self,
        model: Any,
        pool_bytes: int | None = None,
        kv_dtype: KVDtype | None = None,
        block_tokens: int = 16,
        token_budget: int | None = None,
        max_running: int | None = None,
        ahead: bool | None = None,
        graphs: bool = True,
        tokenizer: Any = None,
        memory_fraction: float = 0.9,
        tenants: Iterable[Tenant] = (),
        kv_scales: str | os.PathLike[str] = "dynamic",
        batch_invariant: bool = False,
        tiers: Many[str | Place] = (),
        lower: LowerConfig | None = None,
        grammar_limits: GrammarLimits | None = None,
        max_context: int | None = None,
    ) -> None:
        self.model, self.device = model.eval(), next(model.parameters()).device
        on_gpu = self.device.type == "cuda"
        token_budget = TOKEN_BUDGET[on_gpu] if token_budget is None else token_budget
        max_running = MAX_RUNNING[on_gpu] if max_running is None else max_running
        pool = pool_for(
            model,
            pool_bytes=pool_bytes,
            memory_fraction=memory_fraction,
            block_tokens=block_tokens,
            token_budget=token_budget,
            max_running=max_running,
            max_context=max_context,
            kv_dtype=kv_dtype,
            kv_scales=kv_scales,
            tenants=tenants,
            graphs=graphs,
            batch_invariant=batch_invariant,
            stored=bool(tiers),
        )
        self.layout, self.buffer, self.cache = pool.layout, pool.buffer, pool.cache
        self.vision, self.limit = pool.vision, pool.limit
        self.room = pool.room
        """How the pool got its size, where it was left to find it."""
        self._whose = "the model's" if self.limit and max_context is None else "this engine's"
        self.runner = Runner(
            model,
            self.cache,
            self.buffer,
            token_budget,
            max_running,
            graphs,
            pool.scales,
            self.vision,
            pool.invariant,
        )
        self.scheduler = Scheduler(self.cache, token_budget, max_running)
        self.lower: Lower | None = None
        """What lies below the pool, where tiers were given."""
        if tiers:
            self.lower = open_lower(tiers, self.cache, self.buffer, self._copy, lower)
            self.scheduler.lower = self.lower
        self.eos = ends_of(model)
        self.sampler = Sampler(self.eos)
        self._landing = Landing(self.scheduler, self.eos)
        self.tokenizer = tokenizer
        self.ahead = on_gpu if ahead is None else ahead
        self._flight: Flight | None = None
        self._landed: list[Request] = []  # who got a token, until that is told
        self._vocabulary = len(model.get_input_embeddings().weight)
        self._grammars: Grammars | None = None
        self.grammar_limits = grammar_limits or GrammarLimits()
        self._count = 0
        self._copies: list[CopyBatch] = []
        self._sessions = Sessions()

    def prepare(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile kernels and capture graphs now, so that no request waits for them; on a CPU there are none."""
        tokens, seconds = self.runner.warm(self._choose_for_nobody)
        if self.lower is not None:
            self.lower.computed(tokens, seconds)
        self.runner.capture(progress)

    def add(
        self,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        control: Control | None = None,
        priority: int = 0,
        text: bool = False,
        images: Many[Any] = (),
        grammar: Grammar | None = None,
    ) -> Request:
        """A request that waits its turn. Raises ValueError where it could never run. With `text` its text is made while it
        grows (some 20 µs a token), so that it can be told piece by piece. `images` are what the model's processor makes of
        each, a mapping of tensors (or pixels alone), in the order of their placeholders in the prompt. `grammar` is what
        `begin_grammar` returned for these parameters, once it is ready; without it this call waits for the compilation."""
        params = params or SamplingParams()
        tokens, ids = token_ids(prompt)
        self._refuse(ids, params, text)
        control = control or Control()
        if control.lossy and (self.lower is None or not self.lower.lossy):
            control = replace(control, lossy=False)  # nothing here is re-encoded: it shares with everybody
        sight = self._look(tokens, images, control.tenant) if len(images) else None
        asked = ids.astype(np.int32, copy=False)
        request = Request(self._count, tokens, params, control, priority, sight=sight, asked=asked)
        request.children = [
            Request(
                self._count + i,
                tokens,
                params,
                request.control,
                priority,
                seed=request.seed + i,
                parent=request,
                sight=sight,
            )
            for i in range(1, params.samples)
        ]
        structure = params.structure
        if structure is not None and grammar is None:
            grammar = self._grammar_of().compile(*structure)
        for one in request.family:
            if structure is not None and grammar is not None:
                one.structure = grammar.start()
            if text or params.stops:
                one.text = Text(
                    self.tokenizer,
                    tokens,
                    params.stops,
                    params.include_stop_str_in_output,
                    params.skip_special_tokens,
                )
        if params.beam_width > 1:
            self._let_search(request)
        self.scheduler.add(request)
        self._count += params.samples
        return request

    def begin_grammar(self, params: SamplingParams, tenant: str = "") -> Grammar | None:
        """Start to compile the grammar of `params`, if they have one. Does not wait: call `poll_grammars` until it is ready.
        Raises ValueError for what is refused at once."""
        structure = params.structure
        if structure is None or self.tokenizer is None:
            return None
        return self._grammar_of().begin(*structure, tenant)

    def poll_grammars(self) -> None:
        """Take in what the processes of grammars have done. Does not wait."""
        if self._grammars is not None:
            self._grammars.poll()

    def cancel(self, request: Request) -> None:
        """End a request with all its answers now; their pages are free at once."""
        for one in request.family:
            self.scheduler.cancel(one)

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        prepares = self.lower is not None and self.lower.preparing
        return self.scheduler.busy or self._flight is not None or prepares or bool(self._landed)

    def expect_session(self, session: str) -> bool:
        """A session is about to come back: what it said is brought from below into host memory before it asks, while steps
        are made. Whether anything is looked for; nothing is where it is not known, or nothing lies below."""
        known = self._sessions.of(session)
        if known is None or self.lower is None:
            return False
        tokens, control = known
        likely = Request(-1, tuple(tokens.tolist()), SamplingParams(max_tokens=1), control)
        return self.lower.hint(likely, self.cache.match(tokens, control))

    def end_session(self, session: str) -> int:
        """A session will not come back: what only it used may leave first. Returns how many of its pages are cached."""
        self._sessions.forget(session)
        return self.cache.end_session(session)

    def step(self) -> list[Request]:
        """Launch one step, and take in the tokens of the last that was; the requests that got one, or ended for want of
        room. Where it raises (a device out of memory, an interrupt), the step has not been: requests wait to be computed
        anew, and may be cancelled. Who got a token before that is told of by the next step."""
        began = time.perf_counter()
        if self._landing.late:
            self._landing.settle()
        before = done = self._flight
        if before is not None and any(request.waits for request in before.requests):
            self._flight = None
            self._land(before, [])
            before = None
        self._flight = flight = self._launch(before)
        if before is not None:
            self._land(before, [] if flight is None else flight.work)
        elif flight is not None and not self.ahead:
            self._flight, done = None, flight
            self._land(flight, [])
        if self._landing.late and done is None and self._flight is None:
            collect([request.structure for request in self._landing.late if request.structure], 0.01)
        if self.lower is not None:
            self._look_at_clock(done, began)
            self._sessions.hear(self._landed)
        told = self._landed + self.scheduler.given_up
        self._landed, self.scheduler.given_up = [], []
        return told

    def _land(self, flight: Flight, after: list[Scheduled]) -> None:
        """Take in a step's tokens. Where that breaks off, what was launched since knows not what it follows: it is left."""
        try:
            if self.lower is not None:
                self.lower.waiting(lambda: not flight.arrived)
            self._landed += self._landing.land(flight, after)
        except BaseException:
            self._flight = None
            self.scheduler.failed()
            raise

    def _look_at_clock(self, done: Flight | None, began: float) -> None:
        """Tell how long a step took that was taken in; where there was none, and pages are on their way, wait for them."""
        assert self.lower is not None
        self.lower.take_offers()  # of who ended now: there may be no next step for long
        if done is not None:
            self.lower.computed(done.prompt_tokens, time.perf_counter() - began)
        elif self._flight is None and (self.scheduler.loads or self.lower.preparing):
            self.lower.wait(0.002)
        if (flight := self._flight) is None:
            self.lower.in_air((), 0)
        else:
            self.lower.in_air({request for request, _ in flight.work}, flight.prompt_tokens)

    def close(self, seconds: float = 10.0) -> None:
        """End every request, and the tiers: what they want is stored first, within so many seconds."""
        for request in list(self.scheduler.open):
            self.scheduler.cancel(request)
        self._flight, self._landed = None, []
        if self._grammars is not None:
            self._grammars.close()
            self._grammars = None
        if self.lower is not None:
            with suppress(RuntimeError):
                self._make_copies()
            self.lower.close(seconds, keep=not self._copies)
            self.lower = self.scheduler.lower = None
            self.cache.tree.parcels = None

    def run(self) -> None:
        """Step until every request has ended."""
        while self.busy:
            self.step()

    def _launch(self, before: Flight | None) -> Flight | None:
        places = {} if before is None else {id(request): i for i, request in enumerate(before.requests)}
        try:
            return self._launched(places)
        except BaseException:
            self.scheduler.failed(places)
            raise

    def _launched(self, places: dict[int, int]) -> Flight | None:
        self._copy()  # who forked and ended holds pages until then
        work = self.scheduler.schedule(places)
        self._copy()
        if not work:
            return None
        ready = [
            i
            for i, (request, part) in enumerate(work)
            if request.computed + len(part.tokens) == len(request.tokens) + request.unknown
        ]
        whole = [
            i
            for i, (request, _) in enumerate(work)
            if request.params.prompt_logprobs is not None and request.telling
        ]
        if self.lower is not None:
            self.lower.launching()
        logits = self.runner.run([part for _, part in work], ready, whole)
        with self.runner.steady:
            prompts = told_prompts([work[i] for i in whole], logits[len(ready) :])
        logits = logits[: len(ready)]
        self.scheduler.launched(work)
        requests = [work[i][0] for i in ready]
        if any(request.children and not request.branched for request in requests):
            requests, rows = self._branch(requests)
            logits = logits.index_select(0, send(np.array(rows), self.device))
        chosen = Chosen(torch.empty(0, dtype=torch.int64, device=self.device))
        if requests:
            with self.runner.steady:
                chosen = self.sampler.choose(logits, requests, [request.drawn - 1 for request in requests])
            running = min(len(requests), self.runner.rows)  # who comes after has no next step
            self.runner.chosen[:running] = chosen.tokens[:running]
        return Flight.of(work, requests, chosen, prompts, self.scheduler.decoding)

    def _copy(self) -> None:
        self._make_copies()  # what a step that broke off left: nothing is where the cache says before
        if self.lower is not None:
            self.lower.take_offers()
        self._copies = self.cache.take_copies()
        self._make_copies()

    def _make_copies(self) -> None:
        """Make the copies that the cache has decided; what fails stays to be made, and may be made twice."""
        if not self._copies:
            return
        try:
            while self._copies:
                copies = self._copies[0]
                copy_pages(self.buffer, copies.page_stride, copies.source, copies.target)
                del self._copies[0]
        finally:
            if self.lower is not None:
                self.lower.launching(moved=True)

    def _choose_for_nobody(self, logits: torch.Tensor) -> None:
        nobody = Request(-1, (0,), SamplingParams(max_tokens=1, temperature=0), Control())
        with self.runner.steady:
            self.sampler.choose(logits, [nobody] * len(logits), [0] * len(logits))

    def _branch(self, requests: list[Request]) -> tuple[list[Request], list[int]]:
        """Where a prompt ends that wants several answers, let the others begin on its pages. Who chooses a token now, and
        from which row of logits: first those that run, then those that found no row or room."""
        children: list[tuple[Request, int]] = []
        for row, request in enumerate(requests):
            if request.children and not request.branched:
                request.branched = True
                for child in request.children:
                    if child.finish is None:
                        self.scheduler.fork(request, child)
                        child.unknown += 1
                        children.append((child, row))
        children.sort(key=lambda one: one[0].sequence is None)
        rows = [*range(len(requests)), *(row for _, row in children)]
        return [*requests, *(child for child, _ in children)], rows

    def _let_search(self, request: Request) -> None:
        """Make a request and its children the places of a beam search."""
        params = request.params
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos)
        beams = BeamSearch(request.family, ends)
        for slot in beams.slots:
            slot.beams, slot.branched = beams, True
            slot.top_logprobs = max(BeamSearch.looked_at(params.beam_width, len(ends)), params.logprobs or 0)

    def _grammar_of(self) -> Grammars:
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.eos, self.grammar_limits)
        return self._grammars

    def _look(self, tokens: tuple[int, ...], images: Many[Any], tenant: str) -> Sight:
        if self.vision is None:
            raise ValueError(Vision.refusal(self.model))
        return self.vision.look(tokens, images, tenant)

    def _refuse(self, ids: npt.NDArray[Any], params: SamplingParams, text: bool) -> None:
        """Raise ValueError for what can never run."""
        if not len(ids):
            raise ValueError("a prompt needs at least one token")
        if len(ids) + params.max_tokens > self.cache.max_tokens:
            raise ValueError(
                f"{len(ids)} prompt tokens and {params.max_tokens} new ones exceed {self._whose} {self.cache.max_tokens}"
            )
        for token in (ids.min(), ids.max()):
            if not 0 <= token < self._vocabulary:
                raise ValueError(
                    f"the prompt's token {token} is none of the model's: ids go from 0 to {self._vocabulary - 1}"
                )
        if self.tokenizer is None and (text or params.stops or params.structure is not None):
            raise ValueError(
                "text, stop texts and structured output need a tokenizer, and this engine has none"
            )

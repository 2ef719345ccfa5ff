"""Runs requests on the engine. Handles messages and returns Outputs. This module does not depend on sockets and HTTP.

The requests of a tenant with a quota wait in a separate queue. Before a request enters the engine, the largest number
of bytes that it can need is reserved in the quota. A tenant that has used up its quota therefore never blocks other
tenants.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import torch

from kvloom.core import CacheControl, RetainRange
from kvloom.engine import (
    Engine,
    Grammar,
    GrammarBusyError,
    GrammarState,
    Request,
    TokenLogprobs,
    Transcription,
)
from kvloom.models.paged import Image

from .adapter_loads import AdapterLoads
from .cache_snapshot import CacheSnapshot
from .image_prompts import ImagePrompts, ImagesBusyError
from .messages import (
    MAX_CHUNKS,
    AdapterAnswer,
    Add,
    Cancel,
    Delta,
    EndSession,
    EngineStats,
    ExpectSession,
    LoadAdapter,
    Outputs,
    PoolState,
    Rejected,
    RequestProgress,
    ResizePool,
    SetRole,
    SnapshotRequest,
    Start,
    TenantConfig,
    TierUsage,
    ToEngine,
    TokenLogprob,
    UnloadAdapter,
)
from .request_pins import RequestPins
from .stats import engine_stats, tier_usages

__all__ = ["Worker", "max_request_tokens"]

GROWTH_SECONDS = 0.002
"""Pause in seconds after a step if requests wait for the pool to grow."""
STATS_SECONDS = 0.25
SHORT_SECONDS = 0.05
"""Seconds between two stats messages while this model lacks pages and shares memory with other models."""


@dataclass(slots=True)
class _OpenRequest:
    """A request in the engine.

    - `reserved_bytes` is its part of the tenant's quota.
    - `sent_tokens` has, for each answer, the number of tokens already sent, or -1 if the answer has finished.
    - `first` is the time of the first token.
    - `chunks` are the computed chunks of the prompt, as (start, end, tokens), with times on the monotonic clock.
    """

    message: Add
    request: Request
    reserved_bytes: int
    sent_tokens: list[int] = field(default_factory=list)
    first: float = 0.0
    chunks: list[tuple[float, float, int]] = field(default_factory=list)

    def add_chunk(self, launched: float, finished: float, tokens: int) -> None:
        """Add a prompt chunk of a finished step. On a GPU, a step may be launched while the previous step runs. The
        chunk then starts when the previous chunk ends, so that chunks do not overlap. Above MAX_CHUNKS chunks,
        neighbours are merged in pairs.
        """
        chunks = self.chunks
        chunks.append((max(launched, chunks[-1][1]) if chunks else launched, finished, tokens))
        if len(chunks) > MAX_CHUNKS:
            pairs = zip(chunks[::2], chunks[1::2], strict=False)
            self.chunks = [(a[0], b[1], a[2] + b[2]) for a, b in pairs]
            if len(chunks) % 2:
                self.chunks.append(chunks[-1])


@dataclass(slots=True)
class _TenantQuota:
    """A tenant's quota in bytes, the bytes reserved by its open requests, and its waiting requests."""

    quota: int
    reserved: int = 0
    waiting: deque[tuple[Add, int]] = field(default_factory=deque)


class _AwaitedImages(NamedTuple):
    """A request that waits for encode workers. `requested` has the awaited embeddings by the index of the image."""

    message: Add
    requested: dict[int, Future[torch.Tensor | None]]


class Worker:
    """Runs the requests of one engine. Without `observe`, it sends neither stats nor progress. Without `images`, it
    refuses requests with images. `share_bytes` is the size to which the pool can always grow, if models share memory.
    After the first token of a stream, deltas have at least `stream_interval` tokens. Not thread-safe.
    """

    def __init__(
        self,
        engine: Engine,
        tenants: tuple[TenantConfig, ...] = (),
        observe: bool = True,
        share_bytes: int | None = None,
        images: ImagePrompts | None = None,
        stream_interval: int = 1,
    ) -> None:
        self.engine, self._observe = engine, observe
        self._stream_interval = stream_interval
        self._share_bytes = share_bytes
        if share_bytes is not None and engine.pool_size is not None:
            engine.resize_pool(engine.pool_size.pool_bytes)  # from now on the server decides about the size
            self._share(share_bytes)
        self._quotas = {t.name: _TenantQuota(t.quota) for t in tenants if t.quota is not None}
        self._open: dict[int, _OpenRequest] = {}
        self._by_order: dict[int, _OpenRequest] = {}  # open requests by request order
        self._finished_early: list[Request] = []  # requests that finished when they were added
        self._awaiting_first_token: dict[int, _OpenRequest] = {}  # by request order
        self._compiling: dict[int, tuple[Add, Grammar]] = {}
        self._compiled: dict[int, GrammarState] = {}  # keeps the grammar alive until the request is added
        self._images = images
        self._pins = RequestPins(engine)
        self._adapters = AdapterLoads(engine)
        self._adapter_answers: list[AdapterAnswer] = []
        self._image_inputs: dict[int, list[Image]] = {}  # until the request is added
        self._awaiting_embeddings: dict[int, _AwaitedImages] = {}
        self._transcriptions: dict[int, Transcription] = {}
        self._steps = 0
        self._rejected: list[Rejected] = []
        self._preemptions = self._finished_tokens = 0
        self._snapshot: CacheSnapshot | None = None  # created on the first request
        self._snapshot_requested = False
        self._stats_at = 0.0
        self._sent_evictions = 0
        self._tiers: list[TierUsage] = []
        self._stats_changed = True  # whether the stats have changed since they were last sent
        self._sent_slabs = engine.cache.usable_slabs
        self._resize_requested = False
        self._resize_number = 0

    @property
    def is_busy(self) -> bool:
        """Whether `step` has work to do or a message to send."""
        return (
            self.engine.busy
            or bool(self._rejected)
            or self._stats_changed
            or self._snapshot_requested
            or self._pool_changed
            or bool(self._adapter_answers)
        )

    @property
    def _pool_changed(self) -> bool:
        return self._resize_requested or self.engine.cache.usable_slabs != self._sent_slabs

    @property
    def needs_polling(self) -> bool:
        """Whether `poll_idle` must be called while idle."""
        engine = self.engine
        return engine.offload is not None or engine.pool_size is not None or engine.events is not None

    def poll_idle(self) -> None:
        """Poll transfers, images, grammars and the size of the pool. Call this method regularly while no step runs,
        because stores to tiers may finish after the last token.
        """
        self._enqueue_with_images()
        self._enqueue_encoded()
        self._enqueue_compiled()
        self._poll_adapters()
        self.engine.adjust_pool()
        offload = self.engine.offload
        if offload is not None:
            offload.poll()
            tiers = tier_usages(offload) if self._observe else []
            self._stats_changed, self._tiers = tiers != self._tiers, tiers
        if self.engine.events is not None:
            self.engine.events.flush()

    def handle(self, message: ToEngine) -> None:
        """Handle a message other than Start. The next step reports rejected requests."""
        assert not isinstance(message, Start)
        if isinstance(message, SnapshotRequest):
            self._snapshot_requested = True
            return
        self._stats_changed = True
        if isinstance(message, Cancel):
            self._cancel(message.id)
        elif isinstance(message, ResizePool):
            if message.share_bytes is not None:
                self._share(message.share_bytes)
            self.engine.resize_pool(message.pool_bytes)
            self._resize_requested, self._resize_number = True, message.number
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            self._adapters.submit(message)
            self._poll_adapters()
        elif isinstance(message, SetRole):
            self.engine.set_role(message.role)
        elif isinstance(message, EndSession):
            self._end_session(message.tenant, message.session)
        elif isinstance(message, ExpectSession):
            self.engine.expect_session(_session_key(message.tenant, message.session))
        elif message.image_prompt is not None:
            self._prepare_images(message)
        else:
            self._compile_grammar(message)

    def step(self) -> Outputs | None:
        """Run one engine step. Return its results, or None if there are none."""
        progress: list[RequestProgress] = []
        stepped, self._finished_early = self._finished_early, []
        self._enqueue_with_images()
        self._enqueue_encoded()
        self._enqueue_compiled()
        self._poll_adapters()
        if self.engine.busy:
            updated = self.engine.step()
            self._steps += 1
            if self.engine.scheduler.awaits_growth:
                time.sleep(GROWTH_SECONDS)
            if self._awaiting_first_token:
                progress = self._progress_of_step(updated)
            stepped += updated
        deltas: list[Delta] = []
        ended: list[_OpenRequest] = []
        for one in self._open_requests(stepped):
            if one.request.finish_reason == "slo":  # the request was deferred, and then refused
                self._refuse(one.message.id, one.request)
                ended.append(one)
            elif one.message.id in self._transcriptions:
                if one.request.finish_reason is not None and self._end_window(one, deltas):
                    ended.append(one)
            elif self._collect_deltas(one, deltas):
                ended.append(one)
        for one in ended:
            self._close(one)
            if self._observe:
                progress.append(_progress(one))
        rejected, self._rejected = self._rejected, []
        stats, snapshot, pool = self._stats(), self._take_snapshot(), self._take_pool_state()
        adapters, self._adapter_answers = self._adapter_answers, []
        has_output = (
            deltas
            or rejected
            or progress
            or adapters
            or any(part is not None for part in (stats, snapshot, pool))
        )
        return Outputs(deltas, rejected, stats, snapshot, progress, pool, adapters) if has_output else None

    def _open_requests(self, requests: list[Request]) -> list[_OpenRequest]:
        """Return the open requests to which `requests` belong, each once. Requests of one prompt belong to the same
        open request."""
        orders = dict.fromkeys((request.parent or request).order for request in requests)
        return [one for order in orders if (one := self._by_order.get(order)) is not None]

    def _poll_adapters(self) -> None:
        """Process queued LoadAdapter and UnloadAdapter messages, without waiting for files that are still being
        read. Collect the answers for the API process."""
        if self._adapters:
            self._adapter_answers += self._adapters.take()
            self._stats_changed = True

    def close(self, seconds: float) -> None:
        """Cancel all requests and close the engine. Takes at most `seconds`."""
        self.engine.close(seconds)

    def _progress_of_step(self, stepped: list[Request]) -> list[RequestProgress]:
        """Return the progress of prompts that started in this step or got their first token."""
        awaiting = self._awaiting_first_token
        launched, chunks = self.engine.finished_prefill
        now = time.monotonic()
        for order, tokens in chunks:
            if (one := awaiting.get(order)) is not None:
                one.add_chunk(launched, now, tokens)
        progress = [
            _progress(awaiting[r.order])
            for r in self.engine.scheduler.started_requests
            if r.order in awaiting
        ]
        for request in stepped:
            one = awaiting.pop(request.order, None)
            if one is not None:
                one.first = now
                progress.append(_progress(one))
        return progress

    def _take_snapshot(self) -> bytes | None:
        """Return a snapshot of the cache as JSON if a SnapshotRequest is open. Otherwise return None."""
        if not self._snapshot_requested:
            return None
        self._snapshot_requested = False
        self._snapshot = self._snapshot or CacheSnapshot(self.engine)
        return self._snapshot.json()

    def _take_pool_state(self) -> PoolState | None:
        """Return the size of the pool if it has changed since the last call, or if a ResizePool message needs an
        answer. Otherwise return None.
        """
        size = self.engine.pool_size
        if size is None or not self._pool_changed:
            return None
        self._sent_slabs, self._resize_requested = self.engine.cache.usable_slabs, False
        target = size.target * self.engine.layout.slab_bytes
        return PoolState(size.pool_bytes, target, self.max_tokens, self._resize_number)

    def _share(self, share_bytes: int) -> None:
        """Set this model's share of the memory that all models of the server use together. The pool can always grow to
        `share_bytes` bytes. A request that needs more than the present pool, and at most `share_bytes`, waits until the
        pool has grown.
        """
        self._share_bytes = share_bytes
        self.engine.scheduler.reachable_slabs = share_bytes // self.engine.layout.slab_bytes

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens that one request may have. If models share memory, it depends on the size to
        which the pool can always grow. Otherwise it depends on the present size of the pool.
        """
        pool_bytes = self.engine.cache.usable_slabs * self.engine.layout.slab_bytes
        return max_request_tokens(self.engine, self._share_bytes or pool_bytes)

    @property
    def is_preparing(self) -> bool:
        """Whether requests wait for their images, embeddings or grammars, or adapters are being loaded."""
        waits = self._compiling or self._images or self._awaiting_embeddings or self._adapters
        return bool(waits)

    def _prepare_images(self, message: Add) -> None:
        """Start to decode the images of a request in another thread, so that steps do not wait. The request enters the
        queue after its images are decoded."""
        if self._images is None:
            self._reject(message.id, ValueError("messages: this model accepts no images: send text"))
            return
        try:
            self._images.submit(message)
        except ImagesBusyError as error:
            self._reject(message.id, error)

    def _enqueue_with_images(self) -> None:
        while self._images is not None and (prepared := self._images.take()) is not None:
            message, images = prepared
            self._stats_changed = True
            if isinstance(images, ValueError):
                self._reject(message.id, images)
            elif isinstance(images, Transcription):
                self._transcriptions[message.id] = images
                self._begin_window(message)
            else:
                self._image_inputs[message.id] = images
                self._request_embeddings(message, images)

    def _begin_window(self, message: Add) -> bool:
        """Queue the next request of a transcription. Return False if the clip is transcribed."""
        window, vision = self._transcriptions[message.id].next(), self.engine.vision
        if window is None:
            return False
        assert vision is not None
        image = vision.read_image(window.clip, message.tenant, message.read, message.store)
        self._image_inputs[message.id] = [image]
        self._enqueue(msgspec.structs.replace(message, prompt=window.prompt, params=window.params))
        return True

    def _end_window(self, one: _OpenRequest, deltas: list[Delta]) -> bool:
        """Take the tokens of a window, and queue the request of the next one. After the last window, append the delta of
        the whole clip and return True."""
        id_, request = one.message.id, one.request
        transcription = self._transcriptions[id_]
        if request.finish_reason in ("stop", "length"):
            transcription.take_request(request, self.engine.eos)
            if transcription.next() is not None:
                self._close(one)
                self._begin_window(one.message)
                return False
        made = transcription.transcript(self.engine.tokenizer)
        whole = request.finish_reason in ("stop", "length")
        reason = made.finish_reason if whole else request.finish_reason
        deltas.append(
            Delta(
                id_,
                0,
                made.text,
                made.tokens,
                request.cached_tokens or 0,
                reason,
                prompt_tokens=_prompt_tokens(request),
                transcript=made,
            )
        )
        del self._transcriptions[id_]
        return True

    def _request_embeddings(self, message: Add, images: list[Image]) -> None:
        """Ask encode workers for the embeddings of a request's images, except for images in the cache. The request
        enters the queue after the encode workers have answered. Without encode workers, it continues at once."""
        encoders = self.engine.encoders
        if encoders is None:
            self._compile_grammar(message)
            return
        try:
            needed = self.engine.images_to_request(
                message.prompt, images, _control(message), message.awaits_peer
            )
        except ValueError as error:
            self._reject(message.id, error)
            return
        requested = {place: encoders.request(images[place], message.encoder) for place in needed}
        self._awaiting_embeddings[message.id] = _AwaitedImages(message, requested)

    def _enqueue_encoded(self) -> None:
        for id_, (message, requested) in list(self._awaiting_embeddings.items()):
            if all(one.done() for one in requested.values()):
                del self._awaiting_embeddings[id_]
                self._stats_changed = True
                images = self._image_inputs[id_]
                for place, one in requested.items():
                    images[place] = replace(images[place], embeddings=one.result())
                self._compile_grammar(message)

    def _compile_grammar(self, message: Add) -> None:
        """Start to compile the grammar of a request in another process, and queue the request when the grammar is
        ready. Steps do not wait for the grammar. A request without a grammar is queued at once."""
        try:
            grammar = self.engine.begin_grammar(message.params, message.tenant)
        except ValueError as error:
            self._reject(message.id, error)
            return
        if grammar is None:
            self._enqueue(message)
        elif grammar.ready:
            self._enqueue_with_grammar(message, grammar)
        else:
            self._compiling[message.id] = message, grammar

    def _enqueue_compiled(self) -> None:
        if not self._compiling:
            return
        self.engine.poll_grammars()
        for id_, (message, grammar) in list(self._compiling.items()):
            if grammar.ready:
                del self._compiling[id_]
                self._stats_changed = True
                self._enqueue_with_grammar(message, grammar)

    def _enqueue_with_grammar(self, message: Add, grammar: Grammar) -> None:
        try:
            self._compiled[message.id] = grammar.start()
        except ValueError as error:
            self._reject(message.id, error)
            return
        self._enqueue(message)

    def _reject(self, id_: int, error: ValueError) -> None:
        self._compiled.pop(id_, None)
        self._image_inputs.pop(id_, None)
        self._transcriptions.pop(id_, None)
        is_retryable = isinstance(error, GrammarBusyError | ImagesBusyError)
        self._rejected.append(Rejected(id_, str(error), is_retryable))

    def _refuse(self, id_: int, request: Request) -> None:
        """Refuse a request that cannot meet its objective."""
        assert request.slo is not None
        report = request.slo.report(0)
        self._transcriptions.pop(id_, None)
        self._rejected.append(Rejected(id_, report["refusal"], True, report))

    def _enqueue(self, message: Add) -> None:
        quota = self._quotas.get(message.tenant)
        if quota is None:
            self._add(message, 0)
            return
        reserved_bytes, length = self._bytes_needed(message), len(message.prompt) + message.params.max_tokens
        if reserved_bytes > quota.quota and self.engine.scheduler.runs_cold(
            length, message.tenant, quota.quota
        ):
            reserved_bytes = quota.quota  # cold pages are beyond the quota, in host memory
        if reserved_bytes > quota.quota:
            why = (
                f"{len(message.prompt)} prompt tokens and up to {message.params.max_tokens} output tokens need {reserved_bytes:,} "
                f"bytes of the pool; the tenant's quota is {quota.quota:,} bytes: request fewer tokens"
            )
            self._reject(message.id, ValueError(why))
            return
        quota.waiting.append((message, reserved_bytes))
        self._admit(quota)

    def _admit(self, quota: _TenantQuota) -> None:
        while quota.waiting and quota.reserved + quota.waiting[0][1] <= quota.quota:
            message, reserved_bytes = quota.waiting.popleft()
            if self._add(message, reserved_bytes):
                quota.reserved += reserved_bytes

    def _add(self, message: Add, reserved_bytes: int) -> bool:
        if (why := self._pins.check(message)) is not None:
            self._reject(message.id, ValueError(why))
            return False
        self._pins.free(self._bytes_needed(message))
        structure = self._compiled.pop(message.id, None)
        images = self._image_inputs.pop(message.id, ())
        retain = [RetainRange(one.start, one.stop, one.priority, one.ttl) for one in message.retain]
        if message.ttl is not None:
            retain.append(RetainRange(ttl=message.ttl))
        control = replace(_control(message), retain=tuple(retain))
        try:
            request = self.engine.add(
                message.prompt,
                message.params,
                control,
                message.priority,
                text=self.engine.tokenizer is not None,
                images=images,
                grammar=None if structure is None else structure.grammar,
                resume=message.resume,
                offers_pages=message.offers_pages,
                awaits_peer=message.awaits_peer,
                slo=message.slo,
                arrived=message.arrived,
                lora=message.lora,
            )
        except ValueError as error:
            self._reject(message.id, error)
            return False
        if request.finish_reason == "slo":
            self._refuse(message.id, request)
            return False
        one = self._open[message.id] = _OpenRequest(
            message, request, reserved_bytes, [0] * len(request.family)
        )
        self._by_order[request.order] = one
        if request.finish_reason is not None:
            self._finished_early.append(request)
        if self._observe:
            self._awaiting_first_token[request.order] = one
        return True

    def _cancel(self, id_: int) -> None:
        self._transcriptions.pop(id_, None)
        one = self._open.get(id_)
        if one is not None:
            self.engine.cancel(one.request)
            self._close(one)
            return
        self._compiling.pop(id_, None)
        self._compiled.pop(id_, None)
        self._image_inputs.pop(id_, None)
        self._awaiting_embeddings.pop(id_, None)
        if self._images is not None:
            self._images.cancel(id_)
        for quota in self._quotas.values():
            quota.waiting = deque(item for item in quota.waiting if item[0].id != id_)

    def _close(self, one: _OpenRequest) -> None:
        del self._open[one.message.id], self._by_order[one.request.order]
        self._awaiting_first_token.pop(one.request.order, None)
        self._preemptions += sum(answer.preemptions for answer in one.request.family)
        self._finished_tokens += _output_tokens(one.request)
        self._stats_changed = True
        if one.message.pin is not None and one.request.finish_reason in ("stop", "length", "grammar"):
            self._pins.add(one.message, one.request.control, one.request.activation)
        if one.message.ends_session and one.message.session is not None:
            self._end_session(one.message.tenant, one.message.session)
        quota = self._quotas.get(one.message.tenant)
        if quota is not None:
            quota.reserved -= one.reserved_bytes
            self._admit(quota)

    def _end_session(self, tenant: str, session: str) -> None:
        key = _session_key(tenant, session)
        self._pins.end_session(key)
        self.engine.end_session(key)

    def _bytes_needed(self, message: Add) -> int:
        """Return the largest number of pool bytes that a prompt and its answers can use. The full blocks of the prompt
        count once, because all answers share them.
        """
        layout = self.engine.layout
        more, samples = message.params.max_tokens, message.params.samples
        first = layout.slab_bytes_for(len(message.prompt) + more)
        return first + (samples - 1) * layout.slab_bytes_for(more + layout.block_tokens)

    def _collect_deltas(self, one: _OpenRequest, deltas: list[Delta]) -> bool:
        """Append the new deltas of a request. Return whether all its answers have finished."""
        request = one.request
        if one.message.stream and not request.children:  # the common case, without lists
            sent, count, reason = one.sent_tokens[0], request.output_count, request.finish_reason
            if count - sent >= (self._stream_interval if sent else 1) or reason is not None:
                deltas.append(self._delta(one, 0, request, sent))
                one.sent_tokens[0] = count
            return reason is not None
        answers = request.family
        if one.message.stream:
            for index, answer in enumerate(answers):
                sent, count = one.sent_tokens[index], answer.output_count
                enough = count - sent >= (self._stream_interval if sent else 1)
                if sent >= 0 and (enough or answer.finish_reason is not None):
                    deltas.append(self._delta(one, index, answer, sent))
                    one.sent_tokens[index] = -1 if answer.finish_reason is not None else count
            return all(sent < 0 for sent in one.sent_tokens)
        if any(answer.finish_reason is None for answer in answers):
            return False
        deltas += [self._delta(one, i, answer, 0) for i, answer in enumerate(one.request.returned_samples)]
        return True

    def _delta(self, one: _OpenRequest, index: int, answer: Request, sent: int) -> Delta:
        logprobs, prompt = None, None
        if answer.params.logprobs is not None:
            logprobs = _triples(answer.logprobs[sent:])
        if answer.params.prompt_logprobs is not None and not index:
            prompt = _triples(one.request.prompt_logprobs[1:])  # the first token has no log-probability
        return Delta(
            one.message.id,
            index,
            "" if answer.text is None else answer.text.take(),
            answer.tokens[len(answer.prompt) + sent :],
            one.request.cached_tokens or 0,
            answer.finish_reason,
            answer.stop_reason,
            logprobs,
            prompt,
            _prompt_tokens(one.request),
            None if answer.embedding is None else answer.embedding.astype("<f4").tobytes(),
            one.request.reused_tokens,
        )

    def _stats(self) -> EngineStats | None:
        if not self._observe:
            self._mark_reported()
            return None
        now = time.monotonic()
        idle = not self.engine.busy
        wait = SHORT_SECONDS - STATS_SECONDS if self._lacks_pages else 0.0
        if not (self._stats_changed and idle) and now < self._stats_at + wait:
            return None
        self._stats_at = now + STATS_SECONDS
        self._sent_evictions = self.engine.cache.inspect.evicted.total()
        self._mark_reported()
        waiting_for_quota = {name: len(quota.waiting) for name, quota in self._quotas.items()}
        open_requests = [(one.message.tenant, one.request.started > 0) for one in self._open.values()]
        made = self._finished_tokens + sum(_output_tokens(one.request) for one in self._open.values())
        stats = engine_stats(
            self.engine, self._steps, made, self._preemptions, waiting_for_quota, open_requests
        )
        return msgspec.structs.replace(stats, needs_growth=True) if self._needs_growth else stats

    @property
    def _lacks_pages(self) -> bool:
        """Whether this model shares memory with other models, and lacks pages: it has evicted pages since its last
        stats message, or requests wait for pages."""
        if not self._share_bytes:
            return False
        evictions = self.engine.cache.inspect.evicted.total()
        awaits_growth = self.engine.scheduler.awaits_growth
        return awaits_growth or evictions > self._sent_evictions or self._needs_growth

    @property
    def _needs_growth(self) -> bool:
        """Whether this model shares memory with other models, and an open request needs more pages than its pool has."""
        if not self._share_bytes:
            return False
        longest = max((len(one.request.tokens) for one in self._open.values()), default=0)
        needed = self.engine.layout.slab_bytes_for(longest)
        return needed > self.engine.cache.usable_slabs * self.engine.layout.slab_bytes

    def _mark_reported(self) -> None:
        """Record that the latest stats were sent. If the engine is busy, `_stats_changed` is not reset, so that stats
        are sent once more when the engine becomes idle."""
        self._stats_changed = self._stats_changed and self.engine.busy


def _progress(one: _OpenRequest) -> RequestProgress:
    request, stop = one.request, one.request.pool_miss
    return RequestProgress(
        one.message.id,
        request.looked_up,
        request.started,
        one.first,
        request.cached_tokens or 0,
        request.hits,
        0 if stop is None else stop.position,
        "" if stop is None else stop.reason,
        None if stop is None else stop.when,
        None if stop is None else stop.policy,
        request.in_other_tenant,
        sum(answer.preemptions for answer in request.family),
        request.loads,
        _prompt_tokens(request),
        sum(answer.draft_tokens for answer in request.family),
        sum(answer.accepted_tokens for answer in request.family),
        None if request.slo is None else request.slo.report(request.output_count),
        one.chunks,
        request.reused_tokens,
    )


def max_request_tokens(engine: Engine, pool_bytes: int, tenant: str = "") -> int:
    """Return the largest number of tokens that one request may have. The number depends on the model, on `pool_bytes`,
    and on the host memory for cold pages. Cold pages are pages of a running request that do not fit into the pool.
    """
    low, high = 1, engine.cache.max_tokens
    while low < high:
        middle = (low + high + 1) // 2
        fits = engine.layout.slab_bytes_for(middle) <= pool_bytes
        fits = fits or engine.scheduler.runs_cold(middle, tenant, pool_bytes)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _output_tokens(request: Request) -> int:
    """Return the number of output tokens of all answers to a prompt so far."""
    return sum(answer.output_count for answer in request.family)


def _prompt_tokens(request: Request) -> int | None:
    """Return the number of prompt tokens of a request with images. Return None for other requests, because the API
    process has counted their tokens, including texts that an encoder reads.
    """
    return None if request.images is None or request.images.is_prompt else len(request.prompt)


def _control(message: Add) -> CacheControl:
    """Return the caching options of a request as a CacheControl. The priorities of token ranges are not part of it."""
    session = None if message.session is None else _session_key(message.tenant, message.session)
    return CacheControl(
        tenant=message.tenant,
        salt=message.salt,
        store=message.store,
        read=message.read,
        session=session,
        lossy=message.lossy,
        public_tokens=message.public_tokens,
        documents=tuple(message.documents),
    )


def _session_key(tenant: str, session: str) -> str:
    """Return the key of a session in the cache. Keys of different tenants never collide."""
    return f"{len(tenant)}:{tenant}:{session}"


def _triples(places: list[TokenLogprobs] | list[TokenLogprobs | None]) -> list[list[TokenLogprob]]:
    return [[(token, p.logprob, p.rank) for token, p in (place or {}).items()] for place in places]

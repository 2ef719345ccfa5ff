"""Replays traffic over several workers behind a router, with a virtual clock. The real router classes choose the
workers.

    arrival ──▶ route (FleetIndex, Scorer; or round robin) ──▶ worker: queue, steps of at most `token_budget` tokens
                    ▲── block events, first tokens, ends ──────────┘   a real KVCache holds its blocks

A block of the trace is one block of the cache, as in `simulator`. Output tokens also use pages, but are never hit.
A step takes `prefill(prompt tokens in it)` plus, if requests decode in it, `decode(share of the pool that they
occupy)`. The default times are those of Dynamo's simulator (its polynomial model), so that both routers can be
compared under one cost model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvloom.cluster.router import FleetIndex, Scorer, ScoringOptions, SpeedModel, WorkerLoad
from kvloom.core import (
    HASH_TOKENS,
    BlockStored as Stored,
    CacheControl,
    Event,
    Field,
    KVCache,
    LayerSpec,
    PoolLayout,
    Sequence as CacheSequence,
    VirtualClock,
    Visibility,
    hash_chain,
    token_bytes,
)
from kvloom.events_wire import GPU, BlockRemoved, BlockStored, EventBatch, wire_hash, wire_hashes

from .routes import ROUTES
from .traffic import Request, Traffic

__all__ = ["EngineModel", "FleetOutcome", "replay_fleet"]

_LAYOUT = PoolLayout.build(
    {"block": LayerSpec("token", (Field("kv", (1,), "int8"),), Visibility("full"))}, HASH_TOKENS
)
_NO_TOKENS = msgspec.Raw(b"\x90")


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Times and limits of a worker. The polynomials are in milliseconds, highest power first."""

    token_budget: int = 8192
    max_running: int = 256
    prefill_ms: tuple[float, float, float] = (4.209989e-07, 1.518344e-02, 1.650142e01)
    decode_ms: tuple[float, float, float] = (-25.74, 54.01, 5.74)

    def prefill(self, tokens: int) -> float:
        """Return the seconds for the prompt tokens of a step."""
        a, b, c = self.prefill_ms
        return 1e-3 * ((a * tokens + b) * tokens + c)

    def decode(self, share: float) -> float:
        """Return the seconds for the decode tokens of a step. Their requests occupy `share` of the pool."""
        a, b, c = self.decode_ms
        return 1e-3 * ((a * share + b) * share + c)


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """Result of a replay over workers. Times are in seconds. The hit rate is a share of the prompt tokens."""

    route: str
    workers: int
    blocks: int
    speed: float
    hit_rate: float
    mean_ttft: float
    p50_ttft: float
    p99_ttft: float
    mean_itl: float
    preemptions: int
    spread: float
    """Requests of the worker with the most requests, divided by the mean of all workers."""

    def to_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True, eq=False)
class _Job:
    """A request on a worker. `computed`, `cached` and `output` count tokens of the trace. `ids` are the prompt's
    tokens in the simulated cache."""

    number: int
    request: Request
    ids: npt.NDArray[np.int32]
    hashes: list[int]
    at: float
    cached: int | None = None
    computed: int = 0
    output: int = 0
    sequence: CacheSequence | None = None
    first: float = 0.0
    last: float = 0.0

    @property
    def is_decoding(self) -> bool:
        return self.computed >= self.request.prompt_tokens and self.sequence is not None


class _Worker:
    """One simulated worker: a queue, running requests, and a real cache."""

    def __init__(
        self, name: str, blocks: int, block_tokens: int, longest: int, model: EngineModel, router: _Router
    ) -> None:
        self.name, self.model, self.router = name, model, router
        self.block_tokens, self.total = block_tokens, blocks * block_tokens
        self.clock = VirtualClock()
        self.cache = KVCache(
            _LAYOUT, blocks + 1, max_sequences=model.max_running + 1, max_tokens=longest, clock=self.clock
        )
        self.events: list[BlockStored | BlockRemoved] = []
        self.cache.events.subscribe(self._on_event)
        self.waiting: deque[_Job] = deque()
        self.running: list[_Job] = []
        self.time = 0.0
        self.preemptions = 0
        self._work: list[tuple[_Job, int]] = []
        self._end: float | None = None

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Stored):
            if not event.tail_tokens:
                parent = wire_hash(event.parent)
                self.events.append(
                    BlockStored(list(wire_hashes(event.hashes)), parent, _NO_TOKENS, HASH_TOKENS, medium=GPU)
                )
        else:
            self.events.append(BlockRemoved(list(wire_hashes(event.hashes)), GPU))

    def add(self, job: _Job) -> None:
        self.waiting.append(job)
        self.time = max(self.time, job.at)

    def advance(self, until: float) -> None:
        """Run all steps that end by the time `until`. Afterwards one more step may be in progress."""
        while True:
            if self._end is not None:
                if self._end > until:
                    return
                self._finish_step()
            if self.time >= until or not (self.running or self.waiting):
                return  # requests that arrive now share the next step
            self._begin_step(until)

    def _length(self, tokens: int) -> int:
        """Return the number of cache tokens that represent `tokens` tokens of the trace."""
        blocks, rest = divmod(tokens, self.block_tokens)
        return blocks * HASH_TOKENS + -(-rest * HASH_TOKENS // self.block_tokens)

    def _grow(self, job: _Job, tokens: int) -> bool:
        """Extend a job's sequence to `tokens` tokens of the trace. Returns False if the pool lacks pages."""
        seq = job.sequence
        assert seq is not None
        now = int(self.cache.lengths[seq.row])
        new = self._length(tokens) - now
        if new <= 0:
            return True
        if seq.extend(new):
            return False
        own = job.ids[now : now + new]
        if len(own) < new:
            own = np.concatenate((own, np.full(new - len(own), 2**31 - 2 - job.number, np.int32)))
        seq.commit(own)
        return True

    def _begin_step(self, until: float) -> None:
        decoding = [job for job in self.running if job.is_decoding]
        for job in decoding:
            if job.sequence is not None and not self._grow(job, job.computed + job.output):
                self._preempt_for(job)
        decoding = [job for job in decoding if job.sequence is not None]
        budget = self.model.token_budget - len(decoding)
        self._work = []
        for job in self.running:
            if not job.is_decoding and budget > 0:
                budget -= self._schedule(job, budget)
        while self.waiting and budget > 0 and len(self.running) < self.model.max_running:
            job = self.waiting[0]
            self._open(job)
            taken = self._schedule(job, budget)
            if not taken:
                self._close(job)
                break
            budget -= taken
            self.running.append(self.waiting.popleft())
        active = sum(job.request.prompt_tokens + job.output for job in decoding)
        prompt = sum(tokens for _, tokens in self._work)
        if not prompt and not decoding:
            raise RuntimeError(
                f"a request of {self.waiting[0].request.prompt_tokens} tokens exceeds the pool"
            )
        if prompt:
            seconds = self.model.prefill(prompt)
            seconds += self.model.decode(min(1.0, active / self.total)) if decoding else 0.0
            self._end = self.time + seconds
            return
        self._end = self._decode_alone(decoding, active, until)

    def _decode_alone(self, decoding: list[_Job], active: int, until: float) -> float:
        """Run decode steps until a request ends or `until` is reached. Returns the end of the last step."""
        left = min(job.request.output_tokens - job.output for job in decoding)
        left = min(left, self.block_tokens)  # then their sequences grow
        (a, b, c), n, total = self.model.decode_ms, len(decoding), self.total
        time, steps = self.time, 0
        while True:
            share = min(1.0, active / total)
            end = time + 1e-3 * ((a * share + b) * share + c)
            steps += 1
            active += n
            if steps >= left or end > until:
                break
            time = end
        for job in decoding:  # all but the last step are over
            job.output += steps - 1
            job.last = time
            if steps > 1:
                self.router.grew(self.name, job, steps - 1)
        self.time = time
        return end

    def _preempt_for(self, job: _Job) -> None:
        """Preempt the youngest requests until the pool has the pages for the next token of `job`."""
        while self.running:
            youngest = self.running.pop()
            self._close(youngest)
            youngest.computed = 0
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is job or self._grow(job, job.computed + job.output):
                return

    def _open(self, job: _Job) -> None:
        match = self.cache.match(job.ids)
        job.sequence = self.cache.open(match)
        job.computed = match.resume // HASH_TOKENS * self.block_tokens
        if job.cached is None:
            job.cached = job.computed

    def _close(self, job: _Job) -> None:
        if job.sequence is not None:
            job.sequence.close()
            job.sequence = None

    def _schedule(self, job: _Job, budget: int) -> int:
        """Add the next prompt tokens of a job to the step. Returns their number, which is 0 if the pool lacks pages."""
        tokens = min(budget, job.request.prompt_tokens - job.computed)
        end = job.computed + tokens
        whole = end if end == job.request.prompt_tokens else end // self.block_tokens * self.block_tokens
        if not self._grow(job, whole):
            return 0
        self._work.append((job, tokens))
        return tokens

    def _finish_step(self) -> None:
        assert self._end is not None
        self.clock.advance(self._end - self.clock.now())
        self.time, self._end = self._end, None
        prefilled = {id(job) for job, _ in self._work}
        for job in self.running:
            if job.is_decoding and id(job) not in prefilled:
                job.output += 1
                job.last = self.time
                self.router.grew(self.name, job, 1)
        for job, tokens in self._work:
            job.computed += tokens
            if job.computed >= job.request.prompt_tokens:
                job.output += 1
                job.last = self.time
                if not job.first:
                    job.first = self.time
                    self.router.first_token(self.name, job, self.time)
        self._work = []
        for job in [job for job in self.running if job.output >= max(1, job.request.output_tokens)]:
            self.running.remove(job)
            self._close(job)
            self.router.ended(self.name, job, self.time)
        if self.events:
            self.router.apply(self.name, EventBatch(self.time, list(self.events)))
            self.events.clear()


class _Router:
    """The real router classes, with input from simulated workers."""

    def __init__(self, route: str, options: ScoringOptions | None) -> None:
        self.route = route
        self.index, self.scorer = FleetIndex(), Scorer(options)
        self._speed = SpeedModel()
        self._turn = 0
        self.names: list[str] = []

    def add(self, name: str, capacity: int) -> None:
        self.names.append(name)
        self.index.add(name)
        self.scorer.loads[name] = WorkerLoad(capacity, self._speed)

    def choose(self, job: _Job, scale: int, now: float) -> str:
        if self.route == "round-robin":
            self._turn += 1
            return self.names[self._turn % len(self.names)]
        lengths = {
            name: tuple(tokens * scale for tokens in found)
            for name, found in self.index.lengths(job.hashes).items()
        }
        prompt = job.request.prompt_tokens
        choice = self.scorer.choose(prompt, lengths, self.names, now, job.request.session)
        assert choice is not None
        self.scorer.loads[choice.worker].sent(job, prompt - choice.cached, prompt, now)
        self.index.expect(choice.worker, job.hashes)
        return choice.worker

    def apply(self, worker: str, batch: EventBatch) -> None:
        if self.route == "kv":
            self.index.apply(worker, batch)

    def first_token(self, worker: str, job: _Job, now: float) -> None:
        if self.route == "kv":
            self.scorer.loads[worker].first_token(job, now)
            self.index.arrived(worker, job.hashes)

    def grew(self, worker: str, job: _Job, tokens: int) -> None:
        if self.route == "kv":
            self.scorer.loads[worker].grew(job, tokens)

    def ended(self, worker: str, job: _Job, now: float) -> None:
        if self.route == "kv":
            self.scorer.loads[worker].ended(job, now)


def replay_fleet(
    traffic: Traffic,
    workers: int,
    blocks: int,
    route: str = "kv",
    *,
    speed: float = 1.0,
    model: EngineModel | None = None,
    options: ScoringOptions | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> FleetOutcome:
    """Replay `traffic` over `workers` workers of `blocks` blocks each. `speed` divides the times between arrivals.

    Takes about 20 seconds for 12,000 requests. Raises ValueError for a prompt that exceeds a pool."""
    if route not in ROUTES:
        raise ValueError(f"unknown route {route!r}; known: {', '.join(ROUTES)}")
    if workers < 1 or blocks < 1 or speed <= 0:
        raise ValueError(f"workers {workers}, blocks {blocks} and speed {speed} must be positive")
    if not traffic.requests:
        raise ValueError("the traffic contains no requests")
    model = model or EngineModel()
    block = traffic.block_tokens
    most = max(r.prompt_tokens + r.output_tokens for r in traffic.requests)
    if most > blocks * block:
        raise ValueError(f"a request of {most} tokens exceeds a pool of {blocks} blocks of {block} tokens")
    router = _Router(route, options)
    longest = (most // block + 2) * HASH_TOKENS
    fleet = {f"w{i}": _Worker(f"w{i}", blocks, block, longest, model, router) for i in range(workers)}
    for name in fleet:
        router.add(name, blocks * block)
    root = next(iter(fleet.values())).cache.root_hash(CacheControl())
    begin = traffic.requests[0].at
    jobs: list[_Job] = []
    counts = dict.fromkeys(fleet, 0)
    for number, request in enumerate(traffic.requests):
        at = (request.at - begin) / speed
        for worker in fleet.values():
            worker.advance(at)
        job = _job(number, request, at, block, root)
        name = router.choose(job, block // HASH_TOKENS, at)
        counts[name] += 1
        fleet[name].add(job)
        jobs.append(job)
        if number % 256 == 255:
            progress(number + 1)
    for worker in fleet.values():
        worker.advance(float("inf"))
    progress(len(jobs))
    return _outcome(jobs, route, fleet, counts, blocks, speed)


def _job(number: int, request: Request, at: float, block: int, root: bytes) -> _Job:
    """Return a request with its tokens in the cache. All tokens of a whole block are the block's id. All tokens of
    the partial last block are an id of this request."""
    whole, rest = divmod(request.prompt_tokens, block)
    ids = np.repeat(request.blocks[:whole].astype(np.int32), HASH_TOKENS)
    tail = np.full(-(-rest * HASH_TOKENS // block), 2**31 - 2 - number, np.int32)
    hashes = wire_hashes(hash_chain(root, token_bytes(ids)))
    return _Job(number, request, np.concatenate((ids, tail)), hashes, at)


def _outcome(
    jobs: Sequence[_Job],
    route: str,
    fleet: dict[str, _Worker],
    counts: dict[str, int],
    blocks: int,
    speed: float,
) -> FleetOutcome:
    ttft = np.array([job.first - job.at for job in jobs])
    steps = [job for job in jobs if job.output > 1]
    itl = sum((job.last - job.first) / (job.output - 1) for job in steps) / max(1, len(steps))
    return FleetOutcome(
        route,
        len(fleet),
        blocks,
        speed,
        hit_rate=sum(job.cached or 0 for job in jobs) / sum(job.request.prompt_tokens for job in jobs),
        mean_ttft=float(ttft.mean()),
        p50_ttft=float(np.quantile(ttft, 0.5)),
        p99_ttft=float(np.quantile(ttft, 0.99)),
        mean_itl=itl,
        preemptions=sum(worker.preemptions for worker in fleet.values()),
        spread=max(counts.values()) * len(fleet) / len(jobs),
    )

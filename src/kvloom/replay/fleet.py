"""Replays traffic over several workers behind a router, with a virtual clock. The router's own classes choose the
workers, and the engine's own SLO admission admits and refuses.

    arrival ──▶ route (FleetIndex, Scorer; or round robin) ──▶ worker: queue, steps of at most `token_budget` tokens
                    ▲── block events, first tokens, ends ──────────┘   a real KVCache contains its blocks
    with roles:  prefill worker ──chunks over its link──▶ decode worker

A block of the trace is one block of the cache, as in `simulator`. Output tokens also use pages, but are never hit.

    seconds of a step = prefill(prompt tokens in it) + decode(share of the pool that its decoding requests occupy)

The default times are those of Dynamo's simulator (its polynomial model), so that both routers can be compared under
one cost model.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from kvloom.cluster.router import Choice, FleetIndex, Scorer, ScoringOptions, SpeedModel, WorkerLoad
from kvloom.core import (
    DEFAULT_POLICY,
    HASH_TOKENS,
    Backlog,
    BlockStored as Stored,
    CacheControl,
    Decoding,
    Event,
    Field,
    KVCache,
    LayerSpec,
    Objective,
    PoolLayout,
    Prediction,
    PromptWork,
    Sequence as CacheSequence,
    SloAdmission,
    StepSize,
    Verdict,
    VirtualClock,
    Visibility,
    hash_chain,
    token_bytes,
)
from kvloom.events_wire import GPU, BlockRemoved, BlockStored, EventBatch, wire_hash, wire_hashes

from .routes import ADMISSIONS, ROUTES
from .traffic import Request, Traffic

__all__ = ["EngineModel", "FleetOutcome", "replay_fleet"]

HAND_OVER_TOKENS = 256
"""A decode worker computes a prompt itself if it lacks fewer tokens of the prompt than this. HAND_OVER_TOKENS is also
the largest number of prompt tokens in a step of a decode worker.
"""
ATTEMPTS = 4
"""Number of workers that may refuse a request before the router returns the refusal."""
TYPICAL_OUTPUT, OUTPUT_MEMORY = 256, 32
"""Until the first request has finished, TYPICAL_OUTPUT is the estimated number of output tokens of a request. Later the
estimate is a moving mean over about OUTPUT_MEMORY requests. The engine uses the same values.
"""

_LAYOUT = PoolLayout.build(
    {"block": LayerSpec("token", (Field("kv", (1,), "int8"),), Visibility("full"))}, HASH_TOKENS
)
_NO_TOKENS = msgspec.Raw(b"\x90")


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Times and limits of a worker. `prefill_ms` and `decode_ms` are the coefficients of two polynomials, the highest
    power first. Their results are milliseconds.

    - `prefill_ms`: the variable is the number of prompt tokens in a step.
    - `decode_ms`: the variable is the share of the pool that decoding requests occupy.
    """

    token_budget: int = 8192
    max_running: int = 256
    prefill_ms: tuple[float, float, float] = (4.209989e-07, 1.518344e-02, 1.650142e01)
    decode_ms: tuple[float, float, float] = (-25.74, 54.01, 5.74)

    def prefill(self, tokens: int) -> float:
        """Return the seconds for the prompt tokens of a step."""
        a, b, c = self.prefill_ms
        return 1e-3 * ((a * tokens + b) * tokens + c)

    def decode(self, share: float) -> float:
        """Return the seconds for the decode tokens of a step whose requests occupy `share` of the pool."""
        a, b, c = self.decode_ms
        return 1e-3 * ((a * share + b) * share + c)


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """Result of a replay over workers. Times are in seconds. The hit rate is the fraction of prompt tokens that were
    cached.
    """

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
    """Number of requests of the busiest worker, divided by the mean over all workers."""
    prefill: int = 0
    """Number of workers that only compute prompts. If it is not 0, the other workers only decode."""
    admission: str = "none"
    p99_tbt: float = 0.0
    """99th percentile of the requests' mean times between tokens, in seconds."""
    refused: int = 0
    met: int = 0
    """Number of requests that met the objective."""
    goodput: float = 0.0
    """Requests that met the objective, divided by the seconds from the first to the last arrival."""
    hand_overs: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    """Number of removed blocks in the events of all workers."""
    index_blocks: int = 0
    """Number of blocks in the router's index at the end."""
    seconds: float = 0.0
    """Simulated seconds from the first arrival to the last end."""
    choice_us: float = 0.0
    """Microseconds of CPU time that the router takes to choose a worker."""
    event_blocks_per_second: float = 0.0
    """Blocks per second of CPU time that entered or left the router's index."""

    def to_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True, eq=False)
class _Job:
    """A request on a worker.

    - `cached` is the number of prompt tokens that were cached when the request first started.
    - `computed` is the number of prompt tokens that are cached or computed so far.
    - `output` is the number of output tokens so far.
    - `ids` are the tokens that represent the prompt in the simulated cache.

    The first three count tokens of the trace.
    """

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
    compute: int = 0
    """Number of prompt tokens that the cache lacked when the request was added."""
    prediction: Prediction | None = None
    due: float = float("inf")
    """Simulated time in seconds at which the first token is due, by the objective."""
    is_refused: bool = False
    pages_at: float | None = None
    """Simulated time in seconds at which the pages arrive from a prefill worker. None if this worker computes the
    prompt."""
    decoded_by: _Worker | None = None
    """The decode worker of the request, while a prefill worker computes its prompt."""

    @property
    def is_decoding(self) -> bool:
        return self.computed >= self.request.prompt_tokens and self.sequence is not None

    @property
    def output_tokens(self) -> int:
        """Number of tokens that the worker generates. A prefill worker generates one token."""
        return 1 if self.decoded_by is not None else max(1, self.request.output_tokens)

    @property
    def tbt(self) -> float | None:
        """Mean seconds between tokens, or None for a single token."""
        return (self.last - self.first) / (self.output - 1) if self.output > 1 else None

    def meets(self, objective: Objective) -> bool:
        """Return whether the request was served within its objective."""
        ttft, tbt = objective.ttft_ms, objective.tbt_ms
        if self.is_refused or (ttft is not None and 1e3 * (self.first - self.at) > ttft):
            return False
        return tbt is None or self.tbt is None or 1e3 * self.tbt <= tbt


class _Worker:
    """One simulated worker: a queue, running requests, and a real cache."""

    def __init__(
        self,
        name: str,
        blocks: int,
        block_tokens: int,
        longest: int,
        model: EngineModel,
        router: _Router,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        self.name, self.model, self.router = name, model, router
        self.block_tokens, self.total = block_tokens, blocks * block_tokens
        self.clock = VirtualClock()
        self.cache = KVCache(
            _LAYOUT,
            blocks + 1,
            max_sequences=model.max_running + 1,
            max_tokens=longest,
            policy=policy,
            clock=self.clock,
        )
        self.events: list[BlockStored | BlockRemoved] = []
        self.cache.events.subscribe(self._on_event)
        self.waiting: deque[_Job] = deque()
        self.running: list[_Job] = []
        self.time = 0.0
        self.preemptions = 0
        self.slo = SloAdmission()
        self.is_measured = False
        """Whether steps are measured for SLO admission."""
        self.typical = float(TYPICAL_OUTPUT)
        self.link_free = 0.0
        """Simulated time in seconds at which the link of this prefill worker has sent all chunks so far."""
        self.link_tokens = float("inf")
        """Speed of the link in tokens per second."""
        self.hand_overs: list[_Job] = []
        """Prompts that a prefill worker has computed. Their `pages_at` is set."""
        self._work: list[tuple[_Job, int]] = []
        self._end: float | None = None
        self._size, self._step_seconds = StepSize(), 0.0

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Stored):
            if not event.tail_tokens:
                parent = wire_hash(event.parent)
                self.events.append(
                    BlockStored(list(wire_hashes(event.hashes)), parent, _NO_TOKENS, HASH_TOKENS, medium=GPU)
                )
        else:
            self.events.append(BlockRemoved(list(wire_hashes(event.hashes)), GPU))

    @property
    def due(self) -> float | None:
        """The next time at which the simulation must advance this worker: the end of its step in progress or, between
        two steps, its present time. None if the worker has no requests.
        """
        return self._end if self._end is not None else self.time if self.waiting or self.running else None

    def add(self, job: _Job, at: float) -> None:
        self.waiting.append(job)
        if at > self.time and self._end is None:
            self.slo.observe_idle(at - self.time)
        self.time = max(self.time, at)

    def missing(self, job: _Job) -> int:
        """Return the number of prompt tokens of a job that the worker must compute, at least 1."""
        if job.pages_at is not None:
            return 1
        found = self.cache.match(job.ids).resume // HASH_TOKENS * self.block_tokens
        return max(1, job.request.prompt_tokens - found)

    def work(self, job: _Job, tokens: int) -> PromptWork:
        output = 1 if job.decoded_by is not None else int(self.typical)
        return PromptWork(tokens, output, job.request.prompt_tokens)

    def predict(self, own: PromptWork, now: float) -> Prediction | None:
        """Predict the times of a new request. `own` is the work of its prompt. Return None until enough steps are
        measured."""
        prompts = [
            self.work(job, job.request.prompt_tokens - job.computed)
            for job in self.running
            if not job.is_decoding
        ]
        prompts += [replace(self.work(job, job.compute), due=job.due - now) for job in self.waiting]
        decoding = [
            Decoding(
                job.request.prompt_tokens + job.output, max(1.0, self.typical - job.output, job.output / 4)
            )
            for job in self.running
            if job.is_decoding
        ]
        backlog = Backlog(
            prompts,
            decoding,
            0,
            self.model.token_budget,
            self.model.max_running,
            self.total,
            0.0 if self._end is None else max(0.0, self._end - now),
        )
        return self.slo.predict(own, backlog)

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
        """Convert a number of tokens of the trace to tokens of the simulated cache. There, each block of the trace
        has HASH_TOKENS tokens.
        """
        blocks, rest = divmod(tokens, self.block_tokens)
        return blocks * HASH_TOKENS + -(-rest * HASH_TOKENS // self.block_tokens)

    def _grow(self, job: _Job, tokens: int) -> bool:
        """Extend a job's sequence to `tokens` tokens of the trace. Return False if the pool lacks pages."""
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
        pairs = sum(tokens * (job.computed + tokens / 2) for job, tokens in self._work)
        self._size = StepSize(prompt, len(decoding), active, pairs)
        if prompt:
            seconds = self.model.prefill(prompt)
            seconds += self.model.decode(min(1.0, active / self.total)) if decoding else 0.0
            self._step_seconds, self._end = seconds, self.time + seconds
            return
        self._end = self._decode_alone(decoding, active, until)
        self._step_seconds = self._end - self.time

    def _decode_alone(self, decoding: list[_Job], active: int, until: float) -> float:
        """Run steps without prompt tokens until a request ends, a block is full, or `until` is reached. `active` is the
        number of tokens of the `decoding` requests. All steps but the last are complete when this method returns.
        Return the time at which the last step ends.
        """
        left = min(job.output_tokens - job.output for job in decoding)
        left = min(left, self.block_tokens)  # after this many tokens the sequences need new blocks
        (a, b, c), n, total = self.model.decode_ms, len(decoding), self.total
        at, steps, first = self.time, 0, active
        while True:
            share = min(1.0, active / total)
            end = at + 1e-3 * ((a * share + b) * share + c)
            steps += 1
            active += n
            if steps >= left or end > until:
                break
            at = end
        if self.is_measured and steps > 1:
            middle = StepSize(rows=n, context=(first + active) / 2)
            self.slo.observe_step(middle, (at - self.time) / (steps - 1), steps - 1)
        for job in decoding:  # all steps but the last have ended
            job.output += steps - 1
            job.last = at
            if steps > 1:
                self.router.grew(self.name, job, steps - 1)
        self.time = at
        return end

    def _preempt_for(self, job: _Job) -> None:
        """Preempt running requests, the youngest first, until the pool has pages for the next token of `job`. Stops if
        `job` itself was preempted.
        """
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
        if job.pages_at is not None:  # all pages were pulled, except the page of the last token
            job.computed = job.request.prompt_tokens - 1
        if job.cached is None:
            job.cached = job.computed

    def _close(self, job: _Job) -> None:
        if job.sequence is not None:
            job.sequence.close()
            job.sequence = None

    def _schedule(self, job: _Job, budget: int) -> int:
        """Add the next prompt tokens of a job to the step. Return the number of added tokens, which is 0 if the pool
        lacks pages."""
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
        if self.is_measured:
            self.slo.observe_step(self._size, self._step_seconds)
        self.time, self._end = self._end, None
        prefilled = {id(job) for job, _ in self._work}
        for job in self.running:
            if job.is_decoding and id(job) not in prefilled:
                job.output += 1
                job.last = self.time
                self.router.grew(self.name, job, 1)
        for job, tokens in self._work:
            job.computed += tokens
            if job.decoded_by is not None:  # a chunk is sent while the next chunk is computed
                self.link_free = max(self.time, self.link_free) + tokens / self.link_tokens
            if job.computed >= job.request.prompt_tokens:
                job.output += 1
                job.last = self.time
                if not job.first and job.decoded_by is None:
                    job.first = self.time
                    self.router.first_token(self.name, job, self.time)
        self._work = []
        for job in [job for job in self.running if job.output >= job.output_tokens]:
            self.running.remove(job)
            self._close(job)
            if job.decoded_by is not None:
                self.router.first_token(self.name, job, self.time)
                self.router.ended(self.name, job, self.time)
                job.pages_at, job.output = self.link_free, 0
                self.hand_overs.append(job)
                continue
            self.typical += (job.output - self.typical) / OUTPUT_MEMORY
            self.router.ended(self.name, job, self.time)
            if job.prediction is not None:
                self.slo.observe_request(job.prediction, job.first - job.at, job.tbt, job.output)
        if self.events:
            self.router.apply(self.name, EventBatch(self.time, list(self.events)))
            self.events.clear()


class _Router:
    """A router built from the real index and scorer. Workers in `names` answer requests. Workers in `prefill` only
    compute prompts for the workers in `names`. Simulated workers report events and tokens to the router.
    """

    def __init__(self, route: str, options: ScoringOptions | None) -> None:
        self.route = route
        self.index, self.scorer = FleetIndex(), Scorer(options)
        self._speed = SpeedModel()
        self._turn = 0
        self.block_tokens = 16
        self.names: list[str] = []
        self.prefill: list[str] = []
        self.stored = self.removed = self.choices = 0
        self.choice_seconds = self.event_seconds = 0.0

    def add(self, name: str, capacity: int, is_prefill: bool = False, block_tokens: int = 16) -> None:
        (self.prefill if is_prefill else self.names).append(name)
        self.index.add(name)
        self.block_tokens = block_tokens
        self.scorer.loads[name] = WorkerLoad(capacity, self._speed)

    def choose(self, job: _Job, scale: int, now: float, tried: Iterable[str] = ()) -> Choice:
        """Choose the worker that answers a request. Workers in `tried` have refused the request and are not chosen.
        `scale` is the number of tokens of the trace for each token of the simulated cache."""
        names = [name for name in self.names if name not in tried] if tried else self.names
        if self.route == "round-robin":
            self._turn += 1
            return Choice(names[self._turn % len(names)], 0.0, 0, 0)
        began = time.process_time()
        choice = self.scorer.choose(
            job.request.prompt_tokens, self._lengths(job, scale), names, now, job.request.session
        )
        self.choice_seconds += time.process_time() - began
        self.choices += 1
        assert choice is not None
        return choice

    def choose_prefill(self, job: _Job, decode: Choice, scale: int, now: float) -> Choice | None:
        """Choose the prefill worker of a request. Return None if the decode worker itself computes the prompt."""
        prompt = job.request.prompt_tokens
        if not self.prefill or prompt - decode.cached < HAND_OVER_TOKENS:
            return None
        if self.route == "round-robin":
            self._turn += 1
            return Choice(self.prefill[self._turn % len(self.prefill)], 0.0, 0, 0)
        return self.scorer.choose(prompt, self._lengths(job, scale), self.prefill, now)

    def _lengths(self, job: _Job, scale: int) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(tokens * scale for tokens in found)
            for name, found in self.index.lengths(job.hashes).items()
        }

    def sent(self, choice: Choice, job: _Job, now: float) -> None:
        if self.route == "kv":
            prompt = job.request.prompt_tokens
            self.scorer.loads[choice.worker].sent(job, prompt - choice.cached, prompt, now)
            self.index.expect(choice.worker, job.hashes)

    def apply(self, worker: str, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.stored += len(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.removed += len(event.block_hashes)
        if self.route == "kv":
            began = time.process_time()
            self.index.apply(worker, batch)
            self.scorer.loads[worker].cached_tokens = self.index.counts(worker)[GPU] * self.block_tokens
            self.event_seconds += time.process_time() - began

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


class _Fleet:
    """All simulated workers and their router. Events are simulated in order of time."""

    def __init__(self, workers: Sequence[_Worker], router: _Router, scale: int) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.router, self.scale = router, scale
        self.counts = dict.fromkeys(self.workers, 0)
        self.hand_overs = 0
        self._due: list[tuple[float, str]] = []
        self._queued: set[str] = set()
        self._pages: list[tuple[float, int, _Job]] = []

    def advance(self, until: float) -> None:
        """Run all steps that end by `until`. Prefill workers run first, because decode workers need their pages."""
        if self.router.prefill:
            self._run(until, self.router.prefill)
            while self._pages and self._pages[0][0] <= until:
                at, _, job = heapq.heappop(self._pages)
                worker, job.decoded_by = job.decoded_by, None
                assert worker is not None
                worker.advance(at)
                self._add(worker, job, at)
        self._run(until)

    def _run(self, until: float, names: Iterable[str] | None = None) -> None:
        if names is not None:
            for name in names:
                worker = self.workers[name]
                worker.advance(until)
                for job in worker.hand_overs:
                    assert job.pages_at is not None
                    heapq.heappush(self._pages, (job.pages_at, job.number, job))
                worker.hand_overs.clear()
            return
        ready = []
        while self._due and self._due[0][0] <= until:
            ready.append(self.workers[heapq.heappop(self._due)[1]])
        for worker in ready:
            worker.advance(until)
            self._queued.discard(worker.name)
        for worker in ready:
            self._schedule(worker)

    def _schedule(self, worker: _Worker) -> None:
        due = worker.due
        if due is not None and worker.name not in self._queued:
            heapq.heappush(self._due, (due, worker.name))
            self._queued.add(worker.name)

    def _add(self, worker: _Worker, job: _Job, at: float) -> None:
        worker.add(job, at)
        if not (self.router.prefill and worker.name in self.router.prefill):
            self._schedule(worker)

    def offer(self, job: _Job, admission: str, objective: Objective, queue_limit: int) -> None:
        """Send a request to a worker, or mark it as refused. If a worker refuses the request, the router tries the next
        best worker, up to ATTEMPTS workers."""
        tried: set[str] = set()
        now, router = job.at, self.router
        while len(tried) < min(ATTEMPTS, len(router.names)):
            choice = router.choose(job, self.scale, now, tried)
            tried.add(choice.worker)
            worker = self.workers[choice.worker]
            prefill = router.choose_prefill(job, choice, self.scale, now)
            computes = worker if prefill is None else self.workers[prefill.worker]
            job.compute = computes.missing(job) if admission == "slo" else 0
            if admission == "queue" and len(computes.waiting) >= queue_limit:
                continue
            if admission == "slo" and not self._admits(job, worker, computes, objective):
                continue
            self.counts[choice.worker] += 1
            router.sent(choice, job, now)
            if prefill is not None:
                self.hand_overs += 1
                job.decoded_by = worker
                router.sent(prefill, job, now)
            self._add(computes, job, now)
            return
        job.is_refused = True

    def _admits(self, job: _Job, worker: _Worker, computes: _Worker, objective: Objective) -> bool:
        """Return whether a request is admitted. The engine's own admission classes decide.

        `computes` is the worker that computes the prompt: a prefill worker, or `worker` itself. The TTFT is predicted
        for `computes`, and the time between tokens for `worker`. If `computes` is a prefill worker, the TTFT also
        includes the transfer of the last pages and one decode step.
        """
        own = computes.work(job, job.compute)
        if objective.ttft_ms is not None:
            job.due = job.at + objective.ttft_ms / 1e3
        prediction = computes.predict(own, job.at)
        if computes is not worker:
            own = replace(own, output=int(worker.typical))
            later = worker.predict(PromptWork(1, own.output, own.context), job.at)
            if prediction is not None and later is not None:
                pages = job.compute % computes.model.token_budget / computes.link_tokens
                prediction = replace(
                    prediction, ttft=prediction.ttft + pages + later.tbt, tbt=later.tbt, rows=later.rows
                )
        job.prediction = prediction
        return worker.slo.decide(objective, prediction, own).verdict is Verdict.ADMIT


def replay_fleet(
    traffic: Traffic,
    workers: int,
    blocks: int,
    route: str = "kv",
    *,
    speed: float = 1.0,
    model: EngineModel | None = None,
    options: ScoringOptions | None = None,
    prefill: int = 0,
    link_tokens: float = float("inf"),
    admission: str = "none",
    objective: Objective | None = None,
    queue_limit: int = 16,
    policy: str = DEFAULT_POLICY,
    progress: Callable[[int], None] = lambda done: None,
) -> FleetOutcome:
    """Replay `traffic` over `workers` workers, each with a pool of `blocks` blocks. Takes about 20 seconds for 12,000
    requests. Raises ValueError if prompt and output of a request exceed a pool.

    - `route`: one of ROUTES. `options` are the router's scoring options.
    - `speed`: the times between arrivals are divided by this number.
    - `prefill`: number of workers that only compute prompts. They send pages to the other workers, which decode.
    - `link_tokens`: the link of each prefill worker transfers the pages of this many tokens per second.
    - `admission`: which requests are refused (see ADMISSIONS). With "slo", a worker refuses a request that would miss
      `objective`. With "queue", a worker refuses a request if `queue_limit` requests already wait.
    - `policy`: eviction policy of every worker.
    """
    if route not in ROUTES:
        raise ValueError(f"unknown route {route!r}; known: {', '.join(ROUTES)}")
    if admission not in ADMISSIONS:
        raise ValueError(f"unknown admission {admission!r}; known: {', '.join(ADMISSIONS)}")
    if workers < 1 or blocks < 1 or speed <= 0 or link_tokens <= 0:
        raise ValueError(
            f"workers {workers}, blocks {blocks}, speed {speed} and link {link_tokens} must be positive"
        )
    if not 0 <= prefill < workers:
        raise ValueError(
            f"prefill workers {prefill} must be fewer than the workers {workers}: one must decode"
        )
    if not traffic.requests:
        raise ValueError("the traffic contains no requests")
    objective = objective or Objective()
    if admission == "slo" and not objective:
        raise ValueError("admission slo needs an objective: give a time to first token or between tokens")
    model = model or EngineModel()
    block = traffic.block_tokens
    most = max(r.prompt_tokens + r.output_tokens for r in traffic.requests)
    if most > blocks * block:
        raise ValueError(f"a request of {most} tokens exceeds a pool of {blocks} blocks of {block} tokens")
    router = _Router(route, options)
    longest = (most // block + 2) * HASH_TOKENS
    members = []
    for number in range(workers):
        role = (
            replace(model, token_budget=HAND_OVER_TOKENS + model.max_running)
            if prefill <= number and prefill
            else model
        )
        worker = _Worker(f"w{number}", blocks, block, longest, role, router, policy)
        worker.link_tokens, worker.is_measured = link_tokens, admission == "slo"
        router.add(worker.name, blocks * block, number < prefill, block)
        members.append(worker)
    fleet = _Fleet(members, router, block // HASH_TOKENS)
    root = members[0].cache.root_hash(CacheControl())
    begin = traffic.requests[0].at
    jobs: list[_Job] = []
    for number, request in enumerate(traffic.requests):
        at = (request.at - begin) / speed
        fleet.advance(at)
        job = _job(number, request, at, block, root)
        fleet.offer(job, admission, objective, queue_limit)
        jobs.append(job)
        if number % 256 == 255:
            progress(number + 1)
    fleet.advance(float("inf"))
    progress(len(jobs))
    return _outcome(jobs, fleet, blocks, speed, admission, objective)


def _job(number: int, request: Request, at: float, block: int, root: bytes) -> _Job:
    """Return a request of the trace as a job, with the tokens that represent its prompt in the simulated cache. `at` is
    the time at which the request arrives, in seconds.

    All tokens of a whole block have the same id: the number of the block. The tokens of the partial last block have an
    id that no other request has.
    """
    whole, rest = divmod(request.prompt_tokens, block)
    ids = np.repeat(request.blocks[:whole].astype(np.int32), HASH_TOKENS)
    tail = np.full(-(-rest * HASH_TOKENS // block), 2**31 - 2 - number, np.int32)
    hashes = wire_hashes(hash_chain(root, token_bytes(ids)))
    return _Job(number, request, np.concatenate((ids, tail)), hashes, at)


def _outcome(
    jobs: Sequence[_Job],
    fleet: _Fleet,
    blocks: int,
    speed: float,
    admission: str,
    objective: Objective,
) -> FleetOutcome:
    served = [job for job in jobs if not job.is_refused]
    router = fleet.router
    ttft = np.array([job.first - job.at for job in served] or [0.0])
    tbt = np.array([job.tbt for job in served if job.tbt is not None] or [0.0])
    met = sum(job.meets(objective) for job in jobs)
    arrivals = max(jobs[-1].at - jobs[0].at, 1e-9)
    return FleetOutcome(
        router.route,
        len(fleet.workers),
        blocks,
        speed,
        hit_rate=sum(job.cached or 0 for job in served)
        / max(1, sum(job.request.prompt_tokens for job in served)),
        mean_ttft=float(ttft.mean()),
        p50_ttft=float(np.quantile(ttft, 0.5)),
        p99_ttft=float(np.quantile(ttft, 0.99)),
        mean_itl=float(tbt.mean()),
        preemptions=sum(worker.preemptions for worker in fleet.workers.values()),
        spread=max(fleet.counts.values()) * len(router.names) / max(1, len(served)),
        prefill=len(router.prefill),
        admission=admission,
        p99_tbt=float(np.quantile(tbt, 0.99)),
        refused=len(jobs) - len(served),
        met=met,
        goodput=met / arrivals,
        hand_overs=fleet.hand_overs,
        stored_blocks=router.stored,
        removed_blocks=router.removed,
        index_blocks=len(router.index),
        seconds=max((job.last for job in served), default=0.0),
        choice_us=1e6 * router.choice_seconds / max(1, router.choices),
        event_blocks_per_second=(router.stored + router.removed) / max(1e-9, router.event_seconds),
    )

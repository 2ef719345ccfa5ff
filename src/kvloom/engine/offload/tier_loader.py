"""Loads the pages of load jobs from tiers into host memory.

    advance            lookup in the tiers → request chunks, the end of the prompt first → chunks arrive in host memory
    tokens_to_compute  how many tokens the request computes meanwhile

This module uses hashes, tier queues and deadlines. It does not change the pool.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from kvloom.core import PUBLIC_TENANT, KVCache, Match, MissingPages, PageGroup, TierQuery
from kvloom.engine.config import OffloadConfig
from kvloom.engine.request import Request
from kvloom.tiers import Form, Objects
from kvloom.tiers.transfers import FetchJob, TransferManager

from .host_pages import form_of
from .load_job import LoadChunk, LoadJob
from .load_or_recompute import Estimates, Progress
from .stats import OffloadStats
from .time_model import TimeModel, meeting_point

__all__ = ["Forms", "TierLoader"]

Forms = dict[int, list[Form]]
"""The forms (byte layouts) of pages, by layer group. A group has one form for each page that a block owns in it."""
MIN_GAIN = 0.05
"""The end of a prompt is loaded only if loading saves the computation of at least this fraction of the missing
tokens."""
MIN_CHUNKS = 32
"""A prompt is loaded in at least about this many chunks. A request can use a chunk as soon as it arrives."""
MIN_STEP_SHARE = 32
"""A step computes at least 1 / MIN_STEP_SHARE of a prompt, because smaller steps take about the same time."""
MAX_HOST_SHARE = 0.9
"""Largest fraction of host memory that one prompt may fill."""
MIN_WAIT_SECONDS = 0.002
"""Shortest useful wait in seconds. Thread switches take about as long."""
MAX_SHORT_WAIT_SECONDS = 0.01
"""Longest wait of a short prompt, in seconds. This limit applies if `wait_share` allows only a shorter wait. See
`_max_lost_seconds`."""


class TierLoader:
    """Loads pages of one engine from tiers. `jobs` returns all active load jobs, which may share transfers."""

    def __init__(
        self,
        cache: KVCache,
        transfers: TransferManager,
        config: OffloadConfig,
        prefill_time: TimeModel,
        stats: OffloadStats,
        jobs: Callable[[], Iterable[LoadJob]],
    ) -> None:
        self.cache, self.transfers, self.config = cache, transfers, config
        self.prefill_time, self._stats, self._jobs = prefill_time, stats, jobs
        self.forms: Forms = {
            group.index: [form_of(group, run) for run in range(group.runs)]
            for group in cache.layout.whole().groups
        }
        self.lossy_forms: Forms = {
            group: [replace(form, exact=False) for form in forms] for group, forms in self.forms.items()
        }
        """Forms for requests that accept lossy pages. These requests have separate hashes and pages."""
        self._fetching: dict[bytes, FetchJob] = {}

    def forms_of(self, request: Request) -> Forms:
        return self.lossy_forms if request.control.lossy else self.forms

    def block_bytes(self, group: PageGroup) -> int:
        """Return the bytes in tiers of all pages that a block owns in a layer group."""
        return sum(form.page_bytes for form in self.forms[group.index])

    def objects_for(self, query: TierQuery, request: Request) -> Objects:
        """Return the pages that `query` asks for, as objects for tiers. If a block owns several pages in the layer
        group, only the first is included."""
        form = self.forms_of(request)[query.group][0]
        return Objects(query.hashes, query.group, form, _tenant(query, request))

    def host_misses(self, query: TierQuery | None, request: Request) -> bool:
        """Return whether host memory has none of the pages that `query` asks for. Return False if `query` is None.
        Takes a tenth of the time of a load plan."""
        return query is not None and not any(
            key in self.transfers.host for key in self.objects_for(query, request).keys
        )

    def advance(self, job: LoadJob, match: Match | None) -> bool:
        """Continue the lookup of a job, or collect its chunks. Return whether the job waits for a tier. Does not
        block.
        """
        if not self.transfers.queues or job.copy is not None:
            return False
        lookup = job.lookup
        if not lookup.is_complete:
            if lookup.plan is None:
                assert match is not None
                lookup.plan = self.cache.loading.plan(match)
            while True:
                if lookup.pending is None:
                    queries = lookup.plan.next_queries()
                    if not queries:
                        break
                    lookup.pending = self.transfers.lookup(
                        [self.objects_for(q, job.request) for q in queries]
                    )
                if not lookup.pending.done:
                    return True
                lookup.tier_of.update(lookup.pending.queue_of)
                lookup.plan.answer(lookup.pending.found)
                lookup.pending = None
            lookup.is_complete = True
            self._fetching = {key: fetch for key, fetch in self._fetching.items() if not fetch.done}
            job.request.tier_miss = lookup.plan.miss
            self._start(job)
        self._collect(job)
        return bool(job.transfer.chunks)

    def cancel(self, job: LoadJob) -> None:
        """Cancel the chunks of a job, except chunks that another job shares."""
        shared = {id(fetch) for other in self._jobs() if other is not job for fetch in other.transfer.fetches}
        for fetch in job.transfer.fetches:
            if id(fetch) not in shared:
                fetch.cancel()
        job.transfer.chunks.clear()

    def loads_always(self, request: Request) -> bool:
        """Return whether a request loads every page that a tier has, without comparing times. This is True for
        handed-over requests and, if configured, for all requests.
        """
        return self.config.load == "always" or request.awaits_peer is not None

    def is_worth_loading(self, request: Request, tokens: int, all_tokens: int, seconds: float | None) -> bool:
        """Return whether loading `tokens` tokens in `seconds` is faster than computing them. `all_tokens` is the number
        of missing tokens of the prompt. The saved compute time is the time for all missing tokens, minus the time for
        the missing tokens that are not loaded. Return True if nothing was measured, or if the request always loads.
        """
        if self.loads_always(request) or seconds is None or not self.prefill_time.is_known:
            return True
        return seconds < self.prefill_time.seconds(all_tokens) - self.prefill_time.seconds(
            all_tokens - tokens
        )

    def tokens_to_compute(self, job: LoadJob, inflight_seconds: float | None, now: float) -> int | None:
        """Return how many tokens the request of `job` computes next, from `job.computed_to` on. 0 means that the
        request waits for pages. None means that no further page will arrive. `inflight_seconds` is the remaining time
        of the in-flight step.
        """
        if job.copy is not None or not self.transfers.queues:
            return None
        is_loading = self.advance(job, None)
        if self.loads_always(job.request):
            return 0 if is_loading else None
        compute = self.prefill_time.seconds if self.prefill_time.is_known else None
        end, block = len(job.request.tokens), self.cache.block_tokens
        if not job.lookup.is_complete:
            return 0 if job.load_or_recompute.may_wait(0, compute, self._max_lost_seconds(job), now) else end
        plan, loaded_from = job.lookup.plan, job.transfer.loaded_from
        assert plan is not None
        if loaded_from <= job.computed_to or (not is_loading and loaded_from >= plan.resume):
            return None
        if not is_loading:
            return loaded_from - job.computed_to
        load, max_lost = self._load_seconds(job), self._max_lost_seconds(job)
        if not plan.match.control.store:
            # The request caches no computed pages, so it cannot resume after loaded tokens.
            is_faster = (
                not compute or not load or load(job.computed_to) < compute(loaded_from - job.computed_to)
            )
            if is_faster and job.load_or_recompute.may_wait(loaded_from, compute, max_lost, now):
                return 0
            self.cancel(job)
            return None
        return job.load_or_recompute.tokens_to_compute(
            Progress(job.computed_to, loaded_from, end, block, min_step=max(block, end // MIN_STEP_SHARE)),
            Estimates(compute, load, inflight_seconds, max_lost),
            now,
        )

    def _collect(self, job: LoadJob) -> None:
        """Record arrived chunks, from the end of the prompt to its start. If one arrived with pages missing,
        cancel the remaining chunks, unless no complete chunk has arrived yet and the model has no states."""
        plan, transfer = job.lookup.plan, job.transfer
        assert plan is not None
        while transfer.chunks and all(fetch.done for fetch in transfer.chunks[0].fetches):
            chunk = transfer.chunks.popleft()
            transfer.pages_by_tier.update(chunk.pages_by_tier)
            if all(self.transfers.host.lookup(objects).all() for objects in chunk.objects):
                transfer.loaded_from = chunk.first
            elif transfer.loaded_from < plan.resume or self.cache.layout.of("state"):
                self.cancel(job)

    def _start(self, job: LoadJob) -> None:
        """Request the pages of a job from tiers, in chunks.

        If the request must load all pages, these pages form one chunk. Otherwise only the pages from token
        `_first_token` on are requested. The request computes the earlier tokens while these pages load.
        """
        plan, transfer, block = job.lookup.plan, job.transfer, self.cache.block_tokens
        assert plan is not None
        match, resume = plan.match, plan.resume
        transfer.loaded_from, matched_blocks, blocks = resume, match.matched // block, -(-resume // block)
        missing = plan.missing_pages()
        # States, and window pages before the unmatched blocks, are needed only to resume. They load with the last
        # block.
        by_block: dict[int, list[tuple[int, int]]] = {}
        sizes = np.zeros((len(self.transfers.queues), blocks + 1), np.int64)
        for number, pages in enumerate(missing):
            for i, (b, key) in enumerate(zip(pages.blocks, self._objects(pages, job)[0].keys, strict=True)):
                if (tier := job.lookup.tier_of.get(key)) is not None:
                    at = b if b >= matched_blocks else blocks - 1
                    by_block.setdefault(at, []).append((number, i))
                    sizes[tier, at] += self.block_bytes(pages.group)
        transfer.bytes_from = sizes[:, ::-1].cumsum(1)[:, ::-1]
        if not by_block:
            return
        least, most = self.config.deadline_seconds
        allowed = most / 2
        if self.prefill_time.is_known:
            allowed = max(least, min(most, 2 * self.prefill_time.seconds(resume - match.resume)))
        transfer.deadline = time.monotonic() + allowed
        if self.loads_always(job.request):
            every = [page for b in sorted(by_block) for page in by_block[b]]
            self._request_chunk(job, missing, every, match.resume)
            return
        first = self._first_token(job)
        if first >= resume:
            self._stats.not_worth_loading += 1
            return
        bytes_from = transfer.bytes_from.sum(0).tolist()
        chunk_bytes, requested = min(self.transfers.config.queue.batch_bytes, bytes_from[0] // MIN_CHUNKS), 0
        chunk: list[tuple[int, int]] = []
        for b in range(blocks - 1, first // block - 1, -1):
            if chunk and b in by_block and bytes_from[b] - requested > chunk_bytes:
                self._request_chunk(job, missing, chunk, (b + 1) * block)
                chunk, requested = [], bytes_from[b + 1]
            if bytes_from[b] > MAX_HOST_SHARE * self.transfers.host.capacity:
                first = (b + 1) * block  # stop here: more pages would evict earlier ones from host memory
                break
            chunk += by_block.get(b, [])
        if chunk:
            self._request_chunk(job, missing, chunk, first // block * block)

    def _first_token(self, job: LoadJob) -> int:
        """Return the first token whose pages are loaded. Pages load from the end of the prompt, while tokens are
        computed from its start. The first row that applies gives the result:

        | case                                                       | result                                      |
        |------------------------------------------------------------|---------------------------------------------|
        | the request can wait, its pages must not be stored, or too | the end of the cached prefix: all missing   |
        | little was measured                                        | pages are loaded                            |
        | fewer than MIN_GAIN * missing tokens would be loaded       | the end of the load plan: nothing is loaded |
        | otherwise                                                  | halfway between the end of the cached       |
        |                                                            | prefix and the position where computed and  |
        |                                                            | loaded tokens are expected to meet          |

        In the second case, also raises the estimated throughput of all tiers. A slow tier is therefore tried again
        later.
        """
        plan, block = job.lookup.plan, self.cache.block_tokens
        assert plan is not None
        match, resume = plan.match, plan.resume
        load = self._load_seconds(job)
        if job.can_wait or not match.control.store or not self.prefill_time.is_known or load is None:
            return match.resume
        load_seconds, tokens = load, resume - match.resume
        met = meeting_point(
            tokens // block,
            lambda n: self.prefill_time.seconds(n * block),
            lambda n: load_seconds(match.resume + n * block),
        )
        if tokens - met * block < MIN_GAIN * tokens:
            for queue in self.transfers.queues:
                queue.throughput.raise_estimate()
            return resume
        return match.resume + met // 2 * block

    def seconds_left(self, job: LoadJob, first: int) -> float:
        """Return the seconds until the pages of a job from token `first` on are loaded. Return 0 if no rate was
        measured."""
        if job.transfer.bytes_from is None:
            return 0.0
        load = self._load_seconds(job)
        seconds = (
            0.0
            if load is None
            else load(max(first, job.transfer.chunks[-1].first) if job.transfer.chunks else first)
        )
        return seconds if math.isfinite(seconds) else 0.0

    def _load_seconds(self, job: LoadJob) -> Callable[[int], float] | None:
        """Return a function: token → seconds until all missing pages from this token on are loaded. Return None if no
        rate was measured.
        """
        transfer, block = job.transfer, self.cache.block_tokens
        bytes_from, chunks = transfer.bytes_from, transfer.chunks
        assert bytes_from is not None
        loaded_block = -(-transfer.loaded_from // block)
        loaded = bytes_from[:, loaded_block]
        lowest = chunks[-1].first // block if chunks else loaded_block
        requested = lowest if chunks else 0  # pages before this block are never loaded
        # For each tier with pages: its number, the seconds that its queue needs before this job, its bytes per second.
        queues = []
        for number, queue in enumerate(self.transfers.queues):
            if bytes_from[number, 0]:
                rate = queue.throughput.bytes_per_second
                if not rate:
                    return None
                own = int(bytes_from[number, lowest] - loaded[number])
                others = max(0, queue.bytes_ahead(transfer.deadline) - own)
                queues.append((number, queue.lookup_latency + others / rate, rate))

        def seconds(first: int) -> float:
            at = max(0, first // block)
            if at < requested:
                return math.inf
            left = [(int(bytes_from[n, at] - loaded[n]), before, speed) for n, before, speed in queues]
            return max((before + size / speed for size, before, speed in left if size > 0), default=0.0)

        return seconds

    def _max_lost_seconds(self, job: LoadJob) -> float:
        """Return the seconds that a request may lose by waiting for pages.

        | measured so far  | seconds that the request may lose                                                    |
        |------------------|--------------------------------------------------------------------------------------|
        | no prefill       | a twentieth of the longest deadline of a load; 0 if this load is estimated to take   |
        |                  | longer                                                                               |
        | prefill, no load | A: `wait_share` of the time to compute the missing tokens, at least MIN_WAIT_SECONDS |
        | prefill and load | the larger of A and B. B is twice the time to load the next chunk, at most           |
        |                  | MAX_SHORT_WAIT_SECONDS                                                               |

        A load counts as measured if the job has chunks in transfer and the rates of its tiers are known.
        """
        load = self._load_seconds(job) if job.transfer.chunks else None
        if not self.prefill_time.is_known:
            first = self.config.deadline_seconds[1] / 20
            return first if load is None or load(job.computed_to) <= first else 0.0
        share = self.config.wait_share * self.prefill_time.seconds(len(job.request.tokens) - job.computed_to)
        if load is None:
            return max(share, MIN_WAIT_SECONDS)
        next_chunk = load(job.transfer.chunks[0].first)
        return max(share, MIN_WAIT_SECONDS, min(MAX_SHORT_WAIT_SECONDS, 2 * next_chunk))

    def _request_chunk(
        self, job: LoadJob, missing: list[MissingPages], pages: list[tuple[int, int]], first: int
    ) -> None:
        """Request pages as one chunk that begins at token `first`. Each of `pages` is given as (i, j): page j of the
        layer group `missing[i]`. Pages that another job already loads are not requested twice, and both jobs wait for
        that transfer.
        """
        wanted: list[Objects] = []
        tier_of: dict[bytes, int] = {}
        fetches: list[FetchJob] = []
        pages_by_tier: Counter[int] = Counter()
        for number, group_pages in enumerate(missing):
            at = [i for n, i in pages if n == number]
            if not at:
                continue
            runs = self._objects(replace(group_pages, hashes=[group_pages.hashes[i] for i in at]), job)
            pages_by_tier.update(job.lookup.tier_of[key] for key in runs[0].keys)
            for run in runs:
                for key, first_key in zip(run.keys, runs[0].keys, strict=True):
                    other = self._fetching.get(key)
                    if other is None or other.done:
                        tier_of[key] = job.lookup.tier_of[first_key]
                    elif other not in fetches:
                        fetches.append(other)
            wanted += runs
        if tier_of:
            fetch = self.transfers.fetch(wanted, tier_of, job.transfer.deadline)
            fetches.append(fetch)
            self._fetching.update(dict.fromkeys(tier_of, fetch))
        job.transfer.chunks.append(LoadChunk(first, wanted, fetches, pages_by_tier))

    def _objects(self, pages: MissingPages, job: LoadJob) -> list[Objects]:
        """Return missing pages of a layer group as objects for tiers. If a block owns n pages in the group, the result
        has n entries. Entry i contains page i of every block."""
        group = pages.group.index
        tenant = _tenant(pages, job.request)
        return [Objects(pages.hashes, group, form, tenant) for form in self.forms_of(job.request)[group]]


def _tenant(pages: TierQuery | MissingPages, request: Request) -> str:
    """Return the tenant to which tiers count pages of a request."""
    return PUBLIC_TENANT if pages.is_public else request.control.tenant

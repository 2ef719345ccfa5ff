"""The scheduler picks the tokens of each step. All decoding requests come first, then chunks of prompts within a token
budget.

    waiting   in order of priority and arrival; admitted within the budget, below `max_running`, and if the projected
              growth fits the pool
    running   has pages; if pages run out, the last request in this order is preempted and waits again

Tenants share steps, running requests and pages fairly (see `waiting_queue.py`). If a tenant below its share waits,
requests of tenants above their share are preempted. With a single tenant there are no shares.

A step may be scheduled while the previous step is in flight. The scheduler then counts the tokens of the previous step
as sampled, although their values are unknown. A preempted request resumes later from its cached blocks, and recomputes
the rest. The scheduler does not use the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence as Many
from dataclasses import replace
from itertools import chain
from math import inf

import numpy as np
import numpy.typing as npt

from kvloom.core import NOT_CACHED, CacheControl, KVCache, Match, Sequence, StepSize, Verdict
from kvloom.engine.adapter_table import AdapterTable
from kvloom.engine.offload import Action, OffloadManager
from kvloom.engine.request import Request
from kvloom.engine.sampling import Finish, Successor, assign_slots
from kvloom.models.paged import Work

from .admission import Admission
from .chunk_size import ChunkSize
from .document_reuse import DocumentReuse
from .feasibility import Feasibility
from .lookahead import Lookahead
from .preemption import SORT_KEY, Scheduled, awaits_progress, choose_victim
from .slo_gate import SloGate
from .step_limit import StepLimit
from .waiting_queue import NextBlock, TenantQueue, WaitingQueue, next_block_of

__all__ = ["Scheduled", "Scheduler"]

UNKNOWN = np.array([-1])
MAX_ROOTS = 64
"""A miss is compared with the cached prefixes of other tenants only if the radix tree has at most this many roots.
Each combination of tenant and adapter has a root, and each root needs a walk over its tree.
"""
MAX_PROMPT_LOGPROBS = 256
"""Largest number of prompt tokens with log-probabilities in a step. Each token needs its own logits."""
MAX_DEFERRED = 256
"""Largest number of requests that a step defers because other requests compute their next block. Each deferred request
needs a match, which takes time."""
MAX_WITHOUT_SLOT = 256
"""If a request lacks a slot for its adapter, and the step has already deferred this many requests for any reason, the
step admits no more requests."""
SHARED_STEPS = 4
"""With several tenants, a step computes at most 1 / SHARED_STEPS of the token budget."""
RECENT_SECONDS = 10.0
"""Seconds after a step with requests of several tenants in which prompts still get the smaller limit, even if one tenant
is alone."""
MAX_PREEMPTED = 16
"""Largest number of requests that a step preempts for other tenants."""


class Scheduler:
    """Schedules requests on one cache. A step has up to `token_budget` prompt tokens, plus one token of each
    decoding request. Not thread-safe: one thread adds, schedules and commits.
    """

    def __init__(
        self,
        cache: KVCache,
        token_budget: int = 2048,
        max_running: int = 256,
        offload: OffloadManager | None = None,
        adapters: AdapterTable | None = None,
        is_chunk_fixed: bool = False,
    ) -> None:
        if token_budget < 1 or max_running < 1:
            raise ValueError(
                f"token_budget {token_budget} and max_running {max_running} must both be at least 1"
            )
        self.cache, self.token_budget, self.max_running = cache, token_budget, max_running
        self.running: list[Request] = []
        self.rejected: list[Request] = []
        """Requests that finished because the pool is too small, or because they were deferred and could not meet
        their objective. The engine returns and removes them."""
        self.started_requests: list[Request] = []
        """Requests that got their first work in the last step."""
        self.decoding = 0
        """Number of decoding requests in the work of the last step. They come first, with one token each."""
        self.offload = offload
        """Loads pages from tiers. None if the engine has no tiers."""
        self.adapters = adapters
        """LoRA adapters and their slots. None if the engine has no adapters."""
        self.documents: DocumentReuse | None = None
        """Copies documents of prompts. None if documents are not reused."""
        self._drained: str | None = None  # the adapter that gets no new requests in this step
        self.reachable_slabs = 0
        """Number of slabs to which the pool can surely grow. A request that fits only into the grown pool waits for the
        growth.
        """
        self.awaits_growth = False
        """Whether a request waited in the last step because it lacked pages and the pool can grow."""
        self.admission: Admission | None = Admission(cache)
        """Projects the growth of running requests. None admits every request for which pages are free now."""
        self._queue = WaitingQueue(cache.inspect.accounts)
        self.slo = SloGate(cache, self._queue, self._match)
        """Decides about requests with an objective."""
        self.chunk = ChunkSize(self.slo.admission, is_chunk_fixed)
        """Limits the prompt tokens of a step for objectives of decoding requests."""
        self._several = len(cache.inspect.accounts) > 1
        most, times = max(1, token_budget // SHARED_STEPS), self.slo.admission.times
        self.step_limit = StepLimit(most, times) if self._several else None
        """Limits the tokens of a step. None with one tenant."""
        self._shares: dict[TenantQueue, float] = {}  # shares of active tenants, if there are several tenants
        self._shared_until = 0.0  # time until which a tenant does not count as alone
        self._lookahead = Lookahead(cache, self._queue, self._match)
        self._unsettled: list[Scheduled] = []  # finished requests whose recurrent states lack the last tokens
        self._settling: list[Scheduled] = []  # unsettled requests that are part of this step
        self._paused = 0  # running requests that wait for pages in this step
        self._decode_turns = 0  # tokens decoded in steps that could not decode all requests
        self._feasibility = Feasibility(cache, token_budget, offload)
        self._prompt_logprobs_left = MAX_PROMPT_LOGPROBS  # left in this step

    @property
    def waiting(self) -> int:
        """Number of waiting requests. O(waiting)."""
        return sum(1 for _ in self._queue) + len(self.slo.held)

    @property
    def _can_grow(self) -> bool:
        return self.cache.usable_slabs < self.reachable_slabs

    @property
    def loading_count(self) -> int:
        """Number of requests that wait for pages from tiers."""
        return self._queue.loading + self._paused

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.running or self._unsettled or self.slo.held) or any(True for _ in self._queue)

    @property
    def open(self) -> list[Request]:
        """All requests that are running, waiting or deferred."""
        open_ = (*self.running, *self.slo.held)
        return [*(request for request in open_ if request.finish_reason is None), *self._queue]

    def add(self, request: Request) -> None:
        """Queue a request and prefetch its pages. Raises ValueError with the numbers if the request can never run.

        A request that cannot meet its objective is held, or finished with the reason "slo"."""
        may_be_long = self._feasibility.check(request, self.reachable_slabs)
        is_long = may_be_long and not self._holds_next_token(request)
        for sample in request.family:
            sample.may_be_long, sample.is_long = may_be_long, is_long
        if self.offload is not None and not is_long:
            can_wait = bool(self.running) or self._queue.length > 0
            self.offload.prefetch(request, self._match, can_wait)
        self._decide(request)

    def _decide(self, request: Request) -> None:
        """Queue a request. If the SLO gate predicts that the request will miss its objective, hold or refuse it
        instead."""
        if request.slo is not None:
            limits = self.chunk.tokens or self.token_budget, self.max_running
            verdict = self.slo.decide(request, self.running, limits, self.admission, self.offload)
            if verdict is Verdict.REFUSE:
                self.finish(request, "slo")
            if verdict is not Verdict.ADMIT:
                return
        self._queue.push(request)

    def runs_cold(self, length: int, tenant: str, pool_bytes: int) -> bool:
        """Return whether a request of `length` tokens can run with cold pages (pages in host memory), if it may use
        `pool_bytes` bytes of the pool."""
        return self._feasibility.runs_cold(length, tenant, pool_bytes)

    def cancel(self, request: Request) -> None:
        """Finish a request now. Its pages are released at once."""
        if request.finish_reason is None:
            self.finish(request, "cancelled")

    def schedule(
        self, places: dict[int, int] | None = None, drafts: dict[int, list[int]] | None = None
    ) -> list[Scheduled]:
        """Return the work of the next step, with reserved pages. The list is empty if there is no work, or if all
        requests wait for tokens or pages.

        `places` maps the `id` of a request to the index of its token among the tokens of the in-flight step. `drafts`
        maps the `id` of a request to its draft tokens. A draft for which no pages are free is dropped."""
        places = places or {}
        self.started_requests = []
        self._paused, self.awaits_growth = 0, False
        self._drained = None
        self._lookahead.start_step()
        picked: list[Scheduled] = []
        settling, self._unsettled = self._unsettled, []
        self._settling = settling
        next_blocks = self._poll_loads()
        for request in self.slo.due():
            self._decide(request)
            if request.finish_reason is not None:
                self.rejected.append(request)
        self._prompt_logprobs_left = MAX_PROMPT_LOGPROBS
        if self._several:
            self._share_out()
        empty = not self.running
        decodes, prompts = self._runnable()
        alone = self.running[0] if len(self.running) == 1 else None
        if self.offload is None:  # with tiers, protection is not needed: evicted pages can be loaded again
            self._lookahead.protect_queued()
        if self.step_limit is not None:
            decodes = self._shared_part(decodes, self.step_limit, has_prompts=bool(prompts))
        self._decode(decodes, picked, places, drafts or {})
        picked += settling
        self.decoding = first = len(picked)
        budget = self._prompt_budget(decodes, prompts)
        if self._shares and prompts:
            prompts.sort(key=lambda request: self._queue.tenant_queue(request).service)
            least = self._queue.tenant_queue(prompts[0]).turn
            sequences = [request.sequence for request in prompts]
            budget = self._admit_waiting(budget, picked, places, next_blocks, empty, least)
            # A request that was preempted and admitted again has a new sequence, and its work is already picked.
            prompts = [
                request
                for request, before in zip(prompts, sequences, strict=True)
                if request.sequence is before
            ]
        budget, resumed = self._prefill(prompts, budget, picked, places)
        if alone in resumed:
            alone = None
        if alone is not None and alone.sequence is None and not self._freeing and not settling:
            if self._can_grow:
                self.awaits_growth = True
            else:
                self._reject(alone)
        block = self.cache.block_tokens
        next_blocks |= {next_block_of(request, request.computed, block) for request, _ in picked[first:]}
        self._admit_waiting(budget, picked, places, next_blocks, empty)
        return picked

    def _runnable(self) -> tuple[list[Request], list[Request]]:
        """Return the running requests that a step can compute, in order: those with one token to compute, and those
        with several. Requests that wait for a token or for a grammar mask are left out."""
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in sorted(self.running, key=self._order if self._shares else SORT_KEY):
            size = len(request.tokens) + request.inflight_tokens
            if request.mask_pending:
                continue
            if request.computed < size < request.limit:
                (decodes if size - request.computed == 1 else prompts).append(request)
        return decodes, prompts

    def _prefill(
        self, prompts: list[Request], budget: int, picked: list[Scheduled], places: dict[int, int]
    ) -> tuple[int, list[Request]]:
        """Compute the next chunks of running prompts within the budget, and add this work to `picked`. Return the
        remaining budget, and the requests that were queued again because tiers have more of their pages."""
        resumed: list[Request] = []
        for request in prompts:
            if request.sequence is None:
                continue  # preempted earlier in this step
            until: int | None = None
            if self.offload is not None:
                decision = self.offload.before_prefill(request)
                until = decision.until
                if decision.action is Action.RESUME:
                    self._release(request)
                    self._queue.push(request)
                    resumed.append(request)
                    continue
                if decision.action is Action.WAIT:
                    self._paused += 1
                    continue
            if budget:
                self._lookahead.request_checkpoints(request)
                taken = self._reserve(request, budget, picked, places, until=until)
                budget -= self._charged(taken, budget)
                if taken:
                    self._lookahead.announce_checkpoint(request)
        return budget, resumed

    def _admit_waiting(
        self,
        budget: int,
        picked: list[Scheduled],
        places: dict[int, int],
        next_blocks: set[NextBlock | None],
        empty: bool,
        below: tuple[float, float] = (inf, inf),
    ) -> int:
        """Admit waiting requests within the budget, and add their work to `picked`. Return the remaining budget. Only
        tenants whose `turn` (sort key) is before `below` are considered. `empty` means that no request ran when the
        step began.

        A waiting request stays in the queue in two cases. Another request computes or loads its next block
        (`next_blocks`), or another request will take a checkpoint at which the waiting request can resume. Therefore
        no page is computed or loaded twice.
        """
        deferred: list[Request] = []  # queued again at the end, even after an exception
        passed: set[TenantQueue] = set()  # tenants whose next request lacks pages
        if self.admission is not None:
            self.admission.refresh()
        try:
            most = self.max_running - len(self._settling)
            while budget and (len(self.running) < most or (not picked and self._unpark())):
                waiting = self._queue.pop(passed, below)
                if waiting is None:
                    break
                deferred.append(waiting)
                if waiting.mask_pending or waiting.documents_pending:
                    continue
                if self._lacks_slot(waiting):
                    if len(deferred) > MAX_WITHOUT_SLOT:
                        break
                    continue
                looked_up = self.cache.clock.now()
                match = self._match(waiting)
                next_block = next_block_of(waiting, match.resume, self.cache.block_tokens)
                if self._awaits_another(waiting, match.resume, next_block, next_blocks, deferred):
                    continue
                next_blocks.add(next_block)
                until: int | None = None
                fits = True
                if waiting.is_long:
                    fits = self._host_fits(waiting)
                elif self.offload is not None:
                    decision = self.offload.before_admission(waiting, match)
                    until = decision.until
                    if decision.action is Action.WAIT:
                        self._queue.set_loading(deferred.pop(), next_block)
                        if self.admission is not None:
                            self.admission.refresh()  # the next projection must include this load
                        continue
                    if decision.action is Action.NO_FREE_PAGES and (
                        picked or places or self.offload.is_copying_to_pool
                    ):
                        # Computing needs as many pages as loading: wait for free pages, a copy or cold pages.
                        self._make_cold(waiting, len(waiting.tokens) // self.cache.block_tokens)
                        fits = False
                    elif match.version != self.cache.version:  # loaded pages of the request were published
                        match = self._match(waiting)
                if not fits or (picked and self._causes_preemption(waiting, match.resume)):
                    if self._pass_over(waiting, passed, picked):
                        continue
                    break
                self._admit(waiting, match)
                deferred.pop()
                self._lookahead.request_checkpoints(waiting)
                taken = self._reserve(waiting, budget, picked, places, preempt=not picked, until=until)
                budget -= self._charged(taken, budget)
                if taken:
                    self._start(waiting, match, looked_up)
                elif self.running or picked or not empty or self._freeing or self._can_grow:
                    self.awaits_growth |= self._can_grow and not picked
                    if self.offload is not None and not picked:
                        self.offload.publish_loaded()  # frees pages that are reserved for later requests
                    # Preempted requests retain pages until these pages are copied to host memory.
                    if self._pass_over(waiting, passed, picked):
                        continue
                    break
                else:
                    self._reject(waiting)
        finally:
            for request in deferred:
                self._queue.put_back(request)
        return budget

    def _adapters_in_use(self) -> Counter[str]:
        """Return the number of running requests of each adapter, by digest. Finished requests count, too, while their
        last recurrent states are still to be computed (see `_close`). O(running)."""
        used = chain(self.running, (request for request, _ in chain(self._settling, self._unsettled)))
        return Counter(request.adapter.digest for request in used if request.adapter is not None)

    def _lacks_slot(self, request: Request) -> bool:
        """Return whether a waiting request must wait for a slot for its LoRA adapter. For the first such request of a
        step, the scheduler chooses the adapter with the fewest running requests. The rest of the step admits no request
        for that adapter, so that its slot becomes free."""
        if request.adapter is None or self.adapters is None:
            return False
        if request.adapter.digest == self._drained:
            return True
        if self.adapters.has_slot(request.adapter):
            return False
        if self._drained is not None:
            return True  # an earlier request lacks a slot, too
        in_use = self._adapters_in_use()
        if self.adapters.may_evict(in_use):
            return False
        self._drained = min(in_use, key=lambda digest: in_use[digest])
        return True

    def _awaits_another(
        self,
        waiting: Request,
        resume: int,
        next_block: NextBlock | None,
        next_blocks: set[NextBlock | None],
        deferred: list[Request],
    ) -> bool:
        """Return whether a waiting request stays in the queue because of another request. The other request computes or
        loads the next block of the waiting request, or will take a checkpoint at which the waiting request can resume.

        `waiting` is the last request of `deferred`:

        - If the other request loads the block, `waiting` leaves `deferred` and waits for this load
          (`WaitingQueue.wait_behind`).
        - If `deferred` has more than MAX_DEFERRED requests, `waiting` does not wait, and False is returned.
        - Otherwise `waiting` stays in `deferred`.
        """
        if next_block is not None and next_block in next_blocks and not self._is_copying(waiting):
            if self._queue.wait_behind(waiting, next_block):
                deferred.pop()
                return True
            return len(deferred) <= MAX_DEFERRED
        return (
            len(deferred) <= MAX_DEFERRED
            and self._lookahead.awaits_checkpoint(waiting, resume)
            and not self._is_copying(waiting)
        )

    def _causes_preemption(self, waiting: Request, resume: int) -> bool:
        """Return whether admitting this request would soon cause a preemption."""
        if self.admission is None or self._within_share(waiting):
            return False
        coming = () if self.offload is None else self.offload.copying_requests()
        return not self.admission.fits(waiting, resume, self.running, coming)

    # -- between tenants --------------------------------------------------------------------------

    def _share_out(self) -> None:
        """Compute the share of each active tenant. With one active tenant there are no shares.

        If waiting requests of a tenant below its share do not fit, preempt requests of tenants above their share. At
        most MAX_PREEMPTED requests are preempted in a step.
        """
        tenants = self._queue.active()
        total = sum(tenant.weight for tenant in tenants)
        self._shares = {tenant: tenant.weight / total for tenant in tenants} if len(tenants) > 1 else {}
        if not self._shares:
            return
        self._shared_until = self.cache.clock.now() + RECENT_SECONDS
        free, left = self.max_running - len(self.running), MAX_PREEMPTED
        for tenant in sorted((tenant for tenant in tenants if tenant.heap), key=lambda tenant: tenant.turn):
            short, tenant.short = tenant.short, 0
            if tenant.head() is None:
                continue
            while left and short and self.cache.reachable_bytes(tenant.account) < short:
                if not self._preempt_above(self._excess, {tenant}):
                    break
                free, left = free + 1, left - 1
            wanted = min(len(tenant.heap), self._running_share(tenant) - tenant.running)
            while left and free < wanted:
                if not self._preempt_above(lambda one: one.running - self._running_share(one), {tenant}):
                    break
                free, left = free + 1, left - 1
            free = max(0, free - max(0, wanted))

    def _shared_part(self, decodes: list[Request], limit: StepLimit, has_prompts: bool) -> list[Request]:
        """Return the decoding requests of this step. If the step limit does not allow all decoding requests, each
        tenant gets a part of the limit in proportion to its weight. Within a tenant, the requests that have waited
        longest come first. With `has_prompts`, the step leaves time for prompts. It also leaves time for waiting
        requests that can be admitted.
        """
        has_prompts |= len(self.running) < self.max_running and self._queue.length > 0
        has_prompts |= any(
            tenant.heap and tenant.running < self._running_share(tenant) for tenant in self._shares
        )
        most = limit.rows(_mean_length(decodes), has_prompts)
        if len(decodes) <= most:
            return decodes
        counts: dict[TenantQueue, int] = {}
        ranked: list[tuple[float, int]] = []
        for place in sorted(range(len(decodes)), key=lambda place: decodes[place].decode_turn):
            tenant = self._queue.tenant_queue(decodes[place])
            counts[tenant] = counts.get(tenant, 0) + 1
            ranked.append((counts[tenant] / tenant.weight, place))
        part = [place for _, place in sorted(ranked)[:most]]
        for place in part:
            self._decode_turns += 1
            decodes[place].decode_turn = self._decode_turns
        return [decodes[place] for place in sorted(part)]

    def _prompt_budget(self, decoding: list[Request], prompts: list[Request]) -> int:
        """Return the largest number of prompt tokens of a step that decodes the requests in `decoding`. The number is
        smaller than the token budget in two cases: decoding requests have an objective for the time between tokens, or
        there are several tenants, so that a tenant starts sooner. An image that must not be split always fits.
        """
        if self.step_limit is None and not self.slo.has_open:
            return self.chunk.choose(self.token_budget, (), ())
        heads = [tenant.heap[0][1] for tenant in self._queue.active() if tenant.heap]
        coming = [*prompts, *heads]
        whole = max((one.images.min_step_tokens for one in coming if one.images is not None), default=0)
        if whole > 1 and self.step_limit is None:
            return self.token_budget
        budget = self.chunk.choose(self.token_budget, decoding, coming)
        if self.step_limit is not None:
            length = max((len(request.tokens) for request in coming), default=0)
            is_alone = self.cache.clock.now() >= self._shared_until
            budget = min(budget, self.step_limit.prompt_tokens(length, is_alone))
        return min(self.token_budget, max(budget, whole))

    def _charged(self, taken: int, budget: int) -> int:
        """Return how much of the budget `taken` tokens of a prompt use. With several tenants, very short prompts use
        more than their tokens."""
        if self.step_limit is None or not taken:
            return taken
        return min(budget, max(taken, self.step_limit.row_tokens))

    def _preempt_above(self, excess: Callable[[TenantQueue], float], spared: set[TenantQueue]) -> bool:
        """Preempt one request of the tenant that exceeds its share most, relative to its weight. Return whether a
        request was preempted.

        `excess` returns how far a tenant exceeds its share. Tenants in `spared` lose no request. The last
        request (`Request.sort_key`) is preempted. Requests for which `awaits_progress` is True are not preempted.
        """
        candidates: dict[TenantQueue, Request] = {}
        for request in self.running:
            tenant = self._queue.tenant_queue(request)
            if tenant in self._shares and tenant not in spared and not awaits_progress(request):
                last = candidates.get(tenant)
                candidates[tenant] = request if last is None else max(last, request, key=SORT_KEY)
        tenants = [tenant for tenant in candidates if excess(tenant) > 0]
        if not tenants:
            return False
        self._preempt(candidates[max(tenants, key=lambda tenant: excess(tenant) / tenant.weight)])
        return True

    def _running_share(self, tenant: TenantQueue) -> int:
        """Return a tenant's share of the running requests, at least one."""
        return max(1, int(self.max_running * self._shares[tenant]))

    def _excess(self, tenant: TenantQueue) -> float:
        """Return the number of bytes that a tenant uses above its share of the pool. The number is negative if the
        tenant uses less than its share."""
        return tenant.account.counted_in_use - self._shares.get(tenant, 1.0) * self._pool_bytes

    @property
    def _pool_bytes(self) -> int:
        return self.cache.usable_slabs * self.cache.layout.slab_bytes

    def _excess_of(self, request: Request) -> float:
        return self._excess(self._queue.tenant_queue(request))

    def _order(self, request: Request) -> tuple[bool, tuple[int, int]]:
        """Return the sort key of a running request, used if several tenants share the pool. Requests of tenants within
        their share come first and get pages first.
        """
        return self._excess(self._queue.tenant_queue(request)) > 0, request.sort_key

    def _within_share(self, request: Request) -> bool:
        """Return whether the tenant of a request would probably stay within its share of the pool, if the request also
        ran. Such a request is admitted even if running requests of other tenants will need its pages later, because
        those requests can be preempted.
        """
        tenant = self._queue.tenant_queue(request)
        if not self._shares or self.admission is None:
            return False
        each = self.cache.layout.slab_bytes_for(self.admission.end_of(request))
        return (tenant.running + 1) * each <= self._shares.get(tenant, 1.0) * self._pool_bytes

    def _pass_over(self, request: Request, passed: set[TenantQueue], picked: list[Scheduled]) -> bool:
        """Exclude a tenant from admission in this step, by adding it to `passed`, because its next request lacks pages.
        Return whether other tenants may still be admitted.

        If the step already has work (`picked`), all tenants that use at least their guaranteed share are also excluded.
        Otherwise these tenants would take the pages that become free.
        """
        tenant = self._queue.tenant_queue(request)
        if not self._shares:
            return False
        need = self.cache.layout.slab_bytes_for(len(request.tokens) + 1)
        if self._excess(tenant) + need <= 0:
            margin = len(self.running) // self.cache.block_tokens + 1
            tenant.short = need + margin * self.cache.block_bytes
        passed.add(tenant)
        if picked:
            passed.update(one for one in self._shares if one.account.counted_in_use >= one.account.guaranteed)
        return any(one not in passed for one in self._shares)

    def _is_copying(self, request: Request) -> bool:
        """Return whether pages of the pool are reserved for a waiting request. Such a request gets its pages before
        others.
        """
        return self.offload is not None and self.offload.is_copying(request)

    @property
    def _freeing(self) -> bool:
        """Whether pages will become free when copies in progress are done."""
        return self.offload is not None and self.offload.is_retaining_pages

    def _poll_loads(self) -> set[NextBlock | None]:
        """Advance all load jobs, and queue the requests whose pages have arrived. Return the next blocks of the
        requests that still wait, so that no other request loads these blocks.
        """
        if self.offload is None:
            return set()
        self.offload.poll()
        return self._queue.requeue_ready(self.offload.is_pending)

    def step_launched(self, work: Many[Scheduled]) -> None:
        """Count the tokens of a launched step as computed. Commit the tokens whose ids are already on the host.
        `commit_tokens` commits the other tokens later. A request whose tokens are all computed gets one more in-flight
        token, which the step samples.
        """
        rows, tokens = [], []
        for request, part in work:
            count = part.new_tokens
            request.computed += count
            if self._several:
                # Also counts while a tenant is alone: a tenant that returns is then not behind the others.
                tenant = self._queue.tenant_queue(request)
                tenant.service += count / tenant.weight
            if part.source < 0:
                if count == 1:
                    rows.append(part.sequence.row)
                    tokens.append(part.tokens[part.recomputed])
                elif count:
                    part.sequence.commit(part.tokens[part.recomputed :].astype(np.int32))
                    self._lookahead.chunk_published(request, request.computed - count)
                else:  # the step added the last tokens to the states of a finished request
                    part.sequence.commit([])
                    part.sequence.close()
                    continue
            if request.computed == len(request.tokens) + request.inflight_tokens:
                request.inflight_tokens += 1
                request.uncached = False
        self._settling = []
        self._commit(rows, tokens)

    def commit_tokens(self, requests: Many[Request], tokens: Many[int], after: Many[Scheduled]) -> None:
        """Append the sampled tokens of a step to their requests. `after` is the work of the next step, if that step is
        already launched. Sampled tokens that are input of the next step are also committed to their sequences.
        """
        for request, token in zip(requests, tokens, strict=True):
            if request.finish_reason is None:
                request.inflight_tokens -= 1
                if request.beams is None:  # beams choose their tokens together
                    request.tokens.append(token)
        mine = [(request, part) for request, part in after if part.source >= 0 and part.sequence.open]
        self._commit([part.sequence.row for _, part in mine], [tokens[part.source] for _, part in mine])

    def accept_draft(self, request: Request, token: int) -> None:
        """Accept one draft token of a request. The step has already computed the request's last token as a draft token,
        so count this token as computed. Then append `token`, the next token. `commit_drafts` commits all accepted draft
        tokens."""
        request.computed += 1
        request.tokens.append(token)

    def commit_drafts(self, request: Request) -> None:
        """Commit the accepted draft tokens of a request. Recurrent states stay at the position before the draft. The
        next step computes the accepted tokens again in recurrent layers."""
        sequence = request.sequence
        if sequence is not None and (tokens := request.tokens[sequence.length : request.computed]):
            sequence.commit(
                np.array(tokens, np.int32), sequence.state_length if self.cache.has_states else None
            )

    def discard_step(self, places: dict[int, int] | None = None) -> None:
        """Discard a failed step. All running requests except parked beams wait again, and recompute all tokens that are
        not cached. Their recurrent states are dropped, because the states may include tokens that were not
        committed.
        """
        self.close_unsettled()
        for request in [request for request in self.running if not request.parked]:
            assert request.sequence is not None
            request.sequence.stop_publishing()
            self._preempt(request, save=False)
        for request in self._queue:
            request.inflight_tokens = int(id(request) in (places or {}))

    def close_unsettled(self) -> None:
        """Close the sequences that `_close` has kept open: their requests finished, but their recurrent states lack the
        last tokens.
        """
        for _, work in self._settling + self._unsettled:
            if work.sequence.open:
                work.sequence.close()
        self._settling, self._unsettled = [], []

    def finish(self, request: Request, why: Finish) -> None:
        """Finish a request, and also its other beams or samples that have not started. Their pages stay cached."""
        for one in request.finishes_with:
            if one.finish_reason is None:
                one.finish_reason = why
                one.inflight_tokens = 0
                self._lookahead.unprotect(one)
                if self.admission is not None and why in ("stop", "length"):
                    self.admission.request_finished(one)
                if self.offload is not None:
                    self.offload.cancel(one)
                if one.sequence is not None:
                    self._release(one)

    def fork(self, request: Request, child: Request) -> None:
        """Start `child` as a copy of `request` that shares its pages. If `max_running` requests run, or if the cache
        has no free sequence or state page, the child is queued instead, and recomputes the tokens.
        """
        if request.sequence is not None and len(self.running) < self.max_running:
            child.sequence = request.sequence.fork()
        if child.sequence is None:
            self._queue.push(child)
            return
        child.computed, child.is_long = request.computed, request.is_long
        child.adapter_slot = request.adapter_slot
        self.running.append(child)
        self._queue.tenant_queue(child).running += 1

    def samples_to_start(self, request: Request) -> int:
        """Return how many other samples of a request may start in the step that computes the end of its prompt. With
        several tenants, they must fit into a step and into the tenant's share of the running requests.
        """
        if self.step_limit is None:
            return len(request.children)
        tenant, most = self._queue.tenant_queue(request), self.max_running - len(self.running)
        if self._shares:
            most = self._running_share(tenant) - tenant.running
        return max(0, min(most, self.step_limit.rows(len(request.tokens), has_prompts=False)))

    def queue_sample(self, child: Request) -> None:
        """Queue a sample that has not started. It is admitted like a request with a cached prompt."""
        self._queue.push(child)

    def observe_step(self, size: StepSize, seconds: float) -> None:
        """Update the estimates with a step that has just ended. The step had the amounts of work `size`, and took
        `seconds`."""
        self.slo.observe_step(size, seconds)
        if self.step_limit is not None:
            self.step_limit.observe(size)

    def advance_beams(self, slots: Many[Request], successors: Many[Successor[Request]]) -> list[Request]:
        """Continue a beam search with `successors`. Return the slot (request) of each successor. The first successor of
        a beam stays in the beam's slot. The other successors of the beam get slots whose own beam has no successor.
        """
        spare, seats = assign_slots(slots, successors)
        for slot in spare:
            if slot.sequence is not None:
                self._release(slot)
        for slot, successor in seats:
            if slot is not successor.slot:
                slot.tokens = list(successor.slot.tokens)
                self.fork(successor.slot, slot)
            elif slot.sequence is None:  # the beam was preempted while it waited for the other beams
                self._queue.push(slot)
        # Read all of them before the slots change.
        all_logprobs = [successor.logprobs for _, successor in seats]
        for (slot, successor), logprobs in zip(seats, all_logprobs, strict=True):
            slot.tokens.append(successor.token)
            slot.logprobs, slot.cumulative_logprob = logprobs, successor.total
        return [slot for slot, _ in seats]

    def _commit(self, rows: list[int], tokens: list[int]) -> None:
        if rows:
            self.cache.commit_many(np.array(rows), np.array(tokens, dtype=np.int32))

    def _match(self, request: Request, control: CacheControl | None = None) -> Match:
        ids = request.ids(len(request.tokens))
        return self.cache.match(ids, control or request.match_control, request.media)

    def _admit(self, request: Request, match: Match) -> None:
        is_cold = False
        if request.is_long and self.offload is not None:
            unread = replace(request.match_control, read=False)
            is_cold = self.offload.open_cold(
                request, match.resume, lambda: self.cache.open(self._match(request, unread))
            )
        if not is_cold:
            request.sequence = self.cache.open(match, is_counted=not request.is_document)
        assert request.sequence is not None
        if request.adapter is not None and self.adapters is not None:
            request.adapter_slot = self.adapters.make_resident(request.adapter, self._adapters_in_use)
        self._lookahead.unprotect(request)
        request.computed = request.sequence.length
        self.running.append(request)
        self._queue.tenant_queue(request).running += 1

    def _start(self, request: Request, match: Match, looked_up: float) -> None:
        """Announce the next checkpoint of a request that starts to compute. Record its cache hit: the number of cached
        tokens, the position at which the hit ended, and the miss reason.
        """
        self._lookahead.announce_checkpoint(request)
        if request.pool_miss is None:  # None again if the request resumes after loaded tokens
            tier_miss = request.tier_miss
            is_tier_miss = (
                tier_miss is not None
                and tier_miss.position == match.resume
                and match.miss.reason in NOT_CACHED
            )
            request.pool_miss = tier_miss if is_tier_miss else match.miss
        if request.cached_tokens is None:
            request.count_cached(request.computed - request.reused_tokens)
            if len(self.cache.roots) <= MAX_ROOTS:
                request.in_other_tenant = self.cache.explain(match).reason == "other tenant"
            request.looked_up, request.started = looked_up, self.cache.clock.now()
            self.started_requests.append(request)
        if self.offload is not None:
            self.offload.request_started(request)
        if self.admission is not None:
            self.admission.request_admitted(request)

    def _decode(
        self,
        requests: list[Request],
        picked: list[Scheduled],
        places: dict[int, int],
        drafts: dict[int, list[int]],
    ) -> None:
        """Schedule one token of each decoding request, and its draft if it has one. These tokens do not count against
        the budget, so prompt chunks keep the sizes for which kernels are prepared. If enough pages are free, one call
        reserves all pages. Otherwise, drafts for which no pages are free are dropped.
        """
        rows = np.array([request.sequence.row for request in requests if request.sequence is not None])
        if drafts and requests and not places:
            counts = [1 + len(drafts.get(id(request), ())) for request in requests]
            if not self.cache.extend_many(rows, np.array(counts)):
                picked += [
                    (request, self._drafted_work(request, drafts.get(id(request), [])))
                    for request in requests
                ]
                return
        self._decode_each(requests, rows, picked, places)
        if drafts or self.cache.has_states:
            for place, (request, work) in enumerate(picked):
                draft = drafts.get(id(request), [])
                if draft and work.sequence.extend(1 + len(draft)):
                    draft = []
                if draft or work.sequence.length > work.sequence.state_length:
                    picked[place] = request, self._drafted_work(request, draft)

    def _decode_each(
        self,
        requests: list[Request],
        rows: npt.NDArray[np.integer],
        picked: list[Scheduled],
        places: dict[int, int],
    ) -> None:
        """Schedule one token of each decoding request, and add the work to `picked`. `rows` are the row numbers of the
        sequences in the block tables. `places` is that of `schedule`."""
        if requests and not self.cache.extend_many(rows):
            for request in requests:
                if request.inflight_tokens and request.sequence is not None:  # the usual case
                    work = Work(
                        request.sequence,
                        UNKNOWN,
                        places[id(request)],
                        request.images,
                        adapter=request.adapter_slot,
                        active_from=request.active_from,
                    )
                else:
                    work = self._work(request, 1, places)
                picked.append((request, work))
            return
        for request in requests:
            if request.sequence is not None:
                self._reserve(request, 1, picked, places)

    def _drafted_work(self, request: Request, draft: list[int]) -> Work:
        """Return the work of a decoding request with a draft, which may be empty. The work begins with the accepted
        tokens of the last draft, which recurrent layers compute again."""
        sequence = request.sequence
        assert sequence is not None
        recomputed = sequence.length - sequence.state_length if self.cache.has_states else 0
        tokens = [*request.tokens[request.computed - recomputed : request.computed + 1], *draft]
        return Work(
            sequence,
            np.array(tokens),
            -1,
            request.images,
            recomputed,
            len(draft),
            adapter=request.adapter_slot,
            active_from=request.active_from,
        )

    def _reserve(
        self,
        request: Request,
        budget: int,
        picked: list[Scheduled],
        places: dict[int, int],
        preempt: bool = True,
        until: int | None = None,
    ) -> int:
        """Reserve pages for as many tokens of a request as the budget allows, and add them to the work `picked`. Return
        the number of tokens.

        If pages are missing, old blocks of long requests become cold (move to host memory). If that is not enough,
        later requests (`Request.sort_key`) are preempted (unless `preempt` is False). As a last resort the request
        itself is preempted, and 0 is returned. While the end of the prompt is loading, the request computes at most up
        to position `until`.
        """
        sequence = request.sequence
        assert sequence is not None
        if request.documents and self.documents is not None:
            self.documents.copy(request)
        most, telling = min(request.pending, budget), request.computes_prompt_logprobs
        near = most = min(most, self._prompt_logprobs_left) if telling else most
        if request.is_long and len(self.running) > 1 and self.admission is not None:
            # Leaves pages of this step to other requests.
            near = most = min(most, self.admission.resident_tokens // 2)
        if until is not None and request.computed < until:
            near = min(most, until - request.computed)
        if request.documents and (stop := DocumentReuse.next_stop(request)) is not None:
            near = min(near, stop - request.computed)
        count = (
            near
            if sequence.next_checkpoint is None
            else min(near, sequence.next_checkpoint - sequence.length)
        )
        # An image that must stay whole may exceed the next checkpoint and `until`.
        count = _fitting(request, count) or _fitting(request, near) or _fitting(request, most)
        if not count:
            return 0  # an image that must stay whole waits for a larger step
        while pages := sequence.extend(count):
            if self._make_cold(request, -(-pages // max(1, len(self.cache.cold.columns))), count):
                continue
            victim = None
            if preempt:
                victim = choose_victim(self.cache, self.running, request, count, picked, self._excess_of)
            if victim is None:
                # A shorter chunk may fit: it needs fewer pages, and windows free pages after each step.
                shorter = _fitting(request, (count + 1) // 2)
                if count == 1 or not shorter:
                    self._preempt(request)
                    return 0
                count = shorter
            else:
                self._preempt(victim)
        picked.append((request, self._work(request, count, places)))
        self._prompt_logprobs_left -= count if telling else 0
        return count

    def _holds_next_token(self, request: Request) -> bool:
        """Return whether the pool is large enough for all tokens of a request, including its next token."""
        return self._feasibility.holds(len(request.tokens) + 1, request.control.tenant, self.reachable_slabs)

    def _make_cold(self, request: Request, blocks: int, count: int = 0) -> bool:
        """Move up to `blocks` of the oldest blocks of one running request to host memory (make them cold), so that
        `request` gets pages for `count` tokens. Return whether any block was moved.

        The blocks belong to a long request. The long request with the most blocks in the pool is tried first. A request
        that has more blocks in the pool than admission projected is also tried, if it may become long, and is long from
        then on. If `request` would exceed the quota of its tenant, only requests of this tenant are tried.
        """
        cold = None if self.offload is None else self.offload.cold
        if cold is None:
            return False
        most = 0 if self.admission is None else self.admission.resident_tokens // self.cache.block_tokens
        long = [
            one
            for one in self.running
            if one.may_be_long
            and one.sequence is not None
            and (one.is_long or _blocks_in_pool(one, self.cache.block_tokens) > most)
        ]
        if not long:
            return False
        if request.sequence is not None and self.cache.exceeds_quota(request.sequence, count):
            account = self.cache.account(request.control.tenant)
            long = [one for one in long if self.cache.account(one.control.tenant) is account]
        for one in sorted(long, key=lambda one: _blocks_in_pool(one, self.cache.block_tokens), reverse=True):
            if cold.offload(one, blocks):
                one.is_long = True
                return True
        return False

    def _host_fits(self, request: Request) -> bool:
        """Return whether host memory has space for the cold pages of a long request, together with the cold pages of
        all running long requests. All requests are counted at their expected lengths."""
        others = [one for one in self.running if one.is_long]
        if self.offload is None or self.offload.cold is None or not others:
            return self.offload is not None and self.offload.cold is not None
        cold, admission = self.offload.cold, self.admission
        ends = [one.limit if admission is None else admission.end_of(one) for one in (request, *others)]
        return sum(map(cold.bytes_for, ends)) <= cold.limit(request.control.tenant)

    def _work(self, request: Request, count: int, places: dict[int, int]) -> Work:
        assert request.sequence is not None
        tokens, source = UNKNOWN, -1
        if request.inflight_tokens and request.pending == 1:
            source = places[id(request)]
        else:
            tokens = np.array(request.tokens[request.computed : request.computed + count])
        return Work(
            request.sequence,
            tokens,
            source,
            request.images,
            adapter=request.adapter_slot,
            active_from=request.active_from,
        )

    def _unpark(self) -> bool:
        """If requests wait and beams are parked, preempt the last parked beam (`Request.sort_key`). Return whether a
        beam was preempted.
        """
        parked = [request for request in self.running if request.parked]
        if parked and self.waiting:
            self._preempt(max(parked, key=lambda request: request.sort_key))
        return bool(parked and self.waiting)

    def _reject(self, request: Request) -> None:
        """Handle a request that lacks pages although no other request runs. If host memory has space for its pages, the
        request becomes long. Otherwise the request runs once more without the cache, because shared cached pages may
        prevent eviction. If the request still lacks pages, finish it with the reason "no_room".
        """
        pool = self.cache.usable_slabs * self.cache.layout.slab_bytes
        if not request.is_long and self.runs_cold(request.limit, request.control.tenant, pool):
            request.may_be_long = request.is_long = True
            return
        if request.uncached:
            self.rejected += [one for one in request.finishes_with if one.finish_reason is None]
            self.finish(request, "no_room")
        request.uncached = True

    def _preempt(self, request: Request, save: bool = True) -> None:
        """Release the pages of a running request and let it wait again. With `save`, the pages of a long request are
        first copied to host memory. Do not set `save` if the pages may be invalid.
        """
        assert request.sequence is not None
        parked = request.parked
        began = request.computed > request.sequence.resumed
        request.preemptions += began
        grown = len(request.tokens) > request.tokens_when_preempted
        request.fruitless_preemptions = 1 if grown else request.fruitless_preemptions + 1
        request.tokens_when_preempted = len(request.tokens)
        if began:
            request.looked_in_tiers = None  # tiers may get the released pages
        self._release(request, save)
        if not parked:  # a parked beam continues with its successors
            self._queue.push(request)

    def _release(self, request: Request, save: bool = True) -> None:
        assert request.sequence is not None
        if save and request.is_long and self.offload is not None and self.offload.cold is not None:
            self.offload.cold.save(request)
        request.sequence.finish_reason = request.finish_reason
        self._close(request, request.sequence)
        request.sequence = None
        request.computed = 0
        self.running.remove(request)
        self._queue.tenant_queue(request).running -= 1

    def _close(self, request: Request, sequence: Sequence) -> None:
        """Close a sequence. If the recurrent states of a finished request lack its last tokens, the sequence stays
        open, and the next step computes these tokens. Later prompts can then resume at the end of the request.
        """
        if self.cache.has_states and sequence.control.store and request.finish_reason in ("stop", "length"):
            recomputed = sequence.length - sequence.state_length
            if recomputed:
                tokens = np.array(request.tokens[sequence.state_length : sequence.length])
                work = Work(
                    sequence,
                    tokens,
                    images=request.images,
                    recomputed=recomputed,
                    adapter=request.adapter_slot,
                    active_from=request.active_from,
                )
                self._unsettled.append((request, work))
                return
        sequence.close()


def _mean_length(requests: Many[Request]) -> float:
    """Return the mean number of tokens of requests."""
    return sum([len(request.tokens) for request in requests]) / max(1, len(requests))


def _fitting(request: Request, count: int) -> int:
    """Return how many of `count` tokens a step may compute without splitting an image that must stay whole."""
    return count if request.images is None else request.images.step_tokens(request.computed, count)


def _blocks_in_pool(request: Request, block_tokens: int) -> int:
    """Return the number of full blocks of a running request that are in the pool."""
    assert request.sequence is not None
    return request.sequence.length // block_tokens - request.sequence.cold_blocks

"""Which tokens are computed next: every decode, then chunks of prompts, within a budget of tokens a step.

    waiting   in the order of rank; admitted while the budget lasts, fewer than `max_running` run, and their growth leaves room
    running   holds pages; when there is no room, the one that ranks last gives its pages up and waits again

Tenants share steps, running places and pages fairly (see `waiting_queue.py`): where one has all of them, its last requests are
preempted for a tenant that waits and has less than its part. With one tenant nothing of this happens.

A step may be scheduled before the tokens of the one before it are known: they count, and whoever cannot get more is left
out. Preempted requests recompute: their full blocks stay cached, so that mostly they find them again. Knows no model and
no bytes; the cache answers what fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Many
from dataclasses import replace
from itertools import chain
from math import inf

import numpy as np

from kvloom.core import NOT_CACHED, KVCache, Match
from kvloom.engine.offload import Action, OffloadManager
from kvloom.engine.request import Request
from kvloom.engine.sampling import Finish, Successor, assign_slots
from kvloom.models.paged import Work

from .admission import Admission
from .feasibility import Feasibility
from .lookahead import Lookahead
from .preemption import RANK, Scheduled, choose_victim
from .waiting_queue import Front, TenantQueue, WaitingQueue, front_of

__all__ = ["Scheduled", "Scheduler"]

UNKNOWN = np.array([-1])
MOST_ROOTS = 64
"""Tenants and adapters up to which a miss is looked for among the others', too: each costs a walk."""
MOST_TOLD = 256
"""Tokens a step whose log-probabilities within prompts are found: each needs logits of its own."""
MOST_ASIDE = 32
"""Requests that a step may put aside because others compute what they need: looking at each costs a match."""
SHARED_STEPS = 4
"""Where there are several tenants, a step computes one in so many of the budget's tokens."""
MOST_PREEMPTED = 16
"""Requests that a step may preempt to give other tenants a place."""


class Scheduler:
    """Requests on one cache: up to `token_budget` tokens of prompts a step beside one of each that decodes. Not thread
    safe: one owner adds, schedules and commits."""

    def __init__(
        self,
        cache: KVCache,
        token_budget: int = 2048,
        max_running: int = 256,
        offload: OffloadManager | None = None,
    ) -> None:
        if token_budget < 1 or max_running < 1:
            raise ValueError(f"token_budget {token_budget} and max_running {max_running} must be at least 1")
        self.cache, self.token_budget, self.max_running = cache, token_budget, max_running
        self.running: list[Request] = []
        self.rejected: list[Request] = []
        """Requests that ended for want of room, until somebody tells of them."""
        self.begun: list[Request] = []
        """Requests that the last step gave their first work."""
        self.decoding = 0
        """How many of the last step's work decode: they come first, with one token each."""
        self.offload = offload
        """What lies below the pool, if anything does."""
        self.admission: Admission | None = Admission(cache)
        """How much longer those that run will get; without it, whoever has room now is let in."""
        self._queue = WaitingQueue(cache.inspect.accounts)
        self._several = len(cache.inspect.accounts) > 1
        self._parts: dict[TenantQueue, float] = {}  # of tenants that wait or run, where there are several
        self._lookahead = Lookahead(cache, self._queue, self._match)
        self._paused = 0  # of those that run, who computes nothing now: pages come sooner
        self._feasibility = Feasibility(cache, token_budget)
        self._told = MOST_TOLD  # of them, what is left in this step

    @property
    def waiting(self) -> int:
        return sum(1 for _ in self._queue)

    @property
    def loading_count(self) -> int:
        """Requests that wait for pages from below."""
        return self._queue.loading + self._paused

    @property
    def busy(self) -> bool:
        return bool(self.running) or any(True for _ in self._queue)

    @property
    def open(self) -> list[Request]:
        """Requests that have not ended."""
        return [*(request for request in self.running if request.finish_reason is None), *self._queue]

    def add(self, request: Request) -> None:
        """Let a request wait. Raises ValueError where it could never run, with the numbers."""
        self._feasibility.check(request)
        self._queue.push(request)
        if self.offload is not None:
            can_wait = bool(self.running) or self._queue.length > 1
            self.offload.prefetch(request, self._match, can_wait)

    def cancel(self, request: Request) -> None:
        """End a request now; its pages are free at once."""
        if request.finish_reason is None:
            self.finish(request, "cancelled")

    def schedule(self, places: dict[int, int] | None = None) -> list[Scheduled]:
        """The next step's work, its pages reserved; empty only where nothing is left to do, or to know first. `places`
        says where the unknown token of a request (by `id`) stands among those the step before chose."""
        places = places or {}
        self.begun = []
        self._paused = 0
        picked: list[Scheduled] = []
        fronts = self._prefetch()
        self._told = MOST_TOLD
        if self._several:
            self._share_out()
        empty = not self.running
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in sorted(self.running, key=self._order if self._parts else RANK):
            size = len(request.tokens) + request.inflight_tokens
            if request.mask_pending:
                continue
            if request.computed < size < request.limit:
                (decodes if size - request.computed == 1 else prompts).append(request)
        alone = self.running[0] if len(self.running) == 1 else None
        if self.offload is None:  # what leaves for a tier comes back from it
            self._lookahead.protect_queued()
        self._decode(decodes, picked, places)
        self.decoding = first = len(picked)
        budget = self._shared_budget(prompts) if self._several else self.token_budget
        if self._parts and prompts:
            prompts.sort(key=lambda request: self._queue.line_of(request).service)
            least = self._queue.line_of(prompts[0]).service
            budget = self._admit_waiting(budget, picked, places, fronts, empty, least)
        for request in prompts:
            if request.sequence is None:
                continue  # preempted for a request before it
            until: int | None = None
            if self.offload is not None:
                decision = self.offload.before_prefill(request)
                until = decision.until
                if decision.action is Action.RESUME:
                    self._release(request)
                    alone = None
                    self._queue.push(request)
                    continue
                if decision.action is Action.WAIT:
                    self._paused += 1
                    continue
            if budget:
                budget -= self._reserve(request, budget, picked, places, until=until)
        if alone is not None and alone.sequence is None and not self._freeing:
            self._reject(alone)
        block = self.cache.block_tokens
        fronts |= {front_of(request, request.computed, block) for request, _ in picked[first:]}
        self._admit_waiting(budget, picked, places, fronts, empty)
        return picked

    def _admit_waiting(
        self,
        budget: int,
        picked: list[Scheduled],
        places: dict[int, int],
        fronts: set[Front | None],
        empty: bool,
        below: float = inf,
    ) -> int:
        """Admit who waits while the budget lasts, but for those whose next tokens others compute or load (`fronts`): those wait
        for the others, at once for who loads, so that nothing is loaded twice. Only tenants that had less service than `below`
        are looked at. Returns what is left of the budget."""
        aside: list[Request] = []  # who waits on, where something breaks off, too
        passed: set[TenantQueue] = set()  # tenants whose next request has no room
        if self.admission is not None:
            self.admission.refresh()
        try:
            while budget and (len(self.running) < self.max_running or (not picked and self._unpark())):
                waiting = self._queue.pop(passed, below)
                if waiting is None:
                    break
                aside.append(waiting)
                if waiting.mask_pending:
                    continue
                looked_up = self.cache.clock.now()
                found = self._match(waiting)
                front = front_of(waiting, found.resume, self.cache.block_tokens)
                if front is not None and front in fronts and not self._claims(waiting):
                    if self._queue.wait_behind(waiting, front):
                        aside.pop()
                        continue
                    if len(aside) <= MOST_ASIDE:
                        continue  # someone computes what it needs next: it will find it
                fronts.add(front)
                until: int | None = None
                if self.offload is not None:
                    decision = self.offload.before_admission(waiting, found)
                    until = decision.until
                    if decision.action is Action.WAIT:
                        self._queue.set_loading(aside.pop(), front)
                        if self.admission is not None:
                            self.admission.refresh()  # it comes, too
                        continue
                    if (picked or places) and decision.action is Action.NO_ROOM:
                        # It would compute what it could load, and with as little room; who ends makes some.
                        if self._pass_over(waiting, passed, picked):
                            continue
                        break
                    if found.version != self.cache.version:  # what it needed has come
                        found = self._match(waiting)
                if self.admission is not None and picked and not self._within_part(waiting):
                    coming = () if self.offload is None else self.offload.copying_requests()
                    if not self.admission.fits(waiting, found.resume, self.running, coming):
                        # Those that run would give their pages up for it, sooner or later.
                        if self._pass_over(waiting, passed, picked):
                            continue
                        break
                self._admit(waiting, found)
                self._lookahead.request_checkpoints(waiting)
                aside.pop()
                taken = self._reserve(waiting, budget, picked, places, preempt=not picked, until=until)
                budget -= taken
                if taken:
                    self._begin(waiting, found, looked_up)
                    if self.admission is not None:
                        self.admission.request_admitted(waiting)
                elif self.running or picked or not empty or self._freeing:
                    if self.offload is not None and not picked:
                        self.offload.publish_loaded()  # else those who wait behind it would hold their pages until it ran
                    # (What gave way holds pages until its copies are made.)
                    if self._pass_over(waiting, passed, picked):
                        continue
                    break
                else:
                    self._reject(waiting)
        finally:
            for request in aside:
                self._queue.put_back(request)
        return budget

    # -- between tenants --------------------------------------------------------------------------

    def _share_out(self) -> None:
        """Find the part of each tenant that waits or runs, and preempt running requests of those above their part for those
        that wait below theirs. Without a second tenant there are no parts."""
        lines = self._queue.active()
        total = sum(line.weight for line in lines)
        self._parts = {line: line.weight / total for line in lines} if len(lines) > 1 else {}
        if not self._parts:
            return
        free, left = self.max_running - len(self.running), MOST_PREEMPTED
        for line in sorted((line for line in lines if line.heap), key=lambda line: line.turn):
            short, line.short = line.short, 0
            if line.head() is None:
                continue
            while left and short and self.cache.reachable_bytes(line.account) < short:
                if not self._preempt_above(self._excess, {line}):
                    break
                free, left = free + 1, left - 1
            wanted = min(len(line.heap), self._places(line) - line.running)
            while left and free < wanted:
                if not self._preempt_above(lambda one: one.running - self._places(one), {line}):
                    break
                free, left = free + 1, left - 1
            free = max(0, free - max(0, wanted))

    def _shared_budget(self, prompts: list[Request]) -> int:
        """Tokens of prompts in a step where there are several tenants: fewer, so that a tenant that comes waits for a short
        step. An image that must stay whole may need a whole step."""
        heads = (line.heap[0][1] for line in self._queue.active() if line.heap)
        if any(request.images is not None for request in chain(prompts, heads)):
            return self.token_budget
        return max(1, self.token_budget // SHARED_STEPS)

    def _preempt_above(self, excess: Callable[[TenantQueue], float], spared: set[TenantQueue]) -> bool:
        """Preempt the last running request of the tenant with the largest positive excess; whether there is one."""
        lines = [line for line in self._parts if line.running and line not in spared and excess(line) > 0]
        if not lines:
            return False
        most = max(lines, key=lambda line: excess(line) / line.weight)
        self._preempt(max((r for r in self.running if self._queue.line_of(r) is most), key=RANK))
        return True

    def _places(self, line: TenantQueue) -> int:
        """The running places that are a tenant's part: at least one."""
        return max(1, int(self.max_running * self._parts[line]))

    def _excess(self, line: TenantQueue) -> float:
        """Bytes that a tenant's sequences hold above its part of the pool; negative where they hold less."""
        return line.account.in_use - self._parts.get(line, 1.0) * self._pool_bytes

    @property
    def _pool_bytes(self) -> int:
        return self.cache.usable_slabs * self.cache.layout.slab_bytes

    def _excess_of(self, request: Request) -> float:
        return self._excess(self._queue.line_of(request))

    def _order(self, request: Request) -> tuple[bool, tuple[int, int]]:
        """Sorts first the requests of tenants that hold no more than their part: they get pages before others take them."""
        return self._excess(self._queue.line_of(request)) > 0, request.rank

    def _within_part(self, request: Request) -> bool:
        """Whether a request and all that its tenant runs are expected to stay within the tenant's part of the pool. Then the
        growth of other tenants does not keep it out: theirs are preempted."""
        line = self._queue.line_of(request)
        if not self._parts or self.admission is None:
            return False
        each = self.cache.layout.slab_bytes_for(self.admission.end_of(request))
        return (line.running + 1) * each <= self._parts.get(line, 1.0) * self._pool_bytes

    def _pass_over(self, request: Request, passed: set[TenantQueue], picked: list[Scheduled]) -> bool:
        """A request finds no room: its tenant is passed over in this step. Where the step has work, so are tenants that hold
        more than their share, so that they do not take what becomes free. Whether a tenant may be left."""
        line = self._queue.line_of(request)
        if not self._parts:
            return False
        need = self.cache.layout.slab_bytes_for(len(request.tokens) + 1)
        if self._excess(line) + need <= 0:
            margin = len(self.running) // self.cache.block_tokens + 1
            line.short = need + margin * self.cache.block_bytes
        passed.add(line)
        if picked:
            passed.update(one for one in self._parts if one.account.in_use >= one.account.guaranteed)
        return any(one not in passed for one in self._parts)

    def _claims(self, request: Request) -> bool:
        """Whether pages of the pool are filled for a request: it takes them before it waits for others."""
        return self.offload is not None and self.offload.is_copying(request)

    @property
    def _freeing(self) -> bool:
        """Whether pages that are in use below will be free by themselves."""
        return self.offload is not None and self.offload.is_retaining_pages

    def _prefetch(self) -> set[Front | None]:
        """Whose pages have come waits in line again; what the others load, nobody else need compute."""
        if self.offload is None:
            return set()
        self.offload.poll()
        return self._queue.requeue_ready(self.offload.is_pending)

    def step_launched(self, work: Many[Scheduled]) -> None:
        """What was scheduled is on its way: tokens that are known are committed, and whoever reached the end of its
        tokens gets one that is not."""
        rows, tokens = [], []
        for request, part in work:
            count = len(part.tokens)
            request.computed += count
            if self._parts:
                line = self._queue.line_of(request)
                line.service += count / line.weight
            if part.source < 0:
                if count == 1:
                    rows.append(part.sequence.row)
                    tokens.append(part.tokens[0])
                else:
                    part.sequence.commit(part.tokens.astype(np.int32))
            if request.computed == len(request.tokens) + request.inflight_tokens:
                request.inflight_tokens += 1
                request.uncached = False
        self._commit(rows, tokens)

    def commit_tokens(self, requests: Many[Request], tokens: Many[int], after: Many[Scheduled]) -> None:
        """The tokens that a step chose: each request has its own now, and `after`, the step launched since, is committed
        as far as it computed them."""
        for request, token in zip(requests, tokens, strict=True):
            if request.finish_reason is None:
                request.inflight_tokens -= 1
                if request.beams is None:  # whose next tokens are chosen together
                    request.tokens.append(token)
        mine = [(request, part) for request, part in after if part.source >= 0 and part.sequence.open]
        self._commit([part.sequence.row for _, part in mine], [tokens[part.source] for _, part in mine])

    def discard_step(self, places: dict[int, int] | None = None) -> None:
        """A step broke off, nobody knows where: what was scheduled for it, or launched, has not been. Who ran waits again,
        and computes anew what is not in the cache by now: its states may be ahead of its tokens."""
        for request in [request for request in self.running if not request.parked]:
            assert request.sequence is not None
            request.sequence.control = replace(request.sequence.control, store=False)
            self._preempt(request)
        for request in self._queue:
            request.inflight_tokens = int(id(request) in (places or {}))

    def finish(self, request: Request, why: Finish) -> None:
        """End a request, and those bound to it; what they computed stays cached."""
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
        """Let `child`, which has all of `request`'s tokens that are computed, go on from there: on the same pages, or, where
        there is no row or no room for its states, by its own tokens when its turn comes."""
        if request.sequence is not None and len(self.running) < self.max_running:
            child.sequence = request.sequence.fork()
        if child.sequence is None:
            self._queue.push(child)
            return
        child.computed = request.computed
        self.running.append(child)
        self._queue.line_of(child).running += 1

    def advance_beams(self, slots: Many[Request], successors: Many[Successor[Request]]) -> list[Request]:
        """Let beams go on as `successors` say, and in which slots: the first that follows a slot stays there, others fork
        from it into slots that nobody follows."""
        spare, seats = assign_slots(slots, successors)
        for slot in spare:
            if slot.sequence is not None:
                self._release(slot)
        for slot, way in seats:
            if slot is not way.slot:
                slot.tokens = list(way.slot.tokens)
                self.fork(way.slot, slot)
            elif slot.sequence is None:  # it lost its pages while it waited for the others
                self._queue.push(slot)
        told = [way.logprobs for _, way in seats]  # they go on from those of slots that change now
        for (slot, way), logprobs in zip(seats, told, strict=True):
            slot.tokens.append(way.token)
            slot.logprobs, slot.cumulative_logprob = logprobs, way.total
        return [slot for slot, _ in seats]

    def _commit(self, rows: list[int], tokens: list[int]) -> None:
        if rows:
            self.cache.commit_many(np.array(rows), np.array(tokens, dtype=np.int32))

    def _match(self, request: Request) -> Match:
        media = () if request.images is None else request.images.media
        return self.cache.match(request.ids(len(request.tokens)), request.match_control, media)

    def _admit(self, request: Request, found: Match) -> None:
        request.sequence = self.cache.open(found)
        self._lookahead.unprotect(request)
        request.computed = request.sequence.length
        self.running.append(request)
        self._queue.line_of(request).running += 1

    def _begin(self, request: Request, found: Match, looked_up: float) -> None:
        """A request got its first work: remember what it found, and why not more."""
        if request.cached_tokens is None:
            request.count_cached(request.computed)
            request.pool_miss = found.miss
            lacking = request.tier_miss  # of what lies below, which the pool knows nothing of
            if lacking is not None and lacking.position == found.resume and found.miss.reason in NOT_CACHED:
                request.pool_miss = lacking
            if len(self.cache.roots) <= MOST_ROOTS:
                request.other_tenant_has_more = self.cache.explain(found).reason == "other tenant"
            request.looked_up, request.started = looked_up, self.cache.clock.now()
            self.begun.append(request)
        if self.offload is not None:
            self.offload.request_started(request)

    def _decode(self, requests: list[Request], picked: list[Scheduled], places: dict[int, int]) -> None:
        """Give one token each to requests that decode: all at once where there is room for all. They do not count
        against the budget: chunks of prompts keep their size, which kernels that are prepared for a size like."""
        rows = np.array([request.sequence.row for request in requests if request.sequence is not None])
        if requests and not self.cache.extend_many(rows):
            for request in requests:
                if (
                    request.inflight_tokens and request.sequence is not None
                ):  # of nearly all of them, at each step
                    work = Work(request.sequence, UNKNOWN, places[id(request)], request.images)
                else:
                    work = self._work(request, 1, places)
                picked.append((request, work))
            return
        for request in requests:
            if request.sequence is not None:
                self._reserve(request, 1, picked, places)

    def _reserve(
        self,
        request: Request,
        budget: int,
        picked: list[Scheduled],
        places: dict[int, int],
        preempt: bool = True,
        until: int | None = None,
    ) -> int:
        """Reserve pages for as many of a request's tokens as the budget allows; how many it got. Where there is no room
        those that rank behind it give theirs up, and if that does not do, it waits."""
        sequence = request.sequence
        assert sequence is not None
        most, telling = min(request.pending, budget), request.computes_prompt_logprobs
        near = most = min(most, self._told) if telling else most
        if until is not None and request.computed < until:
            near = min(most, until - request.computed)
        count = (
            near
            if sequence.next_checkpoint is None
            else min(near, sequence.next_checkpoint - sequence.length)
        )
        # (A snapshot that is wanted inside of an image that must stay whole is not taken, nor does a load meet it there.)
        count = _fitting(request, count) or _fitting(request, near) or _fitting(request, most)
        if not count:
            return 0  # an image that must stay whole waits for a step with room for it
        while sequence.extend(count):
            victim = None
            if preempt:
                victim = choose_victim(self.cache, self.running, request, count, picked, self._excess_of)
            if victim is None:
                # May fit beside what is already picked, or, where windows leave pages behind, step by step.
                shorter = _fitting(request, (count + 1) // 2)
                if count == 1 or not shorter:
                    self._preempt(request)
                    return 0
                count = shorter
            else:
                self._preempt(victim)
        picked.append((request, self._work(request, count, places)))
        self._told -= count if telling else 0
        return count

    def _work(self, request: Request, count: int, places: dict[int, int]) -> Work:
        assert request.sequence is not None
        if request.inflight_tokens and request.pending == 1:
            return Work(request.sequence, UNKNOWN, places[id(request)], request.images)
        tokens = np.array(request.tokens[request.computed : request.computed + count])
        return Work(request.sequence, tokens, images=request.images)

    def _unpark(self) -> bool:
        """Where beams that wait for others hold every row, one gives its up; whether that is so."""
        parked = [request for request in self.running if request.parked]
        if parked and self.waiting:
            self._preempt(max(parked, key=lambda request: request.rank))
        return bool(parked and self.waiting)

    def _reject(self, request: Request) -> None:
        """A request had the pool to itself and found no room: what it found cached, or was about to share with the cache,
        may be why. It tries once more without the cache, until it gets a token; then that is its end."""
        if request.uncached:
            self.rejected += [one for one in request.finishes_with if one.finish_reason is None]
            self.finish(request, "no_room")
        request.uncached = True

    def _preempt(self, request: Request) -> None:
        assert request.sequence is not None
        parked = request.parked
        began = request.computed > request.sequence.resumed
        request.preemptions += began
        if began:
            request.looked_in_tiers = None  # what it loses now may be found below
        self._release(request)
        if not parked:  # else it is nowhere until its successors are known
            self._queue.push(request)

    def _release(self, request: Request) -> None:
        assert request.sequence is not None
        request.sequence.finish_reason = request.finish_reason
        request.sequence.close()
        request.sequence = None
        request.computed = 0
        self.running.remove(request)
        self._queue.line_of(request).running -= 1


def _fitting(request: Request, count: int) -> int:
    """How many of `count` tokens a step may take so that it cuts no image that must stay whole."""
    return count if request.images is None else request.images.step_tokens(request.computed, count)

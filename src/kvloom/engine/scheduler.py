"""Which tokens are computed next: every decode, then chunks of prompts, within a budget of tokens a step.

    waiting   in the order of rank; admitted while the budget lasts, fewer than `max_running` run, and their growth leaves room
    running   holds pages; when there is no room, the one that ranks last gives its pages up and waits again

Tenants share steps, running places and pages fairly (see `queue.py`): where one has all of them, its last requests are
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

from kvloom.core import ABSENT, KVCache, Match
from kvloom.models.batch import Work

from .beams import Successor, seated
from .foresight import Foresight
from .growth import Growth
from .lower import Lower
from .needs import Needs
from .queue import Front, Line, Queue, front_of
from .request import Finish, Request
from .victims import RANK, Scheduled, victim_of

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

    def __init__(self, cache: KVCache, token_budget: int = 2048, max_running: int = 256) -> None:
        if token_budget < 1 or max_running < 1:
            raise ValueError(f"token_budget {token_budget} and max_running {max_running} must be at least 1")
        self.cache, self.token_budget, self.max_running = cache, token_budget, max_running
        self.running: list[Request] = []
        self.given_up: list[Request] = []
        """Requests that ended for want of room, until somebody tells of them."""
        self.begun: list[Request] = []
        """Requests that the last step gave their first work."""
        self.decoding = 0
        """How many of the last step's work decode: they come first, with one token each."""
        self.lower: Lower | None = None
        """What lies below the pool, if anything does."""
        self.growth: Growth | None = Growth(cache)
        """How much longer those that run will get; without it, whoever has room now is let in."""
        self._queue = Queue(cache.accounts)
        self._several = len(cache.accounts.accounts) > 1
        self._parts: dict[Line, float] = {}  # of tenants that wait or run, where there are several
        self._foresight = Foresight(cache, self._queue, self._match)
        self._standing = 0  # of those that run, who computes nothing now: pages come sooner
        self._needs = Needs(cache, token_budget)
        self._told = MOST_TOLD  # of them, what is left in this step

    @property
    def waiting(self) -> int:
        return sum(1 for _ in self._queue)

    @property
    def loads(self) -> int:
        """Requests that wait for pages from below."""
        return self._queue.aside + self._standing

    @property
    def busy(self) -> bool:
        return bool(self.running) or any(True for _ in self._queue)

    @property
    def open(self) -> list[Request]:
        """Requests that have not ended."""
        return [*(request for request in self.running if request.finish is None), *self._queue]

    def add(self, request: Request) -> None:
        """Let a request wait. Raises ValueError where it could never run, with the numbers."""
        self._needs.refuse(request)
        self._queue.push(request)
        if self.lower is not None and self.lower.foresees:
            patient = bool(self.running) or self._queue.length > 1
            self.lower.foresee(request, self._match(request), patient)

    def cancel(self, request: Request) -> None:
        """End a request now; its pages are free at once."""
        if request.finish is None:
            self.finish(request, "cancelled")

    def schedule(self, places: dict[int, int] | None = None) -> list[Scheduled]:
        """The next step's work, its pages reserved; empty only where nothing is left to do, or to know first. `places`
        says where the unknown token of a request (by `id`) stands among those the step before chose."""
        places = places or {}
        self.begun = []
        self._standing = 0
        picked: list[Scheduled] = []
        fronts = self._look_below()
        self._told = MOST_TOLD
        if self._several:
            self._share_out()
        empty = not self.running
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in sorted(self.running, key=self._order if self._parts else RANK):
            size = len(request.tokens) + request.unknown
            if request.mask_pending:
                continue
            if request.computed < size < request.limit:
                (decodes if size - request.computed == 1 else prompts).append(request)
        alone = self.running[0] if len(self.running) == 1 else None
        if self.lower is None:  # what leaves for a tier comes back from it
            self._foresight.look()
        self._decode(decodes, picked, places)
        self.decoding = first = len(picked)
        budget = self._shared_budget(prompts) if self._several else self.token_budget
        if self._parts and prompts:
            prompts.sort(key=lambda request: self._queue.line_of(request).service)
            least = self._queue.line_of(prompts[0]).service
            budget = self._take_in(budget, picked, places, fronts, empty, least)
        for request in prompts:
            if self.lower is not None and request.sequence is not None and self.lower.may_jump(request):
                self._let_go(request)  # the rest of its prompt has come: it goes on behind it
                alone = None
                self._queue.push(request)
            elif self.lower is not None and request.sequence is not None and self.lower.stands(request):
                self._standing += 1
            elif budget and request.sequence is not None:
                budget -= self._reserve(request, budget, picked, places)
        if alone is not None and alone.sequence is None and not self._freeing:
            self._give_up(alone)
        block = self.cache.block_tokens
        fronts |= {front_of(request, request.computed, block) for request, _ in picked[first:]}
        self._take_in(budget, picked, places, fronts, empty)
        return picked

    def _take_in(
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
        passed: set[Line] = set()  # tenants whose next request has no room
        if self.growth is not None:
            self.growth.look()
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
                    if self._queue.put_behind(waiting, front):
                        aside.pop()
                        continue
                    if len(aside) <= MOST_ASIDE:
                        continue  # someone computes what it needs next: it will find it
                fronts.add(front)
                if self.lower is not None:
                    if self.lower.holds(waiting, found):
                        self._queue.put_aside(aside.pop(), front)
                        if self.growth is not None:
                            self.growth.look()  # it comes, too
                        continue
                    if (picked or places) and self.lower.lacks_room(waiting):
                        # It would compute what it could load, and with as little room; who ends makes some.
                        if self._pass_over(waiting, passed, picked):
                            continue
                        break
                    if found.version != self.cache.tree.version:  # what it needed has come
                        found = self._match(waiting)
                if self.growth is not None and picked and not self._within_part(waiting):
                    coming = () if self.lower is None else self.lower.coming
                    if not self.growth.leaves_room(waiting, found.resume, self.running, coming):
                        # Those that run would give their pages up for it, sooner or later.
                        if self._pass_over(waiting, passed, picked):
                            continue
                        break
                self._admit(waiting, found)
                self._foresight.leave_points(waiting)
                aside.pop()
                taken = self._reserve(waiting, budget, picked, places, preempt=not picked)
                budget -= taken
                if taken:
                    self._begin(waiting, found, looked_up)
                    if self.growth is not None:
                        self.growth.let_in(waiting)
                elif self.running or picked or not empty or self._freeing:
                    if self.lower is not None and not picked:
                        self.lower.land()  # else those who wait behind it would hold their pages until it ran
                    # (What gave way holds pages until its copies are made.)
                    if self._pass_over(waiting, passed, picked):
                        continue
                    break
                else:
                    self._give_up(waiting)
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
            while left and short and self.cache.room.reachable(line.account) < short:
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
        if any(request.sight is not None for request in chain(prompts, heads)):
            return self.token_budget
        return max(1, self.token_budget // SHARED_STEPS)

    def _preempt_above(self, excess: Callable[[Line], float], spared: set[Line]) -> bool:
        """Preempt the last running request of the tenant with the largest positive excess; whether there is one."""
        lines = [line for line in self._parts if line.running and line not in spared and excess(line) > 0]
        if not lines:
            return False
        most = max(lines, key=lambda line: excess(line) / line.weight)
        self._preempt(max((r for r in self.running if self._queue.line_of(r) is most), key=RANK))
        return True

    def _places(self, line: Line) -> int:
        """The running places that are a tenant's part: at least one."""
        return max(1, int(self.max_running * self._parts[line]))

    def _excess(self, line: Line) -> float:
        """Bytes that a tenant's sequences hold above its part of the pool; negative where they hold less."""
        return line.account.held - self._parts.get(line, 1.0) * self._pool_bytes

    @property
    def _pool_bytes(self) -> int:
        return (self.cache.pool.slabs - 1) * self.cache.layout.slab_bytes

    def _excess_of(self, request: Request) -> float:
        return self._excess(self._queue.line_of(request))

    def _order(self, request: Request) -> tuple[bool, tuple[int, int]]:
        """Sorts first the requests of tenants that hold no more than their part: they get pages before others take them."""
        return self._excess(self._queue.line_of(request)) > 0, request.rank

    def _within_part(self, request: Request) -> bool:
        """Whether a request and all that its tenant runs are expected to stay within the tenant's part of the pool. Then the
        growth of other tenants does not keep it out: theirs are preempted."""
        line = self._queue.line_of(request)
        if not self._parts or self.growth is None:
            return False
        each = self.cache.layout.slab_bytes_for(self.growth.end_of(request))
        return (line.running + 1) * each <= self._parts.get(line, 1.0) * self._pool_bytes

    def _pass_over(self, request: Request, passed: set[Line], picked: list[Scheduled]) -> bool:
        """A request finds no room: its tenant is passed over in this step. Where the step has work, so are tenants that hold
        more than their share, so that they do not take what becomes free. Whether a tenant may be left."""
        line = self._queue.line_of(request)
        if not self._parts:
            return False
        need = self.cache.layout.slab_bytes_for(len(request.tokens) + 1)
        if self._excess(line) + need <= 0:
            margin = len(self.running) // self.cache.block_tokens + 1
            line.short = need + margin * self.cache.tree.pages.row_bytes
        passed.add(line)
        if picked:
            passed.update(one for one in self._parts if one.account.held >= one.account.guaranteed)
        return any(one not in passed for one in self._parts)

    def _claims(self, request: Request) -> bool:
        """Whether pages of the pool are filled for a request: it takes them before it waits for others."""
        return self.lower is not None and self.lower.claims(request)

    @property
    def _freeing(self) -> bool:
        """Whether pages that are in use below will be free by themselves."""
        return self.lower is not None and self.lower.holding

    def _look_below(self) -> set[Front | None]:
        """Whose pages have come waits in line again; what the others load, nobody else need compute."""
        if self.lower is None:
            return set()
        self.lower.poll()
        return self._queue.look(self.lower.under_way)

    def launched(self, work: Many[Scheduled]) -> None:
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
            if request.computed == len(request.tokens) + request.unknown:
                request.unknown += 1
                request.uncached = False
        self._commit(rows, tokens)

    def learned(self, requests: Many[Request], tokens: Many[int], after: Many[Scheduled]) -> None:
        """The tokens that a step chose: each request has its own now, and `after`, the step launched since, is committed
        as far as it computed them."""
        for request, token in zip(requests, tokens, strict=True):
            if request.finish is None:
                request.unknown -= 1
                if request.beams is None:  # whose next tokens are chosen together
                    request.tokens.append(token)
        mine = [(request, part) for request, part in after if part.source >= 0 and part.sequence.open]
        self._commit([part.sequence.row for _, part in mine], [tokens[part.source] for _, part in mine])

    def failed(self, places: dict[int, int] | None = None) -> None:
        """A step broke off, nobody knows where: what was scheduled for it, or launched, has not been. Who ran waits again,
        and computes anew what is not in the cache by now: its states may be ahead of its tokens."""
        for request in [request for request in self.running if not request.parked]:
            assert request.sequence is not None
            request.sequence.control = replace(request.sequence.control, store=False)
            self._preempt(request)
        for request in self._queue:
            request.unknown = int(id(request) in (places or {}))

    def finish(self, request: Request, why: Finish) -> None:
        """End a request, and those bound to it; what they computed stays cached."""
        for one in request.bound:
            if one.finish is None:
                one.finish = why
                one.unknown = 0
                self._foresight.forget(one)
                if self.growth is not None and why in ("stop", "length"):
                    self.growth.ended(one)
                if self.lower is not None:
                    self.lower.forget(one)
                if one.sequence is not None:
                    self._let_go(one)

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

    def succeed(self, slots: Many[Request], successors: Many[Successor[Request]]) -> list[Request]:
        """Let beams go on as `successors` say, and in which slots: the first that follows a slot stays there, others fork
        from it into slots that nobody follows."""
        spare, seats = seated(slots, successors)
        for slot in spare:
            if slot.sequence is not None:
                self._let_go(slot)
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
        media = () if request.sight is None else request.sight.media
        return self.cache.match(request.ids(len(request.tokens)), request.asking, media)

    def _admit(self, request: Request, found: Match) -> None:
        request.sequence = self.cache.open(found)
        self._foresight.forget(request)
        request.computed = request.sequence.length
        self.running.append(request)
        self._queue.line_of(request).running += 1

    def _begin(self, request: Request, found: Match, looked_up: float) -> None:
        """A request got its first work: remember what it found, and why not more."""
        if request.cached_tokens is None:
            request.count_cached(request.computed)
            request.stop = found.stop
            lacking = request.lacking  # of what lies below, which the pool knows nothing of
            if lacking is not None and lacking.position == found.resume and found.stop.reason in ABSENT:
                request.stop = lacking
            if len(self.cache.tree.roots) <= MOST_ROOTS:
                request.elsewhere = self.cache.explain(found).reason == "other tenant"
            request.looked_up, request.began = looked_up, self.cache.clock.now()
            self.begun.append(request)
        if self.lower is not None:
            self.lower.began(request)

    def _decode(self, requests: list[Request], picked: list[Scheduled], places: dict[int, int]) -> None:
        """Give one token each to requests that decode: all at once where there is room for all. They do not count
        against the budget: chunks of prompts keep their size, which kernels that are prepared for a size like."""
        rows = np.array([request.sequence.row for request in requests if request.sequence is not None])
        if requests and not self.cache.extend_many(rows):
            for request in requests:
                if request.unknown and request.sequence is not None:  # of nearly all of them, at each step
                    work = Work(request.sequence, UNKNOWN, places[id(request)], request.sight)
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
    ) -> int:
        """Reserve pages for as many of a request's tokens as the budget allows; how many it got. Where there is no room
        those that rank behind it give theirs up, and if that does not do, it waits."""
        sequence = request.sequence
        assert sequence is not None
        most, telling = min(request.pending, budget), request.telling
        near = most = min(most, self._told) if telling else most
        if self.lower is not None and (stop := self.lower.stop_at(request)) is not None:
            near = min(most, stop - request.computed)
        count = near if sequence.boundary is None else min(near, sequence.boundary - sequence.length)
        # (A snapshot that is wanted inside of an image that must stay whole is not taken, nor does a load meet it there.)
        count = _fitting(request, count) or _fitting(request, near) or _fitting(request, most)
        if not count:
            return 0  # an image that must stay whole waits for a step with room for it
        while sequence.extend(count):
            victim = None
            if preempt:
                victim = victim_of(self.cache, self.running, request, count, picked, self._excess_of)
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
        if request.unknown and request.pending == 1:
            return Work(request.sequence, UNKNOWN, places[id(request)], request.sight)
        tokens = np.array(request.tokens[request.computed : request.computed + count])
        return Work(request.sequence, tokens, sight=request.sight)

    def _unpark(self) -> bool:
        """Where beams that wait for others hold every row, one gives its up; whether that is so."""
        parked = [request for request in self.running if request.parked]
        if parked and self.waiting:
            self._preempt(max(parked, key=lambda request: request.rank))
        return bool(parked and self.waiting)

    def _give_up(self, request: Request) -> None:
        """A request had the pool to itself and found no room: what it found cached, or was about to share with the cache,
        may be why. It tries once more without the cache, until it gets a token; then that is its end."""
        if request.uncached:
            self.given_up += [one for one in request.bound if one.finish is None]
            self.finish(request, "no_room")
        request.uncached = True

    def _preempt(self, request: Request) -> None:
        assert request.sequence is not None
        parked = request.parked
        began = request.computed > request.sequence.resumed
        request.preemptions += began
        if began:
            request.looked_below = None  # what it loses now may be found below
        self._let_go(request)
        if not parked:  # else it is nowhere until its successors are known
            self._queue.push(request)

    def _let_go(self, request: Request) -> None:
        assert request.sequence is not None
        request.sequence.ending = request.finish
        request.sequence.close()
        request.sequence = None
        request.computed = 0
        self.running.remove(request)
        self._queue.line_of(request).running -= 1


def _fitting(request: Request, count: int) -> int:
    """How many of `count` tokens a step may take so that it cuts no image that must stay whole."""
    return count if request.sight is None else request.sight.fitting(request.computed, count)

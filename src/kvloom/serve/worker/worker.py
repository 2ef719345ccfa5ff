"""The engine's side of the conversation: messages in, what a step brought out. Knows no sockets and no HTTP.

A tenant with a quota has a gate of its own: its requests enter the engine while the pages they may come to need fit the quota
together. So a tenant at its limit waits for itself, and never stands at the head of a queue that others wait in.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from kvloom.core import CacheControl, RetainRange
from kvloom.engine import Engine, Grammar, GrammarBusyError, GrammarState, Request, TokenLogprobs
from kvloom.serve.dashboard.picture import Picture

from .messages import (
    Add,
    Cancel,
    Delta,
    EndSession,
    ExpectSession,
    Look,
    Outputs,
    Refused,
    Stats,
    Story,
    TenantRules,
    TierUse,
    TokenTold,
)
from .stats import engine_stats, lower_tiers

__all__ = ["Worker"]

STATS_SECONDS = 0.25


@dataclass(slots=True)
class _Open:
    """A prompt that runs, how many tokens of each of its answers were told, and when the first was there."""

    message: Add
    request: Request
    claim: int
    told: list[int] = field(default_factory=list)
    first: float = 0.0


@dataclass(slots=True)
class _Gate:
    """A tenant's quota, what its running requests may come to need of it, and who waits for the rest."""

    quota: int
    claimed: int = 0
    waiting: deque[tuple[Add, int]] = field(default_factory=deque)


class Worker:
    """One engine and the requests of its users. One thread calls it. Without `observe` nothing is told but answers."""

    def __init__(self, engine: Engine, tenants: tuple[TenantRules, ...] = (), observe: bool = True) -> None:
        self.engine, self._observe = engine, observe
        self._gates = {t.name: _Gate(t.quota) for t in tenants if t.quota is not None}
        self._open: dict[int, _Open] = {}
        self._unheard: dict[int, _Open] = {}  # by request: those whose first token has not come
        self._compiling: dict[int, tuple[Add, Grammar]] = {}
        self._compiled: dict[int, GrammarState] = {}  # until the request is added: it keeps its grammar alive
        self._steps = 0
        self._refused: list[Refused] = []
        self._preemptions = self._told_tokens = 0
        self._picture: Picture | None = None  # made when somebody looks
        self._looked = False
        self._stats_at = 0.0
        self._tiers: list[TierUse] = []
        self._news = True  # whether something changed since the last stats

    @property
    def busy(self) -> bool:
        """Whether a step would do or tell something."""
        return self.engine.busy or bool(self._refused) or self._news or self._looked

    def look_below(self) -> None:
        """Nothing else is to do: let tiers go on, and see whether they have something new to tell. Stores end after the last
        token. Requests whose grammar is compiled by now enter."""
        self._enter_compiled()
        lower = self.engine.offload
        if lower is not None:
            lower.poll()
            tiers = lower_tiers(lower) if self._observe else []
            self._news, self._tiers = tiers != self._tiers, tiers

    def take(self, message: Add | Cancel | ExpectSession | EndSession | Look) -> None:
        """Do as a message says. What is refused is told by the next step."""
        if isinstance(message, Look):
            self._looked = True
            return
        self._news = True
        if isinstance(message, Cancel):
            self._cancel(message.id)
        elif isinstance(message, EndSession):
            self.engine.end_session(_session(message.tenant, message.session))
        elif isinstance(message, ExpectSession):
            self.engine.expect_session(_session(message.tenant, message.session))
        else:
            self._begin(message)

    def step(self) -> Outputs | None:
        """Let the engine make a step; what it brought, None where that is nothing."""
        stories: list[Story] = []
        self._enter_compiled()
        if self.engine.busy:
            landed = self.engine.step()
            self._steps += 1
            if self._unheard:
                stories = self._hear(landed)
        deltas: list[Delta] = []
        ended: list[_Open] = []
        for one in self._open.values():
            if self._tell(one, deltas):
                ended.append(one)
        for one in ended:
            self._leave(one)
            if self._observe:
                stories.append(_story(one))
        refused, self._refused = self._refused, []
        stats, picture = self._stats(), self._looked_at()
        told = deltas or refused or stories or stats is not None or picture is not None
        return Outputs(deltas, refused, stats, picture, stories) if told else None

    def _hear(self, landed: list[Request]) -> list[Story]:
        """What can be told of prompts that have just begun, or have their first token now."""
        heard = self._unheard
        stories = [_story(heard[r.order]) for r in self.engine.scheduler.started_requests if r.order in heard]
        for request in landed:
            one = heard.pop(request.order, None)
            if one is not None:
                one.first = time.monotonic()
                stories.append(_story(one))
        return stories

    def _looked_at(self) -> bytes | None:
        """The picture, where somebody asked for it."""
        if not self._looked:
            return None
        self._looked = False
        self._picture = self._picture or Picture(self.engine)
        return self._picture.json()

    @property
    def compiling(self) -> bool:
        """Whether requests wait for their grammars."""
        return bool(self._compiling)

    def _begin(self, message: Add) -> None:
        """Let a request enter, once its grammar is compiled: other processes do that, and no step waits for them."""
        try:
            grammar = self.engine.begin_grammar(message.params, message.tenant)
        except ValueError as error:
            self._refuse(message.id, error)
            return
        if grammar is None:
            self._enter(message)
        elif grammar.ready:
            self._enter_with(message, grammar)
        else:
            self._compiling[message.id] = message, grammar

    def _enter_compiled(self) -> None:
        if not self._compiling:
            return
        self.engine.poll_grammars()
        for id_, (message, grammar) in list(self._compiling.items()):
            if grammar.ready:
                del self._compiling[id_]
                self._news = True
                self._enter_with(message, grammar)

    def _enter_with(self, message: Add, grammar: Grammar) -> None:
        try:
            self._compiled[message.id] = grammar.start()
        except ValueError as error:
            self._refuse(message.id, error)
            return
        self._enter(message)

    def _refuse(self, id_: int, error: ValueError) -> None:
        self._refused.append(Refused(id_, str(error), isinstance(error, GrammarBusyError)))

    def _enter(self, message: Add) -> None:
        gate = self._gates.get(message.tenant)
        if gate is None:
            self._add(message, 0)
            return
        claim = self._claim(message)
        if claim > gate.quota:
            self._compiled.pop(message.id, None)
            self._refused.append(
                Refused(
                    message.id,
                    f"{len(message.prompt)} prompt tokens and up to {message.params.max_tokens} new ones need {claim:,} "
                    f"bytes of cache, but the quota is {gate.quota:,}: ask for fewer",
                )
            )
            return
        gate.waiting.append((message, claim))
        self._admit(gate)

    def _admit(self, gate: _Gate) -> None:
        while gate.waiting and gate.claimed + gate.waiting[0][1] <= gate.quota:
            message, claim = gate.waiting.popleft()
            if self._add(message, claim):
                gate.claimed += claim

    def _add(self, message: Add, claim: int) -> bool:
        structure = self._compiled.pop(message.id, None)
        retain = () if message.ttl is None else (RetainRange(ttl=message.ttl),)
        session = None if message.session is None else _session(message.tenant, message.session)
        control = CacheControl(
            tenant=message.tenant,
            adapter=message.salt,  # as an adapter does, it has names of its own, and they count for its tenant
            store=message.store,
            read=message.read,
            session=session,
            retain=retain,
            lossy=message.lossy,
        )
        try:
            request = self.engine.add(
                message.prompt,
                message.params,
                control,
                message.priority,
                text=self.engine.tokenizer is not None,
                grammar=None if structure is None else structure.grammar,
            )
        except ValueError as error:
            self._refuse(message.id, error)
            return False
        one = self._open[message.id] = _Open(message, request, claim, [0] * len(request.family))
        if self._observe:
            self._unheard[request.order] = one
        return True

    def _cancel(self, id_: int) -> None:
        one = self._open.get(id_)
        if one is not None:
            self.engine.cancel(one.request)
            self._leave(one)
            return
        self._compiling.pop(id_, None)
        self._compiled.pop(id_, None)
        for gate in self._gates.values():
            gate.waiting = deque(item for item in gate.waiting if item[0].id != id_)

    def _leave(self, one: _Open) -> None:
        del self._open[one.message.id]
        self._unheard.pop(one.request.order, None)
        self._preemptions += sum(answer.preemptions for answer in one.request.family)
        self._told_tokens += _output(one.request)
        self._news = True
        if one.message.ends_session and one.message.session is not None:
            self.engine.end_session(_session(one.message.tenant, one.message.session))
        gate = self._gates.get(one.message.tenant)
        if gate is not None:
            gate.claimed -= one.claim
            self._admit(gate)

    def _claim(self, message: Add) -> int:
        """Bytes that a prompt and its answers may come to hold: the answers share the prompt's full blocks."""
        layout = self.engine.layout
        more, samples = message.params.max_tokens, message.params.samples
        first = layout.slab_bytes_for(len(message.prompt) + more)
        return first + (samples - 1) * layout.slab_bytes_for(more + layout.block_tokens)

    def _tell(self, one: _Open, deltas: list[Delta]) -> bool:
        """Add what is new of a prompt's answers; whether all of them have ended."""
        answers = one.request.family
        if one.message.stream:
            for index, answer in enumerate(answers):
                told, count = one.told[index], answer.output_count
                if told >= 0 and (count > told or answer.finish_reason is not None):
                    deltas.append(self._delta(one, index, answer, told))
                    one.told[index] = -1 if answer.finish_reason is not None else count
            return all(told < 0 for told in one.told)
        if any(answer.finish_reason is None for answer in answers):
            return False
        deltas += [self._delta(one, i, answer, 0) for i, answer in enumerate(one.request.returned_samples)]
        return True

    def _delta(self, one: _Open, index: int, answer: Request, told: int) -> Delta:
        logprobs, prompt = None, None
        if answer.params.logprobs is not None:
            logprobs = _triples(answer.logprobs[told:])
        if answer.params.prompt_logprobs is not None and not index:
            prompt = _triples(one.request.prompt_logprobs[1:])  # the first token follows nothing
        return Delta(
            one.message.id,
            index,
            "" if answer.text is None else answer.text.take(),
            answer.tokens[len(answer.prompt) + told :],
            one.request.cached_tokens or 0,
            answer.finish_reason,
            answer.stop_reason,
            logprobs,
            prompt,
        )

    def _stats(self) -> Stats | None:
        if not self._observe:
            self._settle()
            return None
        now = time.monotonic()
        idle = not self.engine.busy
        if not (self._news and idle) and now < self._stats_at:
            return None
        self._stats_at = now + STATS_SECONDS
        self._settle()
        gated = {name: len(gate.waiting) for name, gate in self._gates.items()}
        inside = [(one.message.tenant, one.request.started > 0) for one in self._open.values()]
        made = self._told_tokens + sum(_output(one.request) for one in self._open.values())
        return engine_stats(self.engine, self._steps, made, self._preemptions, gated, inside)

    def _settle(self) -> None:
        """Nothing is new any more where the engine is idle."""
        self._news = self._news and self.engine.busy


def _story(one: _Open) -> Story:
    request, stop = one.request, one.request.pool_miss
    return Story(
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
        request.other_tenant_has_more,
        sum(answer.preemptions for answer in request.family),
        request.loads,
    )


def _output(request: Request) -> int:
    """Tokens of all answers to a prompt so far."""
    return sum(answer.output_count for answer in request.family)


def _session(tenant: str, session: str) -> str:
    """A session's name in the cache: no tenant can write one that is another's."""
    return f"{len(tenant)}:{tenant}:{session}"


def _triples(places: list[TokenLogprobs] | list[TokenLogprobs | None]) -> list[list[TokenTold]]:
    return [[(token, p.logprob, p.rank) for token, p in (place or {}).items()] for place in places]

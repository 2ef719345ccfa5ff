"""The scheduler side: decides which pages a request loads, and which pages it stores. Opens no tier and copies no
bytes."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .block_groups import BlockGroup, common_block_tokens
from .messages import Answer, Load, Lookup, Step, Store
from .request_hashes import RequestHashes, Roots
from .settings import Settings
from .tier_events import TierEvents

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["SchedulerSide"]

log = logging.getLogger("kvloom.vllm")


@dataclass(slots=True)
class _Lookup:
    """A lookup that the workers have to answer. `positions` lists the positions at which all workers can resume. It
    is None until every worker has answered.
    """

    number: int
    start: int
    answers: list[Answer] = field(default_factory=list)
    positions: list[int] | None = None
    offered: int = 0
    """The resume position that was last returned to vLLM."""


@dataclass(slots=True)
class _State:
    """The state of one request. `stored` is the number of tokens whose full blocks were passed to the workers for
    storing. It is None before the first step of the request. `may_load` is False if the request must not load pages.
    """

    request: Request
    hashes: RequestHashes
    lookup: _Lookup | None = None
    stored: int | None = None
    may_load: bool = True


class SchedulerSide:
    """Decides which pages the workers load and store. If `loads` is False, nothing is loaded, and if `stores` is False,
    nothing is stored. `workers` is the number of workers that answer each lookup.
    """

    def __init__(
        self,
        settings: Settings,
        groups: Sequence[BlockGroup],
        model: str,
        workers: int,
        stores: bool = True,
        loads: bool = True,
        events: TierEvents | None = None,
    ) -> None:
        self._settings, self._groups, self._workers = settings, groups, workers
        self._events = events
        self._model, self._roots = model, Roots(model)
        self._stores, self._loads = stores, loads and settings.load != "never"
        self._step_tokens = common_block_tokens(groups)
        self._requests: dict[str, _State] = {}
        self._next = Step()
        self._numbers = 0

    def add(self, request: Request) -> None:
        """Start to follow a request. A request with prompt embeddings is ignored, because it has no tokens to hash. A
        request whose adapter cannot be identified is also ignored.
        """
        if request.prompt_embeds is not None:
            return
        try:
            hashes = RequestHashes(self._roots.of(request), request)
        except ValueError as error:
            log.warning("request %s is served without tiers: %s", request.request_id, error)
            return
        self._requests[request.request_id] = _State(request, hashes, may_load=self._loads)

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `computed` tokens can be loaded, and whether they are loaded
        asynchronously. The number is None while the workers look up and load the pages.
        """
        state = self._requests.get(request.request_id)
        if state is None or not state.may_load or request.skip_reading_prefix_cache:
            return 0, False
        if computed % self._step_tokens:
            return 0, False
        end = (request.num_tokens - 1) // self._step_tokens * self._step_tokens
        if end - computed < max(1, self._settings.min_load_tokens):
            return 0, False
        if state.lookup is None or computed < state.lookup.start:
            state.lookup = self._ask(state, computed, end)
        if state.lookup.positions is None:
            return None, False
        best = max((p for p in state.lookup.positions if p <= end), default=0)
        if best - computed < max(1, self._settings.min_load_tokens):
            return 0, False
        state.lookup.offered = best
        return best - computed, True

    def _ask(self, state: _State, start: int, end: int) -> _Lookup:
        self._numbers += 1
        sizes = {group.block_tokens for group in self._groups}
        hashes = {size: state.hashes.of_blocks(start // size, end // size, size) for size in sizes}
        self._next.lookups.append(Lookup(state.request.request_id, self._numbers, start, end, hashes))
        return _Lookup(self._numbers, start)

    def allocated(self, request: Request, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Make the workers copy pages into blocks that vLLM has allocated. The pages contain the last `external` tokens
        before the resume position that `match` found. If `external` is 0, nothing is copied, and the workers release
        the pages that they leased for the lookup.

        vLLM calls this method again, with `external` 0, when a load has ended. The second call has no effect.
        """
        state = self._requests.get(request.request_id)
        if state is None or state.lookup is None:
            return
        lookup, state.lookup = state.lookup, None
        if not external:
            self._next.ended.append(request.request_id)
            return
        end = lookup.offered
        start = end - external
        if start % self._step_tokens:
            raise ValueError(
                f"vLLM loads {external} tokens up to {end}, which do not begin at a block: "
                f"blocks have {self._step_tokens} tokens"
            )
        ids = [
            list(table[start // group.block_tokens : end // group.block_tokens])
            for group, table in zip(self._groups, block_ids, strict=True)
        ]
        self._next.loads.append(Load(request.request_id, lookup.number, start, end, ids))

    def build_step(self, output: SchedulerOutput) -> Step:
        """Return the message for the workers: pending lookups and loads, and stores of the blocks that this step
        completes."""
        step, self._next = self._next, Step()
        step.tokens = output.total_num_scheduled_tokens
        if self._stores:
            for request_id, tokens in output.num_scheduled_tokens.items():
                state = self._requests.get(request_id)
                if state is not None:
                    self._store(state, tokens, output, step)
            if any(group.is_state for group in self._groups):
                self._store_states(output, step)
        return step

    def _store(self, state: _State, tokens: int, output: SchedulerOutput, step: Step) -> None:
        """Make the workers store the blocks of a request that are complete after this step. A block is not complete if
        it contains draft tokens, which may be rejected, or tokens that are not sampled yet. State groups are left to
        `_store_states`.
        """
        request = state.request
        if state.stored is None:
            state.stored = request.num_computed_tokens
        first, stop = state.stored, min(request.num_computed_tokens + tokens, request.num_tokens)
        if all(stop // g.block_tokens <= first // g.block_tokens for g in self._groups):
            return
        assert output.kv_connector_block_state is not None
        tables = output.kv_connector_block_state.get_block_ids(request.request_id)
        if tables is None:
            return
        for group, table in zip(self._groups, tables, strict=True):
            if group.is_state:
                continue
            at = range(first // group.block_tokens, stop // group.block_tokens)
            if not at:
                continue
            hashes = state.hashes.of_blocks(at.start, at.stop, group.block_tokens)
            pairs = [
                (name, table[i]) for name, i in zip(hashes, at, strict=True) if i < len(table) and table[i]
            ]
            if self._events is not None:
                for name, i in zip(hashes, at, strict=True):
                    self._events.remember(group.index, name, request, i)
            if pairs:
                step.stores.append(Store(group.index, [p[0] for p in pairs], [p[1] for p in pairs]))
        state.stored = stop

    def _store_states(self, output: SchedulerOutput, step: Step) -> None:
        """Make the workers store the recurrent states that this step writes at the ends of blocks. vLLM lists the
        blocks with these states in `output`. They must be stored in this step, because later steps overwrite these
        blocks.
        """
        if output.kv_connector_block_state is None:
            return
        for request_id, offers in output.kv_connector_block_state.boundary_state_offloads.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            for number, block, end in offers:
                group = self._groups[number]
                index = end // group.block_tokens - 1
                if not block or end % group.block_tokens or end > state.request.num_tokens:
                    continue  # inside a block, or after a token that is not known yet
                (name,) = state.hashes.of_blocks(index, index + 1, group.block_tokens)
                if self._events is not None:
                    self._events.remember(number, name, state.request, index)
                step.stores.append(Store(number, [name], [block]))

    def receive(self, answers: Sequence[Answer], failed: set[str]) -> None:
        """Record the answers of the workers. `failed` are requests whose load failed. They load nothing more from
        tiers."""
        for answer in answers:
            state = self._requests.get(answer.request_id)
            lookup = None if state is None else state.lookup
            if lookup is None or lookup.number != answer.number:
                continue
            lookup.answers.append(answer)
            if len(lookup.answers) == self._workers:
                common = set.intersection(*(set(one.positions) for one in lookup.answers))
                lookup.positions = sorted(common)
        for request_id in failed:
            state = self._requests.get(request_id)
            if state is not None:
                state.may_load = False

    def finish(self, request: Request) -> None:
        """Stop following a request that has finished. The workers release its leased pages."""
        state = self._requests.pop(request.request_id, None)
        if state is not None and state.lookup is not None:
            self._next.ended.append(request.request_id)

    def reset(self) -> None:
        """Change the hashes of all requests, because the weights may have changed. Pages that were stored before are
        not found again. A request that already has computed tokens loads and stores nothing more, because its KV may
        come from both the old and the new weights.
        """
        self._roots = Roots(f"{self._model} reset {secrets.token_hex(16)}")
        for state in list(self._requests.values()):
            self.finish(state.request)
            if not state.request.num_computed_tokens:
                self.add(state.request)

"""The connector below vLLM's own scheduler, block pool and worker calls, with a model that is a formula.

test_vllm.py runs this file in the environment of vLLM. The scenarios are those that vLLM tests for its own connectors:
the life of a load, failed loads, aborts, full pools, preemption, resets and several connectors. The KV of a token is a
number that depends on all tokens before it. In every step the model checks the KV that attention would read, and its
next token depends on this number. A request that reads a wrong, late or foreign block therefore fails a test.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvloom.tiers import Tier, open_tier, registry
from kvloom.tiers.testing import Faults, FaultyTier

BLOCK, WINDOW = 16, 40
SHAPE = (1, BLOCK, 2)
MODEL = Path(__file__).parent.parent.parent / "src/kvloom/models/embedded/llama"
ANSWER = 6
SMALL = "host:8KiB"
"""Host memory of 64 pages, for ten prompts of 100 tokens and one group."""
FAULTS: dict[str, Faults] = {}


def parse_faulty(url: str) -> Any:
    """A tier `faulty:NAME:URL`: the tier of the URL with the faults FAULTS[NAME]."""
    _, name, inner = url.split(":", 2)

    def opened() -> Tier:
        return FaultyTier(open_tier(inner), FAULTS.setdefault(name, Faults()))

    return opened


registry.SCHEMES["faulty"] = f"{__name__}:parse_faulty"
init_none_hash(sha256)


def follow(value: int, token: int) -> int:
    return (value * 31 + token + 7) % 9973


def values_of(tokens: list[int], weights: int = 0) -> list[int]:
    """The KV of each token."""
    found, value = [], weights
    for token in tokens:
        value = follow(value, token)
        found.append(value)
    return found


def answer_of(prompt: list[int], count: int = ANSWER, weights: int = 0) -> list[int]:
    """The answer of the model without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(values_of(tokens, weights)[-1] % 500)
    return tokens[len(prompt) :]


def kvloom(*tiers: str, **others: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvloomConnector",
        "kv_connector_module_path": "kvloom.adapters.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": list(tiers), "load": "always", **others},
    }


@dataclass
class Server:
    """vLLM's scheduler and one worker. With `ahead`, vLLM plans a step before it has the result of the last one."""

    transfer: dict[str, Any]
    windows: tuple[int, ...] = (0,)
    blocks: int = 60
    ahead: bool = False
    budget: int = 64
    weights: int = 0
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = EngineArgs(
            model=str(MODEL),
            dtype="float32",
            block_size=BLOCK,
            max_model_len=512,
            max_num_batched_tokens=self.budget,
            max_num_seqs=8,
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            async_scheduling=self.ahead,
            disable_hybrid_kv_cache_manager=False,
            kv_transfer_config=KVTransferConfig(**self.transfer),
        ).create_engine_config()
        cache = self._cache_config()
        self.config.cache_config.num_gpu_blocks = self.blocks
        scheduler: Any = self.config.scheduler_config.get_scheduler_cls()
        self.scheduler = scheduler(
            vllm_config=self.config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.worker: Any = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, cache)
        self.caches = {
            name: torch.zeros((self.blocks, *SHAPE))
            for group in cache.kv_cache_groups
            for name in group.layer_names
        }
        self.worker.register_kv_caches(self.caches)
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.loads = 0

    def _cache_config(self) -> KVCacheConfig:
        sizes: dict[str, Any] = {
            "block_size": BLOCK,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": torch.float32,
        }
        groups = []
        for number, window in enumerate(self.windows):
            spec = SlidingWindowSpec(**sizes, sliding_window=window) if window else FullAttentionSpec(**sizes)
            groups.append(KVCacheGroupSpec([f"layer {number}"], spec))
        return KVCacheConfig(self.blocks, [], groups)

    @property
    def side(self) -> Any:
        """The worker side of the first kvloom connector."""
        children = getattr(self.worker, "sub_connectors", [self.worker])
        return children[0].worker

    def add(self, name: str, prompt: list[int], salt: str | None = None, answer: int = ANSWER) -> Request:
        params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        params.update_from_generation_config({}, None)
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(name, list(prompt), params, None, cache_salt=salt, block_hasher=hasher)
        self.tokens[name] = list(prompt)
        self.answers[name] = []
        self.scheduler.add_request(request)
        return request

    def status(self, name: str) -> RequestStatus:
        return self.scheduler.requests[name].status

    def step(self) -> SchedulerOutput:
        """Plan a step, run it in the worker, and return its plan."""
        plan: SchedulerOutput = self.scheduler.schedule()
        self._in_flight.append((plan, self._execute(plan)))
        while len(self._in_flight) > self.ahead:
            self._receive()
        return plan

    def _receive(self) -> None:
        plan, output = self._in_flight.popleft()
        for outputs in self.scheduler.update_from_output(plan, output).values():
            for one in outputs.outputs:
                self.answers[one.request_id] += one.new_token_ids
                assert str(one.finish_reason) != "error"

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        assert plan.kv_connector_metadata is not None
        self.worker.handle_preemptions(plan.kv_connector_metadata)
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(plan) as found,
        ):
            names, sampled = self._compute(plan)
        assert found is not None
        assert not self.worker.has_connector_metadata()
        assert not found.invalid_block_ids, "failures are reported per request"
        self.loads += len(found.finished_recving or ())
        index = {name: i for i, name in enumerate(names)}
        return ModelRunnerOutput(names, index, sampled, kv_connector_output=found)

    def _compute(self, plan: SchedulerOutput) -> tuple[list[str], list[list[int]]]:
        starts = {}
        for new in plan.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            starts[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for name, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                assert ids is not None
                self.tables[name] = [list(some) for some in ids]
            elif ids is not None:
                for table, some in zip(self.tables[name], ids, strict=True):
                    table.extend(some)
            starts[name] = computed
        names, sampled = list(plan.num_scheduled_tokens), []
        for name in names:
            tokens, start = self.tokens[name], starts[name]
            stop = start + plan.num_scheduled_tokens[name]
            values = values_of(tokens[:stop], self.weights)
            for number, window in enumerate(self.windows):
                layer, table = self.caches[f"layer {number}"], self.tables[name][number]
                first = max(0, start - window + 1) if window else 0
                read = [float(layer[table[p // BLOCK], 0, p % BLOCK, 0]) for p in range(first, start)]
                assert read == values[first:start], f"{name} reads other KV than that of its tokens"
                for position in range(start, stop):
                    assert table[position // BLOCK], "the null block is never written"
                    layer[table[position // BLOCK], 0, position % BLOCK] = float(values[position])
            if stop < len(tokens):
                sampled.append([])
            else:
                tokens.append(values[-1] % 500)
                sampled.append([tokens[-1]])
        return names, sampled

    def run(self, *names: str, seconds: float = 60) -> dict[str, list[int]]:
        """Run steps until the requests have ended, or all requests if no name is given. Return the answers."""
        until = time.monotonic() + seconds
        while any(name in self.scheduler.requests for name in names or list(self.answers)):
            assert time.monotonic() < until, {n: r.status for n, r in self.scheduler.requests.items()}
            self.step()
        return self.answers

    def until(self, name: str, status: RequestStatus, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while self.status(name) is not status:
            assert time.monotonic() < end, self.status(name)
            self.step()

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        while self._in_flight:
            self._receive()
        assert self.scheduler.reset_prefix_cache()

    def settle(self) -> None:
        """Check that nothing is left of ended requests: no block, no lease of host memory, no state."""
        for _ in range(3):
            self.step()
        while self._in_flight:
            self._receive()
        assert not self.scheduler.requests
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        assert not self.side._pending
        assert not self.side._leased
        until = time.monotonic() + 30
        while self.side._tiers.host.index.slots.refs.any():  # tiers may still write pages
            assert time.monotonic() < until
            time.sleep(0.01)

    def close(self) -> None:
        self.worker.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None


@pytest.fixture
def servers() -> Iterator[Any]:
    opened: list[Server] = []

    def make(transfer: dict[str, Any] | None = None, **others: Any) -> Server:
        opened.append(Server(transfer or kvloom("host:1MiB"), **others))
        return opened[-1]

    yield make
    for name in list(FAULTS):
        FAULTS.pop(name).release()
    for server in opened:
        server.close()


def prompt(tokens: int = 100, seed: int = 1) -> list[int]:
    return [(seed * 7 + i * i + i * seed) % 500 for i in range(tokens)]


BOTH = pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
GROUPS = pytest.mark.parametrize("windows", [(0,), (0, WINDOW)], ids=["full", "full and sliding"])


# --- the life of a load


@GROUPS
@BOTH
def test_a_load_from_lookup_to_answer(windows: tuple[int, ...], ahead: bool, servers: Any) -> None:
    one = servers(windows=windows, ahead=ahead)
    one.add("first", prompt())
    assert one.run()["first"] == answer_of(prompt())
    one.forget()
    request = one.add("again", prompt())
    assert not one.step().num_scheduled_tokens  # tiers are asked, and no block is allocated
    assert one.status("again") is RequestStatus.WAITING
    one.until("again", RequestStatus.WAITING_FOR_REMOTE_KVS)
    assert request.num_computed_tokens == 96
    table = one.scheduler.kv_cache_manager.get_block_ids("again")[0]
    pool = one.scheduler.kv_cache_manager.block_pool
    assert all(pool.blocks[i].block_hash is None for i in table), "blocks are cached when they are loaded"
    while one.status("again") is RequestStatus.WAITING_FOR_REMOTE_KVS:
        plan = one.step()
    assert plan.num_scheduled_tokens == {"again": 4}
    assert one.run()["again"] == answer_of(prompt())
    assert (one.loads, one.side.stats.loaded_tokens) == (1, 96)
    one.settle()


def test_a_prompt_of_whole_blocks_computes_its_last_block(servers: Any) -> None:
    one = servers()
    for name in ("first", "again"):
        one.add(name, prompt(96))
        assert one.run()[name] == answer_of(prompt(96))
        one.forget()
    assert one.side.stats.loaded_tokens == 80
    one.settle()


@BOTH
def test_other_requests_run_while_one_loads(ahead: bool, servers: Any) -> None:
    faults = FAULTS.setdefault("slow", Faults())
    one = servers(kvloom(SMALL, "faulty:slow:host:8MiB", load_seconds=60.0), ahead=ahead)
    one.add("first", prompt())
    one.run()
    for seed in range(2, 14):  # host memory evicts the pages of the first prompt
        one.add(str(seed), prompt(seed=seed), answer=1)
        one.run()
    one.forget()
    faults.hung = True
    one.add("again", prompt())
    one.step()
    one.add("new", prompt(seed=50), answer=12)
    assert one.run("new")["new"] == answer_of(prompt(seed=50), 12)
    assert one.status("again") is RequestStatus.WAITING
    faults.hung = False
    faults.release()
    assert one.run()["again"] == answer_of(prompt())
    one.settle()


@BOTH
def test_requests_with_the_same_prompt_never_read_a_block_that_is_not_loaded(
    ahead: bool, servers: Any
) -> None:
    one = servers(ahead=ahead)
    one.add("first", prompt())
    one.run()
    one.forget()
    for number in range(4):
        one.add(str(number), [*prompt(90 + number), number])
    found = one.run()
    for number in range(4):
        assert found[str(number)] == answer_of([*prompt(90 + number), number])
    one.settle()


def test_a_load_waits_for_blocks_of_running_requests(servers: Any) -> None:
    one = servers(blocks=16)
    one.add("first", prompt())
    one.run()
    one.forget()
    one.add("long", prompt(120, seed=2), answer=40)
    one.step()
    one.add("again", prompt(), answer=40)  # its blocks are not free
    found = one.run()
    assert found["again"] == answer_of(prompt(), 40)
    assert found["long"] == answer_of(prompt(120, seed=2), 40)
    one.settle()


@GROUPS
@BOTH
def test_a_preempted_request_resumes_from_tiers(windows: tuple[int, ...], ahead: bool, servers: Any) -> None:
    one = servers(windows=windows, blocks=20 if len(windows) == 1 else 32, ahead=ahead)
    requests = [one.add(str(seed), prompt(80, seed=seed), answer=60) for seed in range(3)]
    found = one.run()
    for seed in range(3):
        assert found[str(seed)] == answer_of(prompt(80, seed=seed), 60)
    assert sum(request.num_preemptions for request in requests) > 0
    one.settle()


# --- aborts


@BOTH
@pytest.mark.parametrize("moment", ["lookup", "load", "loaded", "running"])
def test_an_abort_frees_all_blocks_and_pages(moment: str, ahead: bool, servers: Any) -> None:
    one = servers(ahead=ahead)
    one.add("first", prompt())
    one.run()
    one.forget()
    one.add("again", prompt(), answer=50)
    one.step()
    if moment != "lookup":
        one.until("again", RequestStatus.WAITING_FOR_REMOTE_KVS)
    if moment == "loaded":
        while "again" not in one.scheduler.finished_recving_kv_req_ids:
            one.step()
    if moment == "running":
        one.until("again", RequestStatus.RUNNING)
    one.scheduler.finish_requests("again", RequestStatus.FINISHED_ABORTED)
    one.settle()
    one.add("later", prompt())
    assert one.run("later")["later"] == answer_of(prompt())
    one.settle()


# --- failed loads


@GROUPS
@BOTH
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_load_is_recomputed(
    policy: str, windows: tuple[int, ...], ahead: bool, servers: Any
) -> None:
    """The pages are lost after vLLM has allocated blocks for them. Also with vLLM's policy `fail`, no request fails."""
    one = servers({**kvloom("host:1MiB"), "kv_load_failure_policy": policy}, windows=windows, ahead=ahead)
    for seed in (1, 2, 3):
        one.add(f"first {seed}", prompt(seed=seed))
    one.run()
    one.forget()
    for seed in (1, 2, 3):
        one.add(f"again {seed}", prompt(seed=seed))
    load = one.side._load

    def lose(message: Any) -> None:
        if message.request_id == "again 2":
            one.side.end("again 2")
        load(message)

    one.side._load = lose
    found = one.run()
    for seed in (1, 2, 3):
        assert found[f"again {seed}"] == answer_of(prompt(seed=seed))
    assert one.side.stats.failed_loads == 1
    assert one.side.stats.loaded_tokens == 2 * 96
    assert not one.scheduler.failed_recving_kv_req_ids
    one.settle()


def test_a_failed_load_leaves_no_wrong_block_in_vllms_prefix_cache(servers: Any) -> None:
    one = servers()
    one.add("first", prompt())
    one.run()
    one.forget()
    one.add("again", prompt())
    one.until("again", RequestStatus.WAITING_FOR_REMOTE_KVS)
    layer = one.caches["layer 0"]
    load = one.side._load

    def damage(message: Any) -> None:
        """A load that writes half of the blocks, and then fails."""
        layer[message.block_ids[0][:3]] = -1.0
        one.side.end(message.request_id)
        load(message)

    one.side._load = damage
    assert one.run()["again"] == answer_of(prompt())
    one.side._load = load
    one.add("third", prompt())  # from vLLM's own prefix cache
    assert one.run("third")["third"] == answer_of(prompt())
    one.settle()


@GROUPS
@pytest.mark.parametrize("fault", ["failing", "slow", "hung"])
def test_a_broken_tier_never_fails_a_request(fault: str, windows: tuple[int, ...], servers: Any) -> None:
    faults = FAULTS.setdefault(fault, Faults())
    tiers = [SMALL, f"faulty:{fault}:host:8MiB"]
    one = servers(kvloom(*tiers, load_seconds=0.3), windows=windows)
    for seed in range(12):
        one.add(f"first {seed}", prompt(seed=seed), answer=1)
        one.run()
    one.forget()
    setattr(faults, fault, 2.0 if fault == "slow" else True)
    for seed in range(12):
        one.add(f"again {seed}", prompt(seed=seed))
    found = one.run()
    for seed in range(12):
        assert found[f"again {seed}"] == answer_of(prompt(seed=seed))
    faults.release()
    one.settle()


# --- resets


@BOTH
@pytest.mark.parametrize("waits", [False, True], ids=["running", "in a lookup"])
def test_no_request_reads_pages_of_earlier_weights_after_a_reset(
    waits: bool, ahead: bool, servers: Any
) -> None:
    """vLLM's weights change in place. The requests that it then has must not load what the old weights computed."""
    one = servers(ahead=ahead)
    one.add("first", prompt())
    one.run()
    one.forget()
    request = one.add("again", prompt(), answer=20)
    one.step()
    if not waits:
        one.until("again", RequestStatus.RUNNING)
        one.step()
    while one._in_flight:
        one._receive()
    one.weights = 5
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    given = list(request.output_token_ids)
    expected = answer_of([*prompt(), *given], 20 - len(given), weights=5)
    one.tokens["again"] = [*prompt(), *given]
    assert one.run()["again"] == given + expected
    one.add("later", prompt())
    assert one.run("later")["later"] == answer_of(prompt(), weights=5)
    one.settle()


# --- several connectors


@BOTH
def test_two_connectors_in_vllms_multi_connector(ahead: bool, servers: Any, tmp_path: Path) -> None:
    """The first connector loads what it has. The second loads the rest of the requests."""
    children = [kvloom(SMALL), kvloom(SMALL, f"disk:{tmp_path}/kv:16MiB")]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    one = servers(transfer, ahead=ahead, windows=(0, WINDOW))
    for seed in range(12):
        one.add(f"first {seed}", prompt(seed=seed), answer=1)
        one.run()
    one.forget()
    for seed in (11, 0):
        one.add(f"again {seed}", prompt(seed=seed))
        assert one.run()[f"again {seed}"] == answer_of(prompt(seed=seed))
    loaded = [child.worker.stats.loaded_tokens for child in one.worker.sub_connectors]
    assert loaded == [96, 96]
    one.settle()


# --- everything at once


@GROUPS
@BOTH
@pytest.mark.parametrize("seed", range(2))
def test_random_requests_aborts_and_faults(
    seed: int, windows: tuple[int, ...], ahead: bool, servers: Any, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    faults = FAULTS.setdefault("random", Faults())
    tiers = [SMALL, f"faulty:random:disk:{tmp_path}/kv:16MiB"]
    one = servers(kvloom(*tiers, load_seconds=0.5), windows=windows, blocks=30 * len(windows), ahead=ahead)
    starts = [prompt(64, seed=number) for number in range(3)]
    wanted: dict[str, list[int]] = {}
    for number in range(40):
        text = rng.choice(starts)[: rng.randint(20, 64)] + prompt(rng.randint(1, 60), seed=rng.randint(1, 4))
        name, count = str(number), rng.randint(1, 12)
        one.add(name, text, answer=count, salt=rng.choice([None, "s"]))
        wanted[name] = answer_of(text, count)
        for _ in range(rng.randint(0, 4)):
            one.step()
        if rng.random() < 0.15:
            some = rng.choice([*one.scheduler.requests, name])
            wanted.pop(some, None)
            one.scheduler.finish_requests(some, RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.2:
            faults.failing = not faults.failing
    found = one.run()
    assert len(wanted) > 20
    for name, answer in wanted.items():
        assert found[name] == answer
    assert one.side.stats.loaded_tokens > 0
    one.settle()

"""Every pair of features at once: model family, source of the hit, dtype, speculation, samples, preemption, chunks,
tenants, adapters, ranks, roles and reused documents. A covering array contains every pair that is not refused, and random
cases contain larger combinations.

All requests of a case must give the tokens of a plain engine, which for exact dtypes are those of `generate()`. With a
quantised dtype, tokens may differ if the log-probabilities are close to those of a plain engine.

    KVLOOM_MATRIX_SEED=8 KVLOOM_MATRIX_CASES=50 pytest tests/engine/test_matrix.py -k random     other random cases
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.combinations import REFUSED
from kvloom.core import PoolLayout, Tenant
from kvloom.engine import Engine, EngineConfig, Request, load_ranks
from kvloom.tiers import HostConfig, HostTier
from kvloom.tiers.host import SharedMemory
from kvloom.tiers.peer import PeerConfig, PeerServer
from kvloom.tiers.remote.redis_protocol import RespConnection
from tests.engines import evict_all, make_engine
from tests.tiers.servers import redis_server

from .covering import Case, pairs_of
from .feature_matrix import EXCLUDED, FACTORS, PROCESS_CASES, SEED, pair_cases, random_cases
from .matrix_models import COPIED, KV_DTYPES, PREFIX, SHARE, Wanted, add, model_of, outputs, prompts
from .test_hand_over import address_of, step_until
from .test_offload import PATIENT, offload_of
from .test_rank_tiers import stored
from .thread_ranks import context_engine, parallel_engine

LAYOUTS: dict[tuple[str, ...], PoolLayout] = {}
"""The layout of the pages of a family, dtype, speculation and number of ranks."""
CASES = pair_cases()
PREFILL_HOST = "host:16MiB?share=0&checked=1"
"""The host memory of a prefill worker, which a decode worker reads."""
UNHURRIED = replace(PATIENT, hand_over_seconds=60.0)
LOGPROB_ERROR = 0.05
"""Largest mean error of the log-probabilities of a sample, if its tokens are not those of a plain engine."""
STORES = {"store": "redis"}
"""The name of a tier in `Request.hits`, if it differs from the level."""


def name_of(case: Case) -> str:
    return "-".join(case.values())


def test_the_cases_contain_every_pair() -> None:
    covered = set().union(*map(pairs_of, CASES))
    for a, b in itertools.combinations(FACTORS, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            pair = frozenset(((a, x), (b, y)))
            assert (pair in covered) != (pair in EXCLUDED), pair


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    return Wanted(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis")) as (port, _):
        yield port


@contextmanager
def source_of(case: Case, folder: Path, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The tiers of the engine that computes the prompts. An empty store is started for a case that needs one."""
    hit = case["hit"]
    tiers = [PREFILL_HOST] if case["role"] == "split" else ["host:8MiB"] if hit == "host" else []
    with ExitStack() as opened:
        if hit == "disk":
            tiers.append(f"disk:{folder / 'kv'}:64MiB")
        elif hit == "peer":
            tiers.append(opened.enter_context(peer_memory()))
        elif hit == "store":
            port = request.getfixturevalue("redis_port")
            client = RespConnection(("127.0.0.1", port), 20, limit=1 << 20)
            client.call("FLUSHALL")
            client.close()
            tiers.append(f"redis://127.0.0.1:{port}?capacity=64MiB&timeout=20")
        yield tiers


@contextmanager
def peer_memory() -> Iterator[str]:
    """The memory of another process, as far as an engine can tell."""
    memory = SharedMemory(16 << 20)
    peer = PeerServer(HostTier(HostConfig(memory.size, 1 << 20), buffer=memory.buffer), PeerConfig(), memory)
    try:
        yield "peer://{}:{}?timeout=20".format(*peer.address)
    finally:
        peer.close()


def pool_bytes(case: Case, wanted: Wanted) -> int:
    """Return the size of the pool. A tight pool has pages for less than two requests, and a roomy one for all requests
    of a case."""
    key = tuple(case[name] for name in ("family", "dtype", "speculate", "ranks"))
    if key not in LAYOUTS:
        names = ("speculate", "family", "dtype", "ranks")
        plain = {name: levels[0] for name, levels in FACTORS.items()} | {name: case[name] for name in names}
        engine = engine_of(plain, wanted, [], 1 << 22)
        LAYOUTS[key] = engine.layout
        engine.close()
    layout = LAYOUTS[key]
    slabs = -(-layout.slab_bytes_for(PREFIX + 16) // layout.slab_bytes) + len(layout.groups)
    slabs += len(layout.of("state"))
    return layout.slab_bytes * (slabs * 5 // 4 + 2 if case["pool"] == "tight" else 20 * slabs)


def settings_of(case: Case, wanted: Wanted, tiers: list[str], pool: int) -> tuple[Any, dict[str, Any]]:
    """Return the model of a case, and the settings of its engine."""
    family = case["family"]
    model = model_of(family)
    settings: dict[str, Any] = {
        "pool_bytes": pool,
        "kv_dtype": KV_DTYPES[case["dtype"]],
        "speculate": case["speculate"],
        "token_budget": int(case["chunk"]),
        "tiers": tiers,
        "offload": UNHURRIED,
        "tenants": [Tenant("t")],
    }
    if case["speculate"] == "draft":
        settings["speculate"] = wanted.draft(family)
    elif case["speculate"] == "head":
        model, settings["speculate"] = wanted.head(family)
    if case["lora"] != "none":
        settings["lora"] = {"adapter": str(wanted.adapter(family))}
    if case["documents"] == "reused":
        settings["reuse_documents"] = SHARE
    return model, settings


def engine_of(case: Case, wanted: Wanted, tiers: list[str], pool: int) -> Engine:
    """Return an engine with a pool of `pool` bytes and the settings of a case. Its ranks are threads. Raises ValueError
    if the settings are refused."""
    model, settings = settings_of(case, wanted, tiers, pool)
    if case["ranks"] == "1":
        return make_engine(deepcopy(model), **settings)
    return (parallel_engine if case["ranks"] == "tensor" else context_engine)(model, 2, **settings)


def process_engine(case: Case, wanted: Wanted, tiers: list[str], pool: int) -> Engine:
    """Return an engine with the settings of a case. Its ranks are processes, which load the model from a folder."""
    _, settings = settings_of(case, wanted, tiers, pool)
    settings[f"{case['ranks']}_parallel"] = 2
    config = EngineConfig(**settings)
    model, _, group = load_ranks(
        wanted.checkpoint(case), config, torch.float32, torch.device("cpu"), threads=1
    )
    assert group is not None
    try:
        return Engine(model, config, group=group)
    except BaseException:
        group.close()
        raise


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_features_together(
    case: Case, wanted: Wanted, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run(case, wanted, tmp_path, request)


@pytest.mark.slow
@pytest.mark.parametrize("case", random_cases(), ids=lambda case: f"seed={SEED}-{name_of(case)}")
def test_random_features_together(
    case: Case, wanted: Wanted, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The name of a failed test contains the seed of its case."""
    run(case, wanted, tmp_path, request)


@pytest.mark.slow
@pytest.mark.parametrize("case", PROCESS_CASES, ids=name_of)
def test_features_together_with_rank_processes(
    case: Case, wanted: Wanted, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run(case, wanted, tmp_path, request, process_engine)


MakeEngine = Callable[[Case, Wanted, list[str], int], Engine]


def run(
    case: Case, wanted: Wanted, folder: Path, request: pytest.FixtureRequest, make: MakeEngine = engine_of
) -> None:
    """Let an earlier request fill the source of the hit, then send all prompts at once, and check their tokens."""
    asked = prompts(case["family"])
    of_request: dict[str, Any] = {"tenant": "t" if case["tenant"] == "salted" else ""}
    if case["lora"] != "none":
        of_request["lora"] = case["lora"]
    pool = pool_bytes(case, wanted)
    with source_of(case, folder, request) as tiers, ExitStack() as opened:
        if case["hit"] in ("disk", "store", "peer"):
            with closing(engine_of(case, wanted, tiers, pool)) as earlier:
                add(earlier, asked[0], case, "1", **of_request)
                earlier.run()
        engine = opened.enter_context(closing(make(case, wanted, tiers, pool)))
        if case["hit"] in ("device", "host"):
            add(engine, asked[0], case, "1", **of_request)
            engine.run()
        if case["hit"] == "host":
            stored(engine)  # pages in transfer cannot be evicted
            if not evict_all(engine):
                case = case | {"hit": "device"}
            stored(engine)
        if case["role"] == "whole":
            requests = [add(engine, one, case, case["samples"], **of_request) for one in asked]
            engine.run()
            check(case, requests, requests, wanted)
        else:
            peer = address_of(engine)
            decode = opened.enter_context(closing(make(case, wanted, [f"peer://{peer}?timeout=60"], pool)))
            requests = [
                add(decode, one, case, case["samples"], awaits_peer=peer, **of_request) for one in asked
            ]
            offers = [add(engine, one, case, "prefill", offers_pages=True, **of_request) for one in asked]
            run_both(engine, decode)
            check(case, requests, offers, wanted)
            check_hand_overs(case, decode)
            decode.cache.check()
        engine.cache.check()


def run_both(prefill: Engine, decode: Engine) -> None:
    """Run two engines until all requests have finished."""

    def is_done() -> bool:
        offload_of(prefill).poll()  # as a server does while it is idle
        return not prefill.busy and not decode.busy

    step_until(is_done, prefill, decode)


def check_hand_overs(case: Case, decode: Engine) -> None:
    """Check that pages came from the prefill worker. A tight pool of a prefill worker may evict pages too early."""
    stats = offload_of(decode).stats
    if case["pool"] == "roomy":
        assert (stats.hand_overs, stats.cut_hand_overs) == (3, 0)
    assert stats.handed_over_pages > 0


def check(case: Case, requests: list[Request], hits: list[Request], wanted: Wanted) -> None:
    """Check the tokens of all requests. Check that the requests `hits` found pages in the source of the case."""
    if case["role"] == "split":
        case = case | {"documents": "none"}  # documents of a hand-over are computed
    exact = wanted.tokens(case | {"documents": "none"})
    asked = prompts(case["family"])
    for prompt, request, tokens, computed in zip(asked, requests, wanted.tokens(case), exact, strict=True):
        assert {sample.finish_reason for sample in request.returned_samples} == {"length"}
        if case["documents"] == "reused" and case["pool"] == "tight":
            # If pages are missing, a document or its end is computed.
            is_clear = request.reused_tokens in (0, COPIED)
            if not is_clear or any(sample.preemptions for sample in request.family):
                continue
            tokens = tokens if request.reused_tokens else computed
        if case["dtype"] == "exact" or request.reused_tokens or outputs(request) == tokens:
            assert outputs(request) == tokens
        else:  # sums in another order may round a quantised value up instead of down
            errors = [wanted.logprob_error(case, prompt, sample) for sample in request.returned_samples]
            assert max(errors) < LOGPROB_ERROR, (outputs(request), tokens, errors)
    # Requests in a tight pool may have evicted the pages.
    if case["hit"] == "none" or case["pool"] == "tight":
        return
    assert any(request.cached_tokens for request in hits)
    if case["hit"] != "device":
        tier = STORES.get(case["hit"], case["hit"])
        assert sum(request.hits.get(tier, 0) for request in hits) > 0
    if case["documents"] == "reused":
        assert all(request.reused_tokens == COPIED for request in requests)


@pytest.mark.few(8)
@pytest.mark.parametrize("pair", EXCLUDED, ids=lambda pair: "-".join(level for _, level in sorted(pair)))
def test_a_refused_pair_is_refused_with_its_reason(pair: frozenset[tuple[str, str]], wanted: Wanted) -> None:
    """The other features have their default values."""
    case = {name: levels[0] for name, levels in FACTORS.items()} | {"pool": "roomy"} | dict(pair)
    text = "".join(".*" if part is None else re.escape(part) for part in _parts(REFUSED[EXCLUDED[pair]].text))
    tiers = {"host": ["host:1MiB"], "disk": ["disk:nowhere:1MiB"], "peer": ["peer://127.0.0.1:1"]}
    with pytest.raises(ValueError, match=text):
        start(case, wanted, tiers.get(case["hit"], []))


def start(case: Case, wanted: Wanted, tiers: list[str]) -> None:
    """Start an engine and queue a prompt."""
    engine = engine_of(case, wanted, tiers, 1 << 22)
    try:
        add(engine, prompts(case["family"])[0], case, "1")
    finally:
        engine.close()


def _parts(text: str) -> Iterator[str | None]:
    """Return the fixed parts of an error's text, and None for each value."""
    for place, part in enumerate(re.split(r"\{[^}]*\}", text)):
        if place:
            yield None
        yield part


def test_a_tight_pool_preempts(wanted: Wanted) -> None:
    for family in ("llama", "deepseek_v3", "gpt_oss"):
        case = {name: levels[0] for name, levels in FACTORS.items()} | {"pool": "tight", "chunk": "400"}
        case["family"] = family
        engine = engine_of(case, wanted, [], pool_bytes(case, wanted))
        requests = [add(engine, prompt, case, "3") for prompt in prompts(family)]
        engine.run()
        assert sum(sample.preemptions for request in requests for sample in request.family) > 0
        engine.close()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_log_probabilities_of_another_prompt_are_not_close(dtype: str, wanted: Wanted) -> None:
    case = {name: levels[0] for name, levels in FACTORS.items()} | {"dtype": dtype}
    asked = prompts("llama")
    with closing(engine_of(case, wanted, [], 1 << 22)) as engine:
        (sample,) = add(engine, asked[0], case, "1").returned_samples
        engine.run()
    assert wanted.logprob_error(case, asked[0], sample) < 0.001
    other = replace(asked[0], tokens=[*asked[0].tokens[:30], 7, *asked[0].tokens[31:]])
    assert wanted.logprob_error(case, other, sample) > LOGPROB_ERROR

"""Every pair of features at once: model family, source of the hit, dtype, speculation, samples, preemption, chunks,
tenants and adapters. A covering array contains every pair, and random cases contain larger combinations.

All requests of a case must give the tokens of a plain engine, which for exact dtypes are those of `generate()`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvloom.core import CacheControl, Tenant
from kvloom.engine import Engine, Request, SamplingParams
from kvloom.tiers import HostConfig, HostTier
from kvloom.tiers.host import SharedMemory
from kvloom.tiers.peer import PeerConfig, PeerServer
from tests.engines import make_engine
from tests.models.lora_adapters import greedy, merged, write_adapter
from tests.models.zoo import tiny

from .covering import all_pairs, pairs_of
from .test_lora import TARGETS as LORA_TARGETS
from .test_offload import PATIENT

NEW = 8
PREFIX = 64
ROOMY, TIGHT = 1 << 22, 1 << 16
TIGHT_POOLS = {"gemma3_text": 1 << 17, "qwen3_next": 1 << 18}  # their pages are larger
FACTORS = {
    "family": [
        "llama",
        "gemma3_text",
        "qwen3_next",
        "bamba",
        "deepseek_v3",
        "llama4_text",
        "gpt_oss",
        "gemma3n_text",
    ],
    "hit": ["none", "device", "host", "disk", "peer"],
    "dtype": ["exact", "int8", "fp8"],
    "speculate": ["off", "ngram", "suffix"],
    "samples": ["1", "3"],
    "pool": ["roomy", "tight"],
    "chunk": ["16", "400"],
    "tenant": ["none", "salted"],
    "lora": ["none", "adapter"],
}
EXCLUDED: dict[frozenset[tuple[str, str]], str] = {}
"""Pairs that are refused or impossible here, with the reason."""
RANDOM_CASES = 12


def cases() -> list[dict[str, str]]:
    found = all_pairs(FACTORS, EXCLUDED)
    rng = random.Random(7)
    while len(found) < len(all_pairs(FACTORS, EXCLUDED)) + RANDOM_CASES:
        case = {name: rng.choice(levels) for name, levels in FACTORS.items()}
        if not pairs_of(case) & EXCLUDED.keys():
            found.append(case)
    return found


CASES = cases()


def name_of(case: dict[str, str]) -> str:
    return "-".join(case.values())


def test_the_cases_contain_every_pair() -> None:
    covered = set().union(*map(pairs_of, CASES))
    for a, b in itertools.combinations(FACTORS, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            pair = frozenset(((a, x), (b, y)))
            assert (pair in covered) != (pair in EXCLUDED), pair


def prompts() -> list[list[int]]:
    """Three prompts with a common prefix. Their ends repeat, so that lookups find drafts."""
    rng = random.Random(3)
    prefix = [rng.randrange(3, 60) for _ in range(PREFIX)]
    return [prefix + [5 + place, 9, 11, 9, 11, 9][: 3 + place] for place in range(3)]


def pool_of(case: dict[str, str]) -> int:
    return ROOMY if case["pool"] == "roomy" else TIGHT_POOLS.get(case["family"], TIGHT)


def params(samples: str = "1") -> SamplingParams:
    """One greedy answer, or three drawn ones, which share the pages of the prompt."""
    drawn = {"n": int(samples), "temperature": 1.0, "seed": 11} if samples != "1" else {"temperature": 0.0}
    return SamplingParams(max_tokens=NEW, ignore_eos=True, **drawn)  # type: ignore[arg-type]


@cache
def model_of(family: str) -> Any:
    return tiny(family)


class References:
    """The expected tokens of each family, dtype, adapter and number of samples, computed once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, ...], list[list[list[int]]]] = {}

    def adapter(self, family: str) -> Path:
        folder = self._folder / family
        targets = LORA_TARGETS.get(family, ("q_proj", "o_proj"))
        return folder if folder.exists() else write_adapter(folder, model_of(family), targets)

    def tokens(self, family: str, dtype: str, lora: str, samples: str) -> list[list[list[int]]]:
        """Return the tokens by prompt and sample."""
        key = family, dtype, lora, samples
        if key not in self._known:
            model = model_of(family)
            if lora != "none":
                model = merged(model, self.adapter(family))
            if dtype == "exact" and samples == "1":
                self._known[key] = [[greedy(model, prompt, NEW)] for prompt in prompts()]
            else:
                engine = make_engine(deepcopy(model), 1 << 22, kv_dtype=None if dtype == "exact" else dtype)
                requests = [engine.add(prompt, params(samples)) for prompt in prompts()]
                engine.run()
                self._known[key] = [[sample.output for sample in request.family] for request in requests]
                engine.close()
        return self._known[key]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("adapters"))


@contextmanager
def peer_memory() -> Iterator[str]:
    """The memory of another process, as far as an engine can tell."""
    memory = SharedMemory(16 << 20)
    peer = PeerServer(HostTier(HostConfig(memory.size, 1 << 20), buffer=memory.buffer), PeerConfig(), memory)
    try:
        yield "peer://{}:{}?timeout=5".format(*peer.address)
    finally:
        peer.close()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_features_together(case: dict[str, str], references: References, tmp_path: Path) -> None:
    with peer_memory() as peer:
        tiers = {"host": ["host:8MiB"], "disk": [f"disk:{tmp_path / 'kv'}:64MiB"], "peer": [peer]}
        settings: dict[str, Any] = {
            "kv_dtype": None if case["dtype"] == "exact" else case["dtype"],
            "speculate": case["speculate"],
            "token_budget": int(case["chunk"]),
            "tiers": tiers.get(case["hit"], []),
            "offload": PATIENT,
            "tenants": [Tenant("t")],
        }
        if case["lora"] != "none":
            settings["lora"] = {"adapter": str(references.adapter(case["family"]))}

        def engine() -> Engine:
            return make_engine(deepcopy(model_of(case["family"])), pool_of(case), **settings)

        first, control = engine(), CacheControl(tenant="t" if case["tenant"] == "salted" else "")
        name = None if case["lora"] == "none" else case["lora"]
        if case["hit"] != "none":
            first.add(prompts()[0], params(), control, lora=name)
            first.run()
        if case["hit"] in ("disk", "peer"):
            first.close()
            first = engine()
        elif case["hit"] == "host":
            for place in range(12):  # other prompts evict the pages from the device
                first.add([3 + place, *range(3, 60), *range(3, 45)], params())
                first.run()
        requests = [first.add(each, params(case["samples"]), control, lora=name) for each in prompts()]
        first.run()
        check(case, requests, references)
        first.cache.check()
        first.close()


def check(case: dict[str, str], requests: list[Request], references: References) -> None:
    wanted = references.tokens(case["family"], case["dtype"], case["lora"], case["samples"])
    for request, tokens in zip(requests, wanted, strict=True):
        assert request.finish_reason == "length"
        assert [sample.output for sample in request.family] == tokens
    if (
        case["hit"] == "none" or case["pool"] == "tight"
    ):  # requests in a tight pool may have evicted the pages
        return
    assert any(request.cached_tokens for request in requests)
    if case["hit"] in ("disk", "peer"):
        assert sum(request.hits.get(case["hit"], 0) for request in requests) > 0


def test_a_tight_pool_preempts() -> None:
    for family in ("llama", "deepseek_v3", "gpt_oss"):
        engine = make_engine(deepcopy(model_of(family)), TIGHT)
        requests = [engine.add(prompt, params("3")) for prompt in prompts()]
        engine.run()
        assert sum(sample.preemptions for request in requests for sample in request.family) > 0
        engine.close()
